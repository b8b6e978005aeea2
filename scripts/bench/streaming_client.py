"""A client of OpenAI-compatible streaming that costs little: raw asyncio streams, HTTP/1.1 chunks and SSE by hand.

A load generator shares the machine with the server, so each microsecond here is one that the server lacks. One
connection carries one request after another.
"""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Final, Self
from urllib.parse import urlsplit

_READ_LIMIT: Final = 1 << 20
_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"


class RequestFailed(Exception):
    """The server refused, broke off, or answered with something else; the text says what."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server and one of its paths.

    Attributes:
        host: Name or address.
        port: TCP port.
        path: Such as ``/v1/completions``.
    """

    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, base_url: str, path: str) -> Self:
        """Split ``http://HOST:PORT[/PREFIX]``.

        Raises:
            ValueError: another scheme, or no host.
        """
        parts = urlsplit(base_url)
        if parts.scheme != "http" or parts.hostname is None:
            raise ValueError(f"the base URL must look like http://HOST:PORT, not {base_url!r}")
        return cls(parts.hostname, parts.port or 80, parts.path.rstrip("/") + path)


@dataclass(slots=True)
class Outcome:
    """What happened to one request. Times are ``time.perf_counter`` readings in seconds.

    Attributes:
        sent_s: When the request was written.
        event_s: Arrival of each event that carried text.
        end_s: When the stream was over.
        num_prompt_tokens: As the server counted, or None when it did not say.
        num_output_tokens: As the server counted, or the number of events when it did not say.
        error: Why it failed, or None.
    """

    sent_s: float
    event_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    num_prompt_tokens: int | None = None
    num_output_tokens: int = 0
    error: str | None = None


class StreamingClient:
    """One connection to a server; opened when needed and again after a failure.

    Args:
        endpoint: Where to post.
        timeout_s: Longest time for one request.
    """

    def __init__(self, endpoint: Endpoint, timeout_s: float) -> None:
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, body: bytes) -> Outcome:
        """Send one request and read its stream to the end; failures are part of the outcome."""
        outcome = Outcome(sent_s=time.perf_counter())
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._exchange(body, outcome)
        except (RequestFailed, OSError, EOFError, ValueError, KeyError, TimeoutError) as error:
            outcome.error = f"{type(error).__name__}: {error}"
            self.close()
        outcome.end_s = time.perf_counter()
        if outcome.num_output_tokens == 0:
            outcome.num_output_tokens = len(outcome.event_s)
        return outcome

    async def post_whole(self, body: bytes) -> int:
        """Send one request that is not streamed; return the output tokens that its usage tells.

        Raises:
            RequestFailed: the server refused it.
            OSError, EOFError, ValueError, KeyError, TimeoutError: the connection or the answer broke.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                reader, status, headers = await self._request(body)
                text = await reader.readexactly(int(headers["content-length"]))
        except BaseException:
            self.close()
            raise
        if status != 200:
            raise RequestFailed(f"HTTP {status}: {text.decode(errors='replace')[:300]}")
        return int(json.loads(text)["usage"]["completion_tokens"])

    def close(self) -> None:
        """Drop the connection."""
        if self._connection is not None:
            self._connection[1].close()
            self._connection = None

    async def _exchange(self, body: bytes, outcome: Outcome) -> None:
        reader, status, headers = await self._request(body, outcome)
        is_chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        if status != 200:
            text = await _read_error(reader, headers, is_chunked)
            raise RequestFailed(f"HTTP {status}: {text}")
        if not is_chunked:
            raise RequestFailed("the answer is not streamed in chunks")
        await _read_events(reader, outcome)
        if headers.get("connection", "").lower() == "close":
            self.close()

    async def _request(
        self, body: bytes, outcome: Outcome | None = None
    ) -> tuple[asyncio.StreamReader, int, dict[str, str]]:
        """Write a request and read the head of its answer."""
        if self._connection is None:
            self._connection = await asyncio.open_connection(
                self._endpoint.host, self._endpoint.port, limit=_READ_LIMIT
            )
        reader, writer = self._connection
        if outcome is not None:
            outcome.sent_s = time.perf_counter()
        writer.write(_request_bytes(self._endpoint, body))
        return reader, *await _read_head(reader)


async def abandon_stream(endpoint: Endpoint, body: bytes, num_chunks: int) -> None:
    """Send a streamed request on a connection of its own, read so many chunks of the answer, and leave.

    Raises:
        RequestFailed: the server refused it.
        OSError, EOFError, ValueError: the connection or the answer broke.
    """
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port, limit=_READ_LIMIT)
    try:
        writer.write(_request_bytes(endpoint, body))
        if num_chunks == 0:
            await writer.drain()
            return
        status, _ = await _read_head(reader)
        if status != 200:
            raise RequestFailed(f"HTTP {status}")
        for _ in range(num_chunks):
            if not await _read_chunk(reader):
                return
    finally:
        writer.close()


def _request_bytes(endpoint: Endpoint, body: bytes) -> bytes:
    head = (
        f"POST {endpoint.path} HTTP/1.1\r\nHost: {endpoint.host}:{endpoint.port}\r\n"
        f"Content-Type: application/json\r\nAccept: text/event-stream\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    block = await reader.readuntil(b"\r\n\r\n")
    first, *lines = block.decode("latin-1").split("\r\n")
    headers = dict(line.split(":", 1) for line in lines if line)
    return int(first.split()[1]), {name.strip().lower(): value.strip() for name, value in headers.items()}


async def _read_error(reader: asyncio.StreamReader, headers: dict[str, str], is_chunked: bool) -> str:
    data = b""
    if is_chunked:
        while chunk := await _read_chunk(reader):
            data += chunk
    else:
        data = await reader.readexactly(int(headers.get("content-length", "0")))
    return data.decode(errors="replace")[:300]


async def _read_chunk(reader: asyncio.StreamReader) -> bytes:
    size = int((await reader.readuntil(b"\r\n")).split(b";", 1)[0], 16)
    return (await reader.readexactly(size + 2))[:-2]


async def _read_events(reader: asyncio.StreamReader, outcome: Outcome) -> None:
    """Read the whole stream; events may be split over chunks and several may share one."""
    rest = b""
    is_done = False
    while chunk := await _read_chunk(reader):
        now_s = time.perf_counter()
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if not line.startswith(_DATA):
                continue
            data = line[len(_DATA) :].strip()
            if data == _DONE:
                is_done = True
            else:
                _take_event(json.loads(data), now_s, outcome)
    if not is_done:
        raise RequestFailed("the stream ended without [DONE]")


def _take_event(event: dict[str, object], now_s: float, outcome: Outcome) -> None:
    if "error" in event:
        raise RequestFailed(json.dumps(event["error"]))
    choices = event.get("choices")
    if isinstance(choices, list) and choices:
        choice = choices[0]
        if choice.get("text") or (choice.get("delta") or {}).get("content"):
            outcome.event_s.append(now_s)
    usage = event.get("usage")
    if isinstance(usage, dict):
        outcome.num_prompt_tokens = usage["prompt_tokens"]
        outcome.num_output_tokens = usage["completion_tokens"]
