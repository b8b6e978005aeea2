"""The gRPC surface of the gateway: messages become the same fields that HTTP has, and go the same way from there.

Guarantees: one validation, one generation path and one set of names for both surfaces; a call that ends early, for
whatever reason, cancels its request.
"""

import asyncio
import secrets
from collections.abc import Mapping
from typing import Any

import grpc

from services.common.errors import EngineError, ErrorReason
from services.common.rpc.server import RpcServer
from services.gateway.generation import PreparedRequest, TextDelta, TextEnd
from services.gateway.openai_schema import MAX_TIMEOUT_S, RequestValidator
from services.gateway.ports import FinishReason, Priority, ServedModel
from services.gateway.remote import RemoteScheduler
from services.gateway.text_generator import TextGenerator
from services.gateway.tokenizer import Tokenizer
from services.gateway.validated_request import Surface, ValidatedRequest
from services.gateway.validation import FieldReader, invalid
from treadle.common.v1 import generation_pb2, sampling_pb2
from treadle.gateway.v1 import generation_service_pb2 as pb2
from treadle.gateway.v1 import generation_service_pb2_grpc as pb2_grpc

_FINISH_REASONS = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: generation_pb2.FINISH_REASON_CANCELLED,
}

_PRIORITIES = {
    generation_pb2.PRIORITY_CLASS_UNSPECIFIED: None,
    generation_pb2.PRIORITY_CLASS_VIP: Priority.VIP.value,
    generation_pb2.PRIORITY_CLASS_NORMAL: Priority.NORMAL.value,
    generation_pb2.PRIORITY_CLASS_BATCH: Priority.BATCH.value,
}

Context = grpc.aio.ServicerContext[Any, Any]


class GenerationServicer(pb2_grpc.GenerationServiceServicer):
    """Serves ``treadle.gateway.v1.GenerationService``.

    Args:
        scheduler: Knows the models and cancels requests.
        tokenizer: The served model's.
        validator: Checks fields.
        generator: Prepares and opens generations.
    """

    def __init__(
        self,
        scheduler: RemoteScheduler,
        tokenizer: Tokenizer,
        validator: RequestValidator,
        generator: TextGenerator,
    ) -> None:
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._validator = validator
        self._generator = generator

    def register_on(self, server: RpcServer) -> None:
        """Serve on ``server``, and let its reflection tell so."""
        pb2_grpc.add_GenerationServiceServicer_to_server(self, server.server)
        server.add_service_names([pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name])

    async def Generate(self, request: pb2.GenerateRequest, context: Context) -> None:
        """Stream the answer to one prompt, all its samples side by side."""
        request_id = request.request_id or f"gen-{secrets.token_hex(12)}"
        validated, prepared = await self._prepare(request, request_id, context)
        await context.write(_started(request_id, prepared[0], validated.model))
        # grpc.aio takes one write at a time.
        writes = asyncio.Lock()

        async def stream(sample: PreparedRequest) -> None:
            async with self._generator.open(sample, yields_every_token=True) as generation:
                async for piece in generation:
                    for response in _responses(piece, sample, validated.model, self._scheduler.epoch()):
                        async with writes:
                            await context.write(response)

        try:
            async with asyncio.TaskGroup() as samples:
                for sample in prepared:
                    samples.create_task(stream(sample), name="gateway.sample")
        except* EngineError as errors:
            raise errors.exceptions[0] from errors

    async def Cancel(self, request: pb2.CancelRequest, context: Context) -> pb2.CancelResponse:  # noqa: ARG002
        """End a generation of this gateway."""
        if not self._scheduler.cancel_all(request.request_id):
            text = f"No generation {request.request_id!r} is running here."
            raise EngineError(ErrorReason.UNKNOWN_REQUEST, text, field="request_id", request_id=request.request_id)
        return pb2.CancelResponse()

    async def Tokenize(self, request: pb2.TokenizeRequest, context: Context) -> pb2.TokenizeResponse:  # noqa: ARG002
        """Turn text into token ids."""
        model = self._model(request)
        adds_special_tokens = request.add_special_tokens if request.HasField("add_special_tokens") else True
        token_ids = await self._tokenizer.encode_async(
            request.text, add_special_tokens=adds_special_tokens, field="text"
        )
        return pb2.TokenizeResponse(token_ids=token_ids, max_model_len=model.max_model_len)

    async def Detokenize(
        self,
        request: pb2.DetokenizeRequest,
        context: Context,  # noqa: ARG002
    ) -> pb2.DetokenizeResponse:
        """Turn token ids into text."""
        self._model(request)
        self._tokenizer.check_token_ids(request.token_ids, "token_ids")
        return pb2.DetokenizeResponse(text=self._tokenizer.decode(list(request.token_ids), skip_special_tokens=False))

    async def ListModels(self, request: pb2.ListModelsRequest, context: Context) -> pb2.ListModelsResponse:  # noqa: ARG002
        """Name the models served."""
        response = pb2.ListModelsResponse()
        for model in self._scheduler.models():
            response.models.add(name=model.name, weight_version=model.weight_version, max_model_len=model.max_model_len)
        return response

    def _model(self, request: pb2.TokenizeRequest | pb2.DetokenizeRequest) -> ServedModel:
        return self._validator.model(FieldReader({"model": request.model or None}))

    async def _prepare(
        self, request: pb2.GenerateRequest, request_id: str, context: Context
    ) -> tuple[ValidatedRequest, tuple[PreparedRequest, ...]]:
        try:
            validated = self._validate(request, context)
            prepared = await self._generator.prepare(validated, request_id)
        except EngineError as error:
            self._generator.metrics.refused(Surface.GRPC, outcome=error.reason.value.lower())
            raise
        return validated, prepared

    def _validate(self, request: pb2.GenerateRequest, context: Context) -> ValidatedRequest:
        _refuse_unserved(request)
        fields = _common_fields(request)
        time_left_s = context.time_remaining()
        if time_left_s is not None:
            fields["timeout"] = min(max(time_left_s, 0.001), MAX_TIMEOUT_S)
        match request.WhichOneof("prompt"):
            case "text":
                return self._validator.completion(fields | {"prompt": request.text}, Surface.GRPC)
            case "tokens":
                fields["prompt"] = list(request.tokens.token_ids)
                return self._validator.completion(fields, Surface.GRPC)
            case "chat":
                messages = [{"role": message.role, "content": message.content} for message in request.chat.messages]
                return self._validator.chat(fields | {"messages": messages}, Surface.GRPC)
            case _:
                raise invalid("prompt", "is required: text, tokens or chat")


