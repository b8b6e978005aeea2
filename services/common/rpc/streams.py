"""Outgoing streams: the only place that starts or iterates a streaming call.

Leaving an ``async for`` over a grpc.aio call by ``break`` or by an exception does not cancel the call, so a bare loop
leaks it. :func:`open_stream` cancels on every exit, and :func:`read_messages` turns transport failures into errors.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

import grpc

from services.common.errors import ErrorReason
from services.common.rpc.status import from_rpc_error

Received = TypeVar("Received", covariant=True)
Sent = TypeVar("Sent", contravariant=True)
Message = TypeVar("Message")


class ReadableCall(Protocol[Received]):
    """The part of a grpc.aio call that reading needs."""

    async def read(self) -> Received:
        """Return the next message, or ``grpc.aio.EOF``."""
        ...

    def cancel(self) -> bool:
        """End the call."""
        ...


class BidiCall(ReadableCall[Received], Protocol[Sent, Received]):
    """The part of a bidirectional grpc.aio call that the mesh uses."""

    async def write(self, request: Sent) -> None:
        """Send one message; waits for flow control."""
        ...

    async def done_writing(self) -> None:
        """Tell the peer that no more messages follow."""
        ...


AnyCall = TypeVar("AnyCall", bound=ReadableCall[object])


@asynccontextmanager
async def open_stream(start: Callable[[], AnyCall]) -> AsyncIterator[AnyCall]:
    """Start a streaming call and cancel it on exit, whatever the exit is.

    Args:
        start: Starts the call, such as ``lambda: stub.RunSteps()``.
    """
    call = start()
    try:
        yield call
    finally:
        call.cancel()


async def read_messages(call: ReadableCall[Message], unavailable: ErrorReason) -> AsyncIterator[Message]:
    """Yield messages until the peer closes the stream.

    Args:
        call: An open call.
        unavailable: Reason of the error when the transport fails.

    Raises:
        EngineError: the stream ended with a status other than OK.
    """
    while True:
        try:
            message = await call.read()
        except grpc.RpcError as error:
            raise from_rpc_error(error, unavailable) from error
        if message is grpc.aio.EOF:
            return
        yield message


async def write_message(call: BidiCall[Message, object], message: Message, unavailable: ErrorReason) -> None:
    """Send one message.

    Raises:
        EngineError: the stream is broken.
    """
    try:
        await call.write(message)
    except grpc.RpcError as error:
        raise from_rpc_error(error, unavailable) from error
