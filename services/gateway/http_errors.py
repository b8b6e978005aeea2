"""Failures in the form of the OpenAI API: ``{"error": {"message", "type", "param", "code"}}``.

Guarantees: every status that a client can see has this body; 429 and 503 say when to come back; nothing of an
unexpected exception reaches a client.
"""

import logging
from http import HTTPStatus

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from services.common.errors import EngineError, ErrorReason
from services.gateway.http_exchange import ClientGoneError, exchange_ids

logger = logging.getLogger(__name__)

RETRY_AFTER_S = "1"
"""Default of ``Retry-After``: a step takes a fraction of this, a restart of a service little more."""

_CODES = {ErrorReason.PROMPT_TOO_LONG: "context_length_exceeded"}
"""Where OpenAI's code, which client libraries look for, is not the reason in lower case."""


class ErrorDetail(msgspec.Struct, frozen=True):
    """The inner object."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct, frozen=True):
    """The outer object."""

    error: ErrorDetail


def error_body(error: EngineError) -> bytes:
    """Encode a failure, as a body or as the data of an event."""
    code = _CODES.get(error.reason, error.reason.value.lower())
    detail = ErrorDetail(error.message, _error_type(error.http_status), error.metadata.get("field"), code)
    return msgspec.json.encode(ErrorBody(detail))


def error_response(error: EngineError) -> Response:
    """Turn a failure into an answer."""
    headers = {}
    if error.http_status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        headers["retry-after"] = error.metadata.get("retry_after_s", RETRY_AFTER_S)
    return Response(error_body(error), error.http_status, headers, "application/json")


async def handle_engine_error(_request: Request, error: Exception) -> Response:
    """Answer for a handler that raised an ``EngineError``."""
    assert isinstance(error, EngineError)
    return error_response(error)


async def handle_http_exception(_request: Request, error: Exception) -> Response:
    """Answer for a route or method that does not exist, or a media type that is not served."""
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    code = status.phrase.lower().replace(" ", "_")
    detail = ErrorDetail(error.detail, _error_type(status), None, code)
    return Response(msgspec.json.encode(ErrorBody(detail)), status, error.headers, "application/json")


async def handle_client_gone(_request: Request, _error: Exception) -> Response:
    """Satisfy the framework; nobody reads this."""
    return Response(status_code=499)


async def handle_unexpected(request: Request, error: Exception) -> Response:
    """Answer for a bug; the text of the exception stays in the log."""
    ids = exchange_ids(request.scope)
    logger.error("request failed", exc_info=error, extra={"fields": {"request_id": ids.echoed_id}})
    detail = ErrorDetail(f"Internal error; the log has more under {ids.echoed_id}.", "server_error", None, "internal")
    return Response(msgspec.json.encode(ErrorBody(detail)), 500, media_type="application/json")


HANDLERS = {
    EngineError: handle_engine_error,
    HTTPException: handle_http_exception,
    ClientGoneError: handle_client_gone,
    Exception: handle_unexpected,
}


def _error_type(status: int) -> str:
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"
