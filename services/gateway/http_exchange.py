"""What every HTTP exchange needs besides its route: ids, the request's body, and notice of a client that left.

Guarantees: a body is read piece by piece and never beyond its limit; whatever bytes arrive, the outcome is an object or
a 4xx that says what to change; a client that leaves ends the work for it.
"""

import asyncio
import json
import math
import uuid
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.errors import EngineError, ErrorReason
from services.gateway.validation import invalid, is_sane_id

T = TypeVar("T")

_MAX_EXPLAINED_BYTES = 256 << 10
"""Largest malformed body that is parsed a second time, which holds up the event loop for about 10 ms a MiB."""


_ALWAYS_SERVED = frozenset({"/health", "/ready", "/metrics"})


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """What the operator decides about HTTP."""

    max_body_bytes: int = 4 << 20
    """Largest request body, in bytes. A million tokens fit as text; decoding more would hold up everybody else."""

    keep_alive_s: float = 15.0
    """Longest silence on a stream, in seconds; below the idle limits of usual proxies."""

    max_exchanges: int = 4096
    """Most HTTP exchanges at a time; more are answered 429."""

    write_timeout_s: float = 60.0
    """How long a client may leave one write of a stream unread, in seconds, before its request is cancelled."""


class ClientGoneError(Exception):
    """The client closed the connection; nobody is left to answer."""


@dataclass(slots=True)
class ExchangeIds:
    """Ids of one exchange.

    Attributes:
        request_id: Names the generation in the mesh unless the client chose a name in the body.
        echoed_id: The value of ``x-request-id`` on the answer: the client's own header if it is sane.
        is_client_chosen: Whether the echoed id came with the request.
    """

    request_id: str
    echoed_id: str
    is_client_chosen: bool

    def name_generation(self, client_id: str | None) -> str:
        """Settle the generation's id; the header echoes it unless the client sent a header of its own."""
        if client_id is not None:
            self.request_id = client_id
            if not self.is_client_chosen:
                self.echoed_id = client_id
        return self.request_id


class RequestIdMiddleware:
    """Gives every exchange its ids and puts ``x-request-id`` on every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one exchange."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        fresh = uuid.uuid4().hex
        given = Headers(scope=scope).get("x-request-id", "")
        is_client_chosen = is_sane_id(given)
        ids = ExchangeIds(fresh, given if is_client_chosen else fresh, is_client_chosen)
        scope.setdefault("state", {})["ids"] = ids

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", ids.echoed_id.encode("ascii"))]
            await send(message)

        await self._app(scope, receive, send_with_id)


class ExchangeLimit:
    """Refuses exchanges beyond a bound at once, so that memory is bounded whatever clients do.

    Args:
        app: Serves what is let in.
        max_exchanges: Most at a time; liveness and metrics are always served.
        refuse: Answers the others.
    """

    def __init__(self, app: ASGIApp, max_exchanges: int, refuse: ASGIApp) -> None:
        self._app = app
        self._max_exchanges = max_exchanges
        self._refuse = refuse
        self._num_exchanges = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or refuse one exchange."""
        if self._num_exchanges >= self._max_exchanges and scope["path"] not in _ALWAYS_SERVED:
            await self._refuse(scope, receive, send)
            return
        self._num_exchanges += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_exchanges -= 1


def exchange_ids(scope: Scope) -> ExchangeIds:
    """Return the ids that the middleware gave an exchange."""
    ids = scope["state"]["ids"]
    assert isinstance(ids, ExchangeIds)
    return ids


async def read_fields(scope: Scope, receive: Receive, max_bytes: int) -> dict[str, object]:
    """Read a JSON object from an exchange's body.

    Raises:
        HTTPException: 415, for another media type or a content coding.
        EngineError: PAYLOAD_TOO_LARGE; INVALID_REQUEST, when the body is no JSON object.
        ClientGoneError: the client left before the body was complete.
    """
    headers = Headers(scope=scope)
    _check_media_type(headers)
    body = await _read_body(headers, receive, max_bytes)
    return decode_fields(body)