def _refuse_unserved(request: pb2.GenerateRequest) -> None:
    unserved = {
        "idempotency_key": bool(request.idempotency_key),
        "resume_from_seq": request.resume_from_seq != 0,
        "stop_conditions.min_tokens": request.stop_conditions.min_tokens != 0,
    }
    for field, is_set in unserved.items():
        if is_set:
            text = f"{field} is not served yet; leave it out."
            raise EngineError(ErrorReason.UNSUPPORTED_PARAMETER, text, field=field)


def _common_fields(request: pb2.GenerateRequest) -> dict[str, object]:
    """Return what the message says under the names of the HTTP surface; what is absent stays absent."""
    stop = request.stop_conditions
    fields: dict[str, object] = {
        "request_id": request.request_id or None,
        "model": request.model or None,
        "priority": _PRIORITIES.get(request.priority, "unknown"),
        "stop": list(stop.stop),
        "stop_token_ids": list(stop.stop_token_ids),
    }
    fields |= _present(request.sampling, {name: name for name in ("temperature", "top_p", "top_k", "min_p", "seed")})
    renamed = {"max_tokens": "max_tokens", "ignore_eos": "ignore_eos"}
    fields |= _present(stop, renamed | {"include_stop_in_output": "include_stop_str_in_output"})
    fields |= _present(request, {"skip_special_tokens": "skip_special_tokens", "n": "n"})
    return fields


def _present(
    message: sampling_pb2.SamplingParams | sampling_pb2.StopConditions | pb2.GenerateRequest,
    name_by_field: Mapping[str, str],
) -> dict[str, object]:
    values = {field.name: value for field, value in message.ListFields()}
    # An optional scalar that was set to its zero is listed too, since it has presence.
    return {name: values[field] for field, name in name_by_field.items() if field in values}


def _started(request_id: str, prepared: PreparedRequest, model: ServedModel) -> pb2.GenerateResponse:
    return pb2.GenerateResponse(
        started=pb2.Started(
            request_id=request_id,
            model=model.name,
            weight_version=model.weight_version,
            seed=prepared.request.sampling.seed,
            num_prompt_tokens=len(prepared.request.prompt_token_ids),
        )
    )


def _responses(
    piece: TextDelta | TextEnd, sample: PreparedRequest, model: ServedModel, scheduler_epoch: int
) -> list[pb2.GenerateResponse]:
    sample_index = sample.request.sampling.sample_index
    if isinstance(piece, TextDelta):
        return [_delta(piece.seq, piece.token_ids, piece.text, model, scheduler_epoch, sample_index)]
    responses = []
    if piece.token_ids:
        first = piece.usage.num_output_tokens - len(piece.token_ids)
        responses.append(_delta(first, piece.token_ids, "", model, scheduler_epoch, sample_index))
    finished = pb2.Finished(
        sample_index=sample_index,
        reason=_FINISH_REASONS[piece.reason],
        usage=generation_pb2.Usage(
            num_prompt_tokens=piece.usage.num_prompt_tokens,
            num_output_tokens=piece.usage.num_output_tokens,
            num_cached_tokens=piece.usage.num_cached_tokens,
            num_draft_tokens=piece.usage.num_draft_tokens,
            num_accepted_tokens=piece.usage.num_accepted_tokens,
        ),
    )
    if isinstance(piece.stop_reason, str):
        finished.stop = piece.stop_reason
    elif piece.stop_reason is not None:
        finished.stop_token_id = piece.stop_reason
    responses.append(pb2.GenerateResponse(finished=finished))
    return responses


def _delta(
    seq: int, token_ids: tuple[int, ...], text: str, model: ServedModel, scheduler_epoch: int, sample_index: int
) -> pb2.GenerateResponse:
    return pb2.GenerateResponse(
        delta=pb2.Delta(
            seq=seq,
            token_ids=token_ids,
            text=text,
            scheduler_epoch=scheduler_epoch,
            weight_version=model.weight_version,
            sample_index=sample_index,
        )
    )
