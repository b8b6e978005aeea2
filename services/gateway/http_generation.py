"""``/v1/chat/completions`` and ``/v1/completions``: from the decoded body to the whole answer or the stream of it.

Guarantees: what can be refused is refused before the first byte; a failure after it is one error event, and the stream
then ends without a finish and without ``[DONE]``; a client that leaves or does not read has its requests cancelled,
streamed or not.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.common.errors import EngineError, ErrorReason
from services.common.version import short_weight_version
from services.gateway.generation import PreparedRequest, TextDelta, TextEnd
from services.gateway.http_errors import error_body
from services.gateway.http_exchange import ClientGoneError, ExchangeIds, HttpSettings, until_gone
from services.gateway.openai_chunks import ChunkTemplate, UsageTally, usage_chunk
from services.gateway.openai_replies import AnswerHead, CollectedChoice, whole_answer
from services.gateway.openai_schema import RequestValidator
from services.gateway.ports import FinishReason
from services.gateway.sse import DONE, SseStream, data_event
from services.gateway.text_generator import TextGenerator
from services.gateway.validated_request import Reply, Surface, ValidatedRequest
from services.gateway.validation import unsupported

ID_PREFIXES = {Surface.CHAT: "chatcmpl-", Surface.COMPLETION: "cmpl-"}
"""What an answer's ``id`` begins with; the request's id follows."""


@dataclass(frozen=True, slots=True)
class PreparedAnswer:
    """Everything that an answer is made of.

    Attributes:
        surface: Which of the two routes.
        head: What is the same in all chunks.
        reply: What the client wants.
        prepared: One request a choice.
    """

    surface: Surface
    head: AnswerHead
    reply: Reply
    prepared: tuple[PreparedRequest, ...]


class OpenAiGeneration:
    """Serves both routes.

    Args:
        validator: Checks fields.
        generator: Runs requests.
        settings: The operator's decisions about HTTP.
        version: Of this build, for ``system_fingerprint``.
    """

    def __init__(
        self, validator: RequestValidator, generator: TextGenerator, settings: HttpSettings, version: str
    ) -> None:
        self._validator = validator
        self._generator = generator
        self._settings = settings
        self._version = version

    async def answer(
        self, surface: Surface, fields: Mapping[str, object], ids: ExchangeIds, headers: Mapping[str, str]
    ) -> Response:
        """Check a request and return the response that will run it.

        Args:
            surface: Which of the two routes.
            fields: The decoded body; a ``timeout`` header counts where it has none.
            ids: Of the exchange; a ``request_id`` in the body settles them.
            headers: Of the request, by lower-case name.

        Raises:
            EngineError: the request is refused.
        """
        try:
            answer = await self._prepare(surface, _with_timeout(fields, headers), ids, headers)
        except EngineError as error:
            self._generator.metrics.refused(surface, outcome=error.reason.value.lower())
            raise
        if answer.reply.is_stream:
            return StreamedAnswer(answer, self._generator, self._settings)
        return WholeAnswer(answer, self._generator)

    async def _prepare(
        self, surface: Surface, fields: Mapping[str, object], ids: ExchangeIds, headers: Mapping[str, str]
    ) -> PreparedAnswer:
        is_chat = surface is Surface.CHAT
        _refuse_idempotency_key(headers)
        validated = self._validator.chat(fields) if is_chat else self._validator.completion(fields)
        request_id = ids.name_generation(validated.request_id)
        prepared = await self._generator.prepare(validated, request_id)
        return PreparedAnswer(surface, self._head(surface, validated, request_id, prepared), validated.reply, prepared)

    def _head(
        self, surface: Surface, validated: ValidatedRequest, request_id: str, prepared: tuple[PreparedRequest, ...]
    ) -> AnswerHead:
        return AnswerHead(
            id=ID_PREFIXES[surface] + request_id,
            created_unix_s=self._generator.now_unix_s(),
            model=validated.model.name,
            system_fingerprint=f"treadle-{self._version}-{short_weight_version(validated.model.weight_version)}",
            seed=prepared[0].seed,
        )


class WholeAnswer(Response):
    """Runs a request to its end and sends the answer in one piece."""

    def __init__(self, answer: PreparedAnswer, generator: TextGenerator) -> None:
        super().__init__(media_type="application/json")
        self._answer = answer
        self._generator = generator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the exchange; a client that leaves cancels it."""
        answer = self._answer
        collected = await until_gone(receive, self._collect_all())
        body = whole_answer(answer.surface, answer.head, answer.reply, collected)
        await Response(body, media_type="application/json")(scope, receive, send)

    async def _collect_all(self) -> list[CollectedChoice]:
        async with asyncio.TaskGroup() as choices:
            tasks = [
                choices.create_task(self._collect(prepared), name=f"gateway.choice_{index}")
                for index, prepared in enumerate(self._answer.prepared)
            ]
        return [task.result() for task in tasks]

    async def _collect(self, prepared: PreparedRequest) -> CollectedChoice:
        texts: list[str] = []
        token_ids: list[int] = []
        async with self._generator.open(prepared) as generation:
            async for piece in generation:
                token_ids.extend(piece.token_ids)
                if isinstance(piece, TextEnd):
                    return CollectedChoice(prepared, "".join(texts), tuple(token_ids), _completed(piece))
                texts.append(piece.text)
        raise AssertionError("a generation ends with its end or an error")


