"""Outgoing streams: the only place that starts or iterates a streaming call.

Leaving an ``async for`` over a grpc.aio call by ``break`` or by an exception does not cancel the call, so a bare loop
leaks it. :func:`open_stream` cancels on every exit, and :func:`read_messages` turns transport failures into errors.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

import grpc

from services.common.errors import EngineError, ErrorReason
from services.common.rpc.outbox import Outbox
from services.common.rpc.status import from_rpc_error

GREETING_TIMEOUT_S = 5.0
"""Longest wait, in seconds, for the first message of a stream."""

Received = TypeVar("Received")
ReceivedCo = TypeVar("ReceivedCo", covariant=True)
Sent = TypeVar("Sent")
SentContra = TypeVar("SentContra", contravariant=True)


class ReadableCall(Protocol[ReceivedCo]):
    """The part of a grpc.aio call that reading needs."""

    async def read(self) -> ReceivedCo:
        """Return the next message, or ``grpc.aio.EOF``."""
        ...

    def cancel(self) -> bool:
        """End the call."""
        ...


class BidiCall(ReadableCall[ReceivedCo], Protocol[SentContra, ReceivedCo]):
    """The part of a bidirectional grpc.aio call that the mesh uses."""

    async def write(self, request: SentContra) -> None:
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


async def read_messages(call: ReadableCall[Received], unavailable: ErrorReason) -> AsyncIterator[Received]:
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


async def read_greeting(call: ReadableCall[Received], unavailable: ErrorReason) -> Received:
    """Return the first message of a stream, which the peer owes at once.

    Raises:
        EngineError: the peer refused the stream, closed it, or did not answer within ``GREETING_TIMEOUT_S``.
    """
    try:
        async with asyncio.timeout(GREETING_TIMEOUT_S):
            async for message in read_messages(call, unavailable):
                return message
    except TimeoutError as error:
        raise EngineError(unavailable, f"no answer within {GREETING_TIMEOUT_S} s") from error
    raise EngineError(unavailable, "the peer closed the stream")


async def write_message(call: BidiCall[Sent, object], message: Sent, unavailable: ErrorReason) -> None:
    """Send one message.

    Raises:
        EngineError: the stream is broken.
    """
    try:
        await call.write(message)
    except grpc.RpcError as error:
        raise from_rpc_error(error, unavailable) from error
    except asyncio.InvalidStateError as error:  # grpc.aio's way of saying that the call has ended
        raise EngineError(unavailable, "the stream has ended") from error


async def exchange(
    call: BidiCall[Sent, Received],
    outbox: Outbox[Sent],
    on_message: Callable[[Received], None],
    unavailable: ErrorReason,
) -> None:
    """Write what ``outbox`` has and hand over what arrives, until the stream ends.

    Args:
        call: An open bidirectional call, past its greeting.
        outbox: Source of the messages to send.
        on_message: Called for each message received, in order; must not block.
        unavailable: Reason of the error when the transport fails.

    Raises:
        EngineError: the stream broke, or ``on_message`` raised it.
    """

    async def write_all() -> None:
        while True:
            await write_message(call, await outbox.next(), unavailable)

    try:
        async with asyncio.TaskGroup() as tasks:
            writer = tasks.create_task(write_all())
            async for message in read_messages(call, unavailable):
                on_message(message)
            writer.cancel()
    except* EngineError as errors:
        # The reader's and the writer's errors have one cause, so the first tells enough.
        raise errors.exceptions[0] from errors


async def serve_exchange(
    context: grpc.aio.ServicerContext[Received, Sent],
    request_iterator: AsyncIterator[Received],
    outbox: Outbox[Sent],
    on_message: Callable[[Received], None],
) -> None:
    """Do as :func:`exchange` does, from the side that serves the stream, until the peer closes it.

    Raises:
        EngineError: ``on_message`` raised it.
    """

    async def write_all() -> None:
        while True:
            await context.write(await outbox.next())

    try:
        async with asyncio.TaskGroup() as tasks:
            writer = tasks.create_task(write_all())
            async for message in request_iterator:
                on_message(message)
            writer.cancel()
    except* EngineError as errors:
        raise errors.exceptions[0] from errors
