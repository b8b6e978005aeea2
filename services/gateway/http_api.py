"""The HTTP surface: routes, their order of duties, and the small answers.

Guarantees: every answer, errors of routing included, is JSON in OpenAI's form with ``x-request-id`` (``/metrics`` is
Prometheus text); liveness never depends on the rest of the mesh, readiness always does. ``build_http_api`` returns a
pure ASGI application; the server that runs it is the caller's.
"""

from collections.abc import Mapping

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from services.common.errors import EngineError, ErrorReason
from services.gateway.http_errors import HANDLERS, RETRY_AFTER_S, error_response
from services.gateway.http_exchange import ExchangeLimit, HttpSettings, RequestIdMiddleware, exchange_ids, read_fields
from services.gateway.http_generation import ID_PREFIXES, OpenAiGeneration
from services.gateway.metrics import CONTENT_TYPE, GatewayMetrics
from services.gateway.openai_prompts import chat_prompt
from services.gateway.openai_schema import RequestValidator
from services.gateway.ports import SchedulerPort, ServedModel
from services.gateway.text_generator import TextGenerator
from services.gateway.timeline import timelines_json
from services.gateway.tokenizer import Tokenizer
from services.gateway.validated_request import ChatPrompt, Surface, TextPrompt
from services.gateway.validation import FieldReader, invalid, is_int_list, shown

_MAX_TEXT_LENGTH = 2**31
_MAX_CONTEXTS = 16
"""Contexts of the model that one call of tokenize or detokenize may take; more would hold up everybody else."""


