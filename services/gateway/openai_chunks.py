"""Chunks of a streamed answer, cut from a byte template per choice so that a token costs only its own text.

The form never varies: for a chat one role chunk, then chunks with text and never an empty one, then one finish chunk
without text; for a completion the same without the role chunk. ``id:`` is the output position of the last token that a
chunk accounts for, so that a reader knows where it stands; it is left out where one stream carries several choices.
"""

import msgspec

from services.gateway.generation import PreparedRequest, TextDelta, TextEnd
from services.gateway.openai_replies import AnswerHead, usage_reply
from services.gateway.sse import data_event
from services.gateway.validated_request import Reply, Surface

_encode = msgspec.json.encode


class UsageTally:
    """Sums the usage of all choices of a stream."""

    def __init__(self, prepared: tuple[PreparedRequest, ...]) -> None:
        self._num_prompt_tokens = sum(len(item.request.prompt_token_ids) for item in prepared if item.is_first_sample)
        self._is_first_sample = [item.is_first_sample for item in prepared]
        self._num_output_tokens = [0] * len(prepared)
        self._num_cached_tokens = [0] * len(prepared)

    def record(self, index: int, num_output_tokens: int, num_cached_tokens: int = 0) -> None:
        """Set what a choice has cost so far."""
        self._num_output_tokens[index] = num_output_tokens
        # The samples after the first share its prompt by design; that is no hit of the client's.
        self._num_cached_tokens[index] = num_cached_tokens if self._is_first_sample[index] else 0

    def encoded(self) -> bytes:
        """Encode the usage so far."""
        outputs, cached = sum(self._num_output_tokens), sum(self._num_cached_tokens)
        return _encode(usage_reply(self._num_prompt_tokens, outputs, cached))


class ChunkTemplate:
    """Makes the events of one choice.

    Args:
        head: The same in all chunks.
        reply: What the client wants in them.
        prepared: The choice's request.
        index: The choice's index.
        tally: The stream's usage.
        has_ids: Whether events carry positions.
    """

    def __init__(
        self, head: AnswerHead, reply: Reply, prepared: PreparedRequest, index: int, tally: UsageTally, *, has_ids: bool
    ) -> None:
        self._reply = reply
        self._index = index
        self._tally = tally
        self._has_ids = has_ids
        self._is_chat = prepared.surface is Surface.CHAT
        self._prompt_token_ids = prepared.request.prompt_token_ids if reply.returns_token_ids else None
        self._head = _head_bytes(head, prepared.surface)
        self._choice = b'"choices":[{"index":%d' % index
        if not self._is_chat:
            self._choice += b',"seed":%d' % prepared.seed
        self._before_text = self._head + self._choice + (b',"delta":{"content":' if self._is_chat else b',"text":')
        self._after_text = (b"}" if self._is_chat else b"") + b',"logprobs":null,"finish_reason":null'
        # The whole rest of a chunk that nothing else varies in.
        self._is_plain = not (reply.returns_token_ids or reply.has_continuous_usage)
        self._tail = b"}]" + (b',"usage":null' if reply.includes_usage else b"") + b"}\n\n"

    def start(self) -> bytes:
        """Return what opens the choice: the role chunk of a chat, nothing for a completion."""
        if not self._is_chat:
            return b""
        delta = b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        prompt = b""
        if self._prompt_token_ids is not None:
            prompt = b'"prompt_token_ids":' + _encode(self._prompt_token_ids) + b","
            self._prompt_token_ids = None
        return b"data: " + self._head + prompt + self._choice + delta + self._end_of_chunk()

    def text(self, delta: TextDelta) -> bytes:
        """Return the chunk of some text."""
        self._tally.record(self._index, delta.num_output_tokens)
        line = b"id: %d\ndata: " % (delta.num_output_tokens - 1) if self._has_ids else b"data: "
        if self._is_plain:
            return line + self._before_text + _encode(delta.text) + self._after_text + self._tail
        chunk = line + self._before_text + _encode(delta.text) + self._after_text
        return chunk + self._token_ids(delta.token_ids) + self._end_of_chunk()

    def finish(self, end: TextEnd) -> bytes:
        """Return the chunk that ends the choice; it has no text."""
        self._tally.record(self._index, end.usage.num_output_tokens, end.usage.num_cached_tokens)
        line = b"id: %d\ndata: " % (end.usage.num_output_tokens - 1) if self._has_ids else b"data: "
        reasons = b',"logprobs":null,"finish_reason":"%s","stop_reason":%s' % (
            end.reason.value.encode(),
            _encode(end.stop_reason),
        )
        empty = b',"delta":{}' if self._is_chat else b',"text":""'
        chunk = line + self._head + self._choice + empty + reasons
        return chunk + self._token_ids(end.token_ids) + self._end_of_chunk()

    def _token_ids(self, token_ids: tuple[int, ...]) -> bytes:
        if not self._reply.returns_token_ids:
            return b""
        field = b',"token_ids":' + _encode(token_ids)
        if self._prompt_token_ids is not None:
            field += b',"prompt_token_ids":' + _encode(self._prompt_token_ids)
            self._prompt_token_ids = None
        return field

    def _end_of_chunk(self) -> bytes:
        if self._reply.has_continuous_usage:
            return b'}],"usage":' + self._tally.encoded() + b"}\n\n"
        return self._tail


def usage_chunk(head: AnswerHead, surface: Surface, tally: UsageTally) -> bytes:
    """Return the chunk that ``include_usage`` asks for: no choices, the usage of all."""
    return data_event(_head_bytes(head, surface) + b'"choices":[],"usage":' + tally.encoded() + b"}")


def _head_bytes(head: AnswerHead, surface: Surface) -> bytes:
    kind = "chat.completion.chunk" if surface is Surface.CHAT else "text_completion"
    fields = {
        "id": head.id,
        "object": kind,
        "created": head.created_unix_s,
        "model": head.model,
        "system_fingerprint": head.system_fingerprint,
        "seed": head.seed,
    }
    return _encode(fields)[:-1] + b","
