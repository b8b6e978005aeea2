"""The server interceptor that turns errors into statuses; handlers raise and never call ``abort``.

Guarantees: an :class:`EngineError` becomes a status with its ErrorInfo; any other exception becomes INTERNAL without
its text, and is logged; cancellation passes through untouched, since swallowing it leaks native memory in grpc.aio.
"""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
from grpc_status import rpc_status

from services.common.errors import EngineError, ErrorReason
from services.common.rpc.status import to_status

logger = logging.getLogger(__name__)

Handler = Callable[[Any, Any], Any]


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler of a server."""

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the handler with its errors translated."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        handler_fields: Any = handler  # a named tuple at run time; the stubs only know its attributes
        return handler_fields._replace(
            unary_unary=_wrap(handler.unary_unary, method),
            unary_stream=_wrap(handler.unary_stream, method),
            stream_unary=_wrap(handler.stream_unary, method),
            stream_stream=_wrap(handler.stream_stream, method),
        )


def _wrap(handler: Handler | None, method: str) -> Handler | None:
    if handler is None:
        return None
    if inspect.isasyncgenfunction(handler):

        async def generate(request: object, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[object]:
            try:
                async with aclosing(handler(request, context)) as messages:
                    async for message in messages:
                        yield message
            except Exception as error:
                await _abort(context, error, method)

        return generate

    async def call(request: object, context: grpc.aio.ServicerContext[Any, Any]) -> object:
        try:
            return await handler(request, context)
        except Exception as error:
            await _abort(context, error, method)
            raise

    return call


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception, method: str) -> None:
    if isinstance(error, grpc.aio.AbortError | asyncio.CancelledError):
        raise error
    if not isinstance(error, EngineError):
        logger.error("handler failed", exc_info=error, extra={"fields": {"method": method}})
        error = EngineError(ErrorReason.INVARIANT_VIOLATED, "internal error; the server's log has the details")
    await context.abort_with_status(rpc_status.to_status(to_status(error)))
