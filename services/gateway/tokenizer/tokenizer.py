"""The tokenizer of the served model: text to token ids and back, and what the model says about its special tokens.

Owns the fast tokenizer of the ``tokenizers`` library and a small thread pool for long texts. Ids that no token has are
decoded to nothing; text that is no valid Unicode is refused. Built by ``load_tokenizer``; used by every surface.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import tokenizers

from services.common.errors import EngineError, ErrorReason
from services.gateway.tokenizer.pieces import PieceCoding

_MAX_INLINE_CHARACTERS = 2048
"""Longest text encoded on the event loop. The slowest text measured (random, non-Latin) takes 1.7 µs a character."""

_NUM_ENCODER_THREADS = 2
"""Few, since encoding is pure computation: more threads would only take cores from the services beside this one."""


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """What a model directory or file says about its tokenizer beyond the mapping itself.

    Attributes:
        coding: How vocabulary pieces spell bytes.
        eos_token_ids: Every id that ends a generation.
        bos_token_id: The id that starts a text, if there is one.
        special_token_texts: Text of the named special tokens (``bos_token``, ``eos_token``, ...) for chat templates.
        chat_template: Source of the Jinja template, if the model has one.
        model_max_length: The longest text in tokens that the tokenizer claims to be good for; a hint.
        num_embeddings: Rows of the model's embedding; tokens beyond them exist in the tokenizer only, and are refused.
    """

    coding: PieceCoding
    eos_token_ids: frozenset[int] = frozenset()
    bos_token_id: int | None = None
    special_token_texts: Mapping[str, str] = field(default_factory=dict)
    chat_template: str | None = None
    model_max_length: int | None = None
    num_embeddings: int | None = None


class Tokenizer:
    """Encodes and decodes for one model.

    Thread-safe: the library's object is not changed after construction, and the cache of token bytes only grows by
    values that do not depend on who computes them.

    Args:
        backend: The library's tokenizer; owned by this object from now on.
        facts: What the model says besides.
    """

    def __init__(self, backend: tokenizers.Tokenizer, facts: TokenizerFacts) -> None:
        # A tokenizer.json may carry the truncation and padding of somebody's training run.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._facts = facts
        ids = _id_set(backend)
        limit = facts.num_embeddings
        self._has_unknown_ids = limit is not None and max(ids) >= limit
        self._ids = frozenset(i for i in ids if i < limit) if limit is not None and self._has_unknown_ids else ids
        self._vocab_size = max(self._ids) + 1
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._special_id_by_text = {added[token_id].content: token_id for token_id in self._special_ids}
        self._bytes_by_id = {token_id: token.content.encode() for token_id, token in added.items()}
        self._longest_token = max((len(token) for token in backend.get_vocab()), default=1)
        self._pool: ThreadPoolExecutor | None = None

    @property
    def vocab_size(self) -> int:
        """One more than the largest id of a real token; rows that only pad the embedding are not counted."""
        return self._vocab_size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every id that ends a generation."""
        return self._facts.eos_token_ids

    @property
    def bos_token_id(self) -> int | None:
        """The id that starts a text, if there is one."""
        return self._facts.bos_token_id

    @property
    def special_token_texts(self) -> Mapping[str, str]:
        """Text of the named special tokens, by the name under which chat templates know them."""
        return self._facts.special_token_texts

    @property
    def chat_template(self) -> str | None:
        """Source of the model's Jinja chat template, if it has one."""
        return self._facts.chat_template

    @property
    def model_max_length(self) -> int | None:
        """The longest text in tokens that the tokenizer claims to be good for; a hint, not a limit."""
        return self._facts.model_max_length

    @property
    def drops_leading_space(self) -> bool:
        """Whether decoding a whole text removes the one space that encoding put before it (SentencePiece)."""
        return self._facts.coding.drops_leading_space

    def has(self, token_id: int) -> bool:
        """Tell whether an id belongs to a token."""
        return token_id in self._ids

    def is_special(self, token_id: int) -> bool:
        """Tell whether an id is a control token, which ``skip_special_tokens`` leaves out of text."""
        return token_id in self._special_ids

    def special_token_id(self, text: str) -> int | None:
        """Find the control token spelt exactly so.

        A stop string that spells a control token never shows in text that skips them; it has to stop by this id.
        """
        return self._special_id_by_text.get(text)

    def check_token_ids(self, token_ids: Iterable[int], field: str) -> None:
        """Check ids that a client sent.

        Raises:
            EngineError: INVALID_REQUEST naming ``field``, when an id belongs to no token.
        """
        ids = self._ids
        for index, token_id in enumerate(token_ids):
            if token_id not in ids:
                raise EngineError(
                    ErrorReason.INVALID_REQUEST,
                    f"{field}[{index}] is {token_id}, which is no token id of this model; ids are 0 to "
                    f"{self.vocab_size - 1}.",
                    field=field,
                    index=str(index),
                    token_id=str(token_id),
                    vocab_size=str(self.vocab_size),
                )

    def encode(self, text: str, *, add_special_tokens: bool, field: str = "prompt") -> list[int]:
        """Turn text into token ids on the calling thread. Special tokens spelt out in the text are recognised.

        Args:
            text: Any valid Unicode.
            add_special_tokens: Whether to put BOS and EOS where the model wants them. False for rendered chat
                templates, which spell them out.
            field: The request field the text came from, for the error.

        Raises:
            EngineError: INVALID_REQUEST naming ``field``, when the text holds a lone surrogate.
        """
        _check_unicode(text, field)
        return self._checked(self._backend.encode(text, add_special_tokens=add_special_tokens).ids, field)

    def min_num_tokens(self, text: str) -> int:
        """Give a lower bound of the number of tokens of ``text`` in no time: no token spells more than the longest."""
        return -(-len(text) // self._longest_token)

    async def encode_async(self, text: str, *, add_special_tokens: bool, field: str = "prompt") -> list[int]:
        """Do what ``encode`` does without holding up the event loop: long texts go to a thread.

        Cancellation: the thread finishes its text and the result is dropped.
        """
        if len(text) <= _MAX_INLINE_CHARACTERS:
            return self.encode(text, add_special_tokens=add_special_tokens, field=field)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_NUM_ENCODER_THREADS, thread_name_prefix="encode")
        _check_unicode(text, field)
        loop = asyncio.get_running_loop()
        return self._checked(await loop.run_in_executor(self._pool, self._encode_long, text, add_special_tokens), field)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Turn a whole text's ids into text; bytes that are not UTF-8 become U+FFFD, unknown ids nothing."""
        special = self._special_ids if skip_special_tokens else frozenset()
        data = b"".join([self.token_bytes(token_id) for token_id in token_ids if token_id not in special])
        if self.drops_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Give the bytes that a token adds to a text; none for an unknown id."""
        data = self._bytes_by_id.get(token_id)
        if data is None:
            if token_id not in self._ids:
                return b""  # not cached: ids come from outside and must not grow this process
            piece = self._backend.id_to_token(token_id)
            data = b"" if piece is None else self._facts.coding.to_bytes(piece)
            self._bytes_by_id[token_id] = data
        return data

    def token_text(self, token_id: int) -> str:
        """Give a single token as text, for people; U+FFFD stands for bytes that are no whole character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def _checked(self, token_ids: list[int], field: str) -> list[int]:
        """Refuse a text that spells a token which the model does not have."""
        if self._has_unknown_ids:
            self.check_token_ids(token_ids, field)
        return token_ids

    def _encode_long(self, text: str, add_special_tokens: bool) -> list[int]:
        # The library releases the interpreter lock for batches only, even of one. This is also a third faster.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def close(self) -> None:
        """Stop the encoder threads; texts that wait are dropped."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _id_set(backend: tokenizers.Tokenizer) -> range | frozenset[int]:
    """All ids of real tokens; a range when they have no gaps, which is quicker to establish and to test."""
    num_tokens = backend.get_vocab_size(with_added_tokens=True)
    if num_tokens == 0:
        raise EngineError(ErrorReason.MODEL_LOAD_FAILED, "The tokenizer's vocabulary is empty.")
    if all(backend.id_to_token(token_id) is not None for token_id in range(num_tokens)):
        return range(num_tokens)  # as many tokens as ids below num_tokens, so that none lies above
    return frozenset(backend.get_vocab(with_added_tokens=True).values())


def _check_unicode(text: str, field: str) -> None:
    """Refuse text that cannot be UTF-8.

    Raises:
        EngineError: INVALID_REQUEST, when there is a lone surrogate.
    """
    if text.isascii():
        return  # known without a look at the text
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise EngineError(
            ErrorReason.INVALID_REQUEST,
            f"{field} is not valid Unicode: there is a lone surrogate at character {error.start}.",
            field=field,
            position=str(error.start),
        ) from None
