"""A stream of server-sent events over ASGI.

Guarantees: nothing is sent before the first write, so that a failure before it is still an ordinary answer; one write
is one send; a silent stream says something every ``keep_alive_s``; a client that does not read for ``write_timeout_s``
ends the stream with SLOW_READER. Writers of several choices may share one stream.
"""

import asyncio

from starlette.types import Send

from services.common.errors import EngineError, ErrorReason
from services.gateway.http_exchange import ClientGoneError, HttpSettings
from services.gateway.patience import Patience

DONE = b"data: [DONE]\n\n"

_KEEP_ALIVE = b": keep-alive\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def data_event(data: bytes) -> bytes:
    """Frame one event without an id; ``data`` has no line break."""
    return b"data: " + data + b"\n\n"


class SseStream:
    """One response; opened by its first write, closed by :meth:`close`."""

    def __init__(self, send: Send, settings: HttpSettings) -> None:
        self._send = send
        self._settings = settings
        self._lock = asyncio.Lock()
        self._patience = Patience()
        self._last_write_s = asyncio.get_running_loop().time()
        self.is_started = False

    async def write(self, events: bytes) -> None:
        """Send whole events.

        Raises:
            EngineError: SLOW_READER; the connection is of no use then.
            ClientGoneError: the client left.
        """
        await self._write(events, is_last=False)

    async def close(self, events: bytes) -> None:
        """Send the last events and end the response; raises as :meth:`write`."""
        await self._write(events, is_last=True)

    def release(self) -> None:
        """Let go of what the stream holds on the loop; nothing is written any more."""
        self._patience.close()

    async def keep_alive(self) -> None:
        """Write a comment whenever the stream was silent for too long, until cancelled; raises as :meth:`write`."""
        while True:
            due_s = self._last_write_s + self._settings.keep_alive_s
            delay_s = due_s - asyncio.get_running_loop().time()
            if delay_s > 0:
                await asyncio.sleep(delay_s)
            else:
                await self.write(_KEEP_ALIVE)

    async def _write(self, events: bytes, *, is_last: bool) -> None:
        async with self._lock:
            try:
                with self._patience.within(self._settings.write_timeout_s):
                    if not self.is_started:
                        self.is_started = True
                        await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                    await self._send({"type": "http.response.body", "body": events, "more_body": not is_last})
            except TimeoutError:
                message = "The client did not read its stream in time; the request was cancelled."
                raise EngineError(ErrorReason.SLOW_READER, message) from None
            except OSError as error:
                raise ClientGoneError from error
            self._last_write_s = asyncio.get_running_loop().time()