class HttpApi:
    """The handlers.

    Args:
        scheduler: Knows models and readiness.
        tokenizer: The served model's.
        generator: Runs requests.
        settings: The operator's decisions about HTTP.
        version: Of this build.
    """

    def __init__(
        self,
        scheduler: SchedulerPort,
        tokenizer: Tokenizer,
        generator: TextGenerator,
        settings: HttpSettings,
        version: str,
    ) -> None:
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._generator = generator
        self._metrics: GatewayMetrics = generator.metrics
        self._settings = settings
        self._version = version
        self._validator = RequestValidator(scheduler, tokenizer)
        self._generation = OpenAiGeneration(self._validator, generator, settings, version)

    def routes(self) -> list[Route]:
        """Return all routes."""
        return [
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/models", self.list_models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.get_model, methods=["GET"]),
            Route("/v1/requests/{request_id}/timeline", self.get_timeline, methods=["GET"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/ready", self.ready, methods=["GET"]),
            Route("/version", self.get_version, methods=["GET"]),
            Route("/metrics", self.get_metrics, methods=["GET"]),
        ]

    async def chat_completions(self, request: Request) -> Response:
        """Answer a conversation."""
        return await self._generate(Surface.CHAT, request)

    async def completions(self, request: Request) -> Response:
        """Continue one or several prompts."""
        return await self._generate(Surface.COMPLETION, request)

    async def list_models(self, _request: Request) -> Response:
        """Name the served models."""
        return _json({"object": "list", "data": [_model_object(model) for model in self._scheduler.models()]})

    async def get_model(self, request: Request) -> Response:
        """Describe one model."""
        return _json(_model_object(self._validator.model(FieldReader({"model": request.path_params["name"]}))))

    async def get_timeline(self, request: Request) -> Response:
        """Tell what happened to a request of the caller's tenant, and to each of its choices."""
        request_id = request.path_params["request_id"]
        timelines = await self._scheduler.explain(request_id, self._generator.tenant)
        for prefix in ID_PREFIXES.values():
            if not timelines and request_id.startswith(prefix):  # the id of an answer, not of the request
                timelines = await self._scheduler.explain(request_id.removeprefix(prefix), self._generator.tenant)
        if not timelines:
            text = f"No request {request_id!r} is live or among the last that ended here; use the request_id you sent."
            raise EngineError(ErrorReason.UNKNOWN_REQUEST, text, field="request_id", request_id=request_id)
        return _json(timelines_json(request_id, timelines))

    async def tokenize(self, request: Request) -> Response:
        """Turn a prompt or messages into token ids."""
        reader = await self._read(request)
        model = self._validator.model(reader)
        if reader.value("messages") is not None:
            token_ids = await self._generator.tokenize(_chat(reader))
        else:
            text = reader.string("prompt", max_length=_MAX_TEXT_LENGTH)
            if text is None:
                raise invalid("prompt", "or messages is required")
            adds_special_tokens = reader.boolean("add_special_tokens", default=True)
            token_ids = await self._generator.tokenize(
                TextPrompt(text, adds_special_tokens), max_num_tokens=_MAX_CONTEXTS * model.max_model_len
            )
        answer: dict[str, object] = {
            "count": len(token_ids),
            "max_model_len": model.max_model_len,
            "tokens": token_ids,
        }
        if reader.boolean("return_token_strs", default=False):
            answer["token_strs"] = [self._tokenizer.token_text(token_id) for token_id in token_ids]
        return _json(answer)

    async def detokenize(self, request: Request) -> Response:
        """Turn token ids into text, special tokens included."""
        reader = await self._read(request)
        model = self._validator.model(reader)
        token_ids = reader.value("tokens")
        if not is_int_list(token_ids):
            raise invalid("tokens", f"must be a list of token ids, not {shown(token_ids)}")
        if len(token_ids) > _MAX_CONTEXTS * model.max_model_len:
            raise invalid(
                "tokens", f"must have at most {_MAX_CONTEXTS * model.max_model_len} ids, not {len(token_ids)}"
            )
        self._tokenizer.check_token_ids(token_ids, "tokens")
        return _json({"prompt": self._tokenizer.decode(token_ids, skip_special_tokens=False)})

    async def health(self, _request: Request) -> Response:
        """Say that this process answers."""
        return _json({"status": "ok"})

    async def ready(self, _request: Request) -> Response:
        """Say whether a request would be served now, and if not, why."""
        if self._scheduler.is_ready():
            return _json({"status": "ready"})
        body = {"status": "unready", "reasons": list(self._scheduler.unready_reasons())}
        return _json(body, status=503, headers={"retry-after": RETRY_AFTER_S})

    async def get_version(self, _request: Request) -> Response:
        """Name the build."""
        return _json({"version": self._version})

    async def get_metrics(self, _request: Request) -> Response:
        """Return the metrics in text format 0.0.4, whatever the scraper prefers."""
        return Response(self._metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def _generate(self, surface: Surface, request: Request) -> Response:
        try:
            fields = await self._fields(request)
        except EngineError as error:
            self._metrics.refused(surface, outcome=error.reason.value.lower())
            raise
        except HTTPException:
            self._metrics.refused(surface, outcome=ErrorReason.INVALID_REQUEST.value.lower())
            raise
        return await self._generation.answer(surface, fields, exchange_ids(request.scope), request.headers)

    async def _fields(self, request: Request) -> dict[str, object]:
        return await read_fields(request.scope, request.receive, self._settings.max_body_bytes)

    async def _read(self, request: Request) -> FieldReader:
        return FieldReader(await self._fields(request))


def build_http_api(
    scheduler: SchedulerPort, tokenizer: Tokenizer, generator: TextGenerator, settings: HttpSettings, version: str
) -> ASGIApp:
    """Return the application; arguments as of :class:`HttpApi`."""
    api = HttpApi(scheduler, tokenizer, generator, settings, version)
    app = Starlette(routes=api.routes(), exception_handlers=HANDLERS)
    app.router.redirect_slashes = False  # a redirect would be an answer without a body
    too_many = EngineError(
        ErrorReason.QUEUE_FULL,
        f"This gateway serves {settings.max_exchanges} requests at a time; try again shortly.",
        limit=str(settings.max_exchanges),
    )
    return RequestIdMiddleware(ExchangeLimit(app, settings.max_exchanges, error_response(too_many)))


def _chat(reader: FieldReader) -> ChatPrompt:
    return chat_prompt(
        reader.value("messages"),
        adds_generation_prompt=reader.boolean("add_generation_prompt", default=True),
        adds_special_tokens=reader.boolean("add_special_tokens", default=False),
    )


def _model_object(model: ServedModel) -> dict[str, object]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created_unix_s,
        "owned_by": "treadle",
        "max_model_len": model.max_model_len,
    }


def _json(value: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")
