"""HTTP/1.1 as the gateway speaks it: one exchange at a time on a connection, each received in bounded time and size.

What uvicorn leaves open is closed here: it queues pipelined requests and then no longer notices that the client has
left; it waits for ever for the rest of a request; it takes headers of any size; its own refusals are plain text.
"""

import asyncio
import uuid
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 64 << 10
"""Largest request line and headers together; browsers and clients stay below 16 KiB."""

RECEIVE_TIMEOUT_S = 30.0
"""Longest time from a request's first byte, or a new connection, to its last byte."""


class HttpProtocol(HttpToolsProtocol):
    """Uvicorn's protocol without pipelining, and with limits on what it takes in."""

    def connection_made(self, transport: Any) -> None:
        """Expect a request in time."""
        super().connection_made(transport)
        self._num_header_bytes = 0
        self._is_in_header = True
        self._deadline: asyncio.TimerHandle | None = None
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        """Expect nothing more."""
        self._stop_expecting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what arrived, unless the headers have grown beyond the limit."""
        if self._is_in_header:
            self._num_header_bytes += len(data)
            if self._num_header_bytes > MAX_HEADER_BYTES and not self._ends_header(data):
                self._refuse(431, f"Request line and headers exceed {MAX_HEADER_BYTES} bytes.")
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        """Begin to receive a request."""
        super().on_message_begin()
        self._is_in_header = True
        if self._deadline is None:
            self._expect()

    def on_headers_complete(self) -> None:
        """Start an exchange, or end the connection if the last one still runs.

        No client in use pipelines; whoever does is cut off, which cancels what runs.
        """
        self._is_in_header = False
        self._num_header_bytes = 0
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()
            return
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Have received all of a request."""
        self._stop_expecting()
        self._is_in_header = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer malformed HTTP as every other error is answered."""
        self._refuse(400, msg)

    def _ends_header(self, data: bytes) -> bool:
        # A body may follow the headers in the same piece of data; only the headers count.
        return b"\r\n\r\n" in data and data.index(b"\r\n\r\n") + self._num_header_bytes - len(data) <= MAX_HEADER_BYTES

    def _expect(self) -> None:
        self._deadline = self.loop.call_later(RECEIVE_TIMEOUT_S, self._give_up)

    def _stop_expecting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        if not self.transport.is_closing():
            self._refuse(408, f"The request did not arrive within {RECEIVE_TIMEOUT_S:g} s.")

    def _refuse(self, status: int, message: str) -> None:
        """Answer at once and close; nothing of the request is served."""
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": "malformed_http"}
        body = msgspec.json.encode({"error": error})
        head = (
            f"HTTP/1.1 {status} Bad Request\r\ncontent-type: application/json\r\nx-request-id: {uuid.uuid4().hex}\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode("ascii") + body)
        self.transport.close()