def decode_fields(body: bytes) -> dict[str, object]:
    """Decode a JSON object; of a key that comes twice the last counts.

    Raises:
        EngineError: INVALID_REQUEST; it names the field where a number or a text cannot be represented.
    """
    if not body.strip():
        raise EngineError(ErrorReason.INVALID_REQUEST, "The body is empty; send a JSON object.")
    try:
        fields = msgspec.json.decode(body)
    except RecursionError:
        raise EngineError(ErrorReason.INVALID_REQUEST, "The body is nested too deeply.") from None
    except msgspec.MsgspecError as error:
        problem = str(error)
        raise (_explain(body, problem) if len(body) <= _MAX_EXPLAINED_BYTES else _malformed(problem)) from None
    if not isinstance(fields, dict):
        raise EngineError(ErrorReason.INVALID_REQUEST, "The body must be a JSON object.")
    return fields


async def until_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Do ``work`` unless the client leaves first, in which case it is cancelled.

    Args:
        receive: Of the exchange, its body read.
        work: Not started yet.

    Raises:
        ClientGoneError: the client left.
        Exception: what ``work`` raised; of several at once an ``EngineError``.
    """
    try:
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(_watch(receive), name="gateway.client_watcher")
            result = await work
            watcher.cancel()
    except ExceptionGroup as errors:
        raise first_error(errors) from errors
    return result


def first_error(errors: ExceptionGroup[Exception]) -> Exception:
    """Pick the exception of a group that tells most: a client that left, then the catalogue's, then any."""
    leaves: list[Exception] = []
    pending: list[Exception] = [errors]
    while pending:
        error = pending.pop()
        if isinstance(error, ExceptionGroup):
            pending.extend(error.exceptions)
        else:
            leaves.append(error)
    return min(leaves, key=lambda error: (not isinstance(error, ClientGoneError), not isinstance(error, EngineError)))


async def _watch(receive: Receive) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError


def _check_media_type(headers: Headers) -> None:
    coding = headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise HTTPException(415, f"Content-Encoding {coding[:32]!r} is not served; send the body as it is.")
    kind, _, parameters = headers.get("content-type", "application/json").partition(";")
    kind = kind.strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise HTTPException(415, f"Content-Type {kind[:64]!r} is not served; send application/json.")
    charset = parameters.strip().lower().removeprefix("charset=").strip('"')
    if charset not in ("", "utf-8", "utf8"):
        raise HTTPException(415, "Only the charset utf-8 is served.")


async def _read_body(headers: Headers, receive: Receive, max_bytes: int) -> bytes:
    declared = headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and (len(declared) > 18 or int(declared) > max_bytes):
        raise _too_large(max_bytes)
    pieces: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        piece = message.get("body", b"")
        num_bytes += len(piece)
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        pieces.append(piece)
        if not message.get("more_body", False):
            return b"".join(pieces)


def _too_large(max_bytes: int) -> EngineError:
    text = f"The body is larger than {max_bytes} bytes; send less."
    return EngineError(ErrorReason.PAYLOAD_TOO_LARGE, text, max_body_bytes=str(max_bytes))


def _explain(body: bytes, problem: str) -> EngineError:
    """Say why a body is refused; the slower and laxer parser of the standard library can often name the field."""
    try:
        value = json.loads(body.decode("utf-8"), parse_int=_parse_int)
    except UnicodeDecodeError as error:
        return EngineError(ErrorReason.INVALID_REQUEST, f"The body is not UTF-8 (byte {error.start}).")
    except (ValueError, RecursionError):
        return _malformed(problem)
    pending: list[tuple[str, object]] = [("", value)]
    while pending:
        path, item = pending.pop()
        if isinstance(item, dict):
            pending.extend((f"{path}.{key}" if path else key, child) for key, child in item.items())
        elif isinstance(item, list):
            pending.extend((f"{path}[{index}]", child) for index, child in enumerate(item))
        elif isinstance(item, float) and not math.isfinite(item):
            return invalid(_printable(path), "must be a finite number of ordinary size")
        elif isinstance(item, str) and _printable(item) != item:
            return invalid(_printable(path), "is not valid Unicode: it holds a lone surrogate")
    return _malformed(problem)


def _malformed(problem: str) -> EngineError:
    return EngineError(ErrorReason.INVALID_REQUEST, f"The body is not valid JSON: {problem}.")


def _parse_int(digits: str) -> int | float:
    """Read an integer; one beyond Python's own limit counts as infinite."""
    return int(digits) if len(digits) <= 4000 else math.inf


def _printable(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")