class StreamedAnswer(Response):
    """Runs a request and sends its answer as it comes."""

    def __init__(self, answer: PreparedAnswer, generator: TextGenerator, settings: HttpSettings) -> None:
        super().__init__(media_type="text/event-stream")
        self._answer = answer
        self._generator = generator
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 -- ASGI's form
        """Serve the exchange; a client that leaves, or does not read, cancels it."""
        stream = SseStream(send, self._settings)
        try:
            await until_gone(receive, self._stream_all(stream))
        except EngineError as error:
            if not stream.is_started:
                raise
            if error.reason is ErrorReason.SLOW_READER:
                return  # whatever is written now is not read either; the server closes what is not complete
            await stream.close(data_event(error_body(error)))
        except ClientGoneError:
            return
        finally:
            stream.release()

    async def _stream_all(self, stream: SseStream) -> None:
        answer = self._answer
        tally = UsageTally(answer.prepared)
        async with asyncio.TaskGroup() as group:
            keeper = group.create_task(stream.keep_alive(), name="gateway.keep_alive")
            async with asyncio.TaskGroup() as choices:
                for index in range(len(answer.prepared)):
                    choices.create_task(self._stream(stream, index, tally), name=f"gateway.choice_{index}")
            keeper.cancel()
        usage = usage_chunk(answer.head, answer.surface, tally) if answer.reply.includes_usage else b""
        await stream.close(usage + DONE)

    async def _stream(self, stream: SseStream, index: int, tally: UsageTally) -> None:
        answer = self._answer
        prepared = answer.prepared[index]
        has_ids = len(answer.prepared) == 1
        chunks = ChunkTemplate(answer.head, answer.reply, prepared, index, tally, has_ids=has_ids)
        opening = chunks.start()
        async with self._generator.open(prepared) as generation:
            async for piece in generation:
                event = chunks.text(piece) if isinstance(piece, TextDelta) else chunks.finish(_completed(piece))
                await stream.write(opening + event)
                opening = b""


def _completed(end: TextEnd) -> TextEnd:
    """Pass an end that is one for the client.

    Raises:
        EngineError: CLIENT_CANCELLED, when somebody cancelled the request by its id.
    """
    if end.reason is FinishReason.CANCELLED:
        raise EngineError(ErrorReason.CLIENT_CANCELLED, "The request was cancelled.")
    return end


def _with_timeout(fields: Mapping[str, object], headers: Mapping[str, str]) -> Mapping[str, object]:
    """Let the ``timeout`` header, in seconds, stand in for the field; what is no number is refused like the field."""
    header = headers.get("timeout")
    if header is None or fields.get("timeout") is not None:
        return fields
    try:
        return {**fields, "timeout": float(header)}
    except ValueError:
        return {**fields, "timeout": header}


def _refuse_idempotency_key(headers: Mapping[str, str]) -> None:
    """Refuse what would be a false promise: a retry under the key would run again.

    Raises:
        EngineError: UNSUPPORTED_PARAMETER.
    """
    if "idempotency-key" in headers:
        raise unsupported("Idempotency-Key", "is not served yet; leave the header out")
