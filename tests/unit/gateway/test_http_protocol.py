"""The server's protocol over a real socket: pipelining, endless headers, malformed and half-sent requests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn

from services.gateway import http_protocol
from services.gateway.http_protocol import HttpProtocol
from services.gateway.service import HttpServer
from tests.mesh import free_ports

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


class App:
    """Holds every exchange open until the client leaves, or answers at once."""

    def __init__(self, *, is_holding: bool) -> None:
        self.is_holding = is_holding
        self.is_running = asyncio.Event()
        self.told: list[str] = []

    async def __call__(self, scope, receive, send):
        while (message := await receive()).get("more_body"):
            pass
        self.is_running.set()
        if self.is_holding:
            message = await receive()
            self.told.append(message["type"])
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


@asynccontextmanager
async def connected(app: App) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    (port,) = free_ports(1)
    config = uvicorn.Config(app, host="127.0.0.1", port=port, http=HttpProtocol, lifespan="off", log_config=None)
    server = HttpServer(config)
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        tasks.create_task(server.run())
        while not server.started:
            await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        yield reader, writer
        writer.close()
        await server.stop()


async def test_client_that_pipelines_is_cut_off_and_its_exchange_told():
    app = App(is_holding=True)
    async with connected(app) as (reader, writer):
        writer.write(REQUEST)
        await app.is_running.wait()
        writer.write(REQUEST)
        assert await reader.read() == b""
        while not app.told:
            await asyncio.sleep(0.01)
    assert app.told == ["http.disconnect"]


async def test_connection_serves_one_exchange_after_the_other():
    async with connected(App(is_holding=False)) as (reader, writer):
        for _ in range(3):
            writer.write(REQUEST)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("sent", "status"),
    [(b"\x00garbage\r\n\r\n", b"400"), (b"GET / HTTP/1.1\r\nX: " + b"a" * 70_000, b"431")],
)
async def test_malformed_request_is_answered_in_json_and_closed(sent: bytes, status: bytes):
    async with connected(App(is_holding=False)) as (reader, writer):
        writer.write(sent)
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert b"application/json" in answer
    assert b"x-request-id" in answer
    assert b'"error"' in answer


async def test_large_body_does_not_count_as_header():
    async with connected(App(is_holding=False)) as (reader, writer):
        body = b"x" * 200_000
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"POST / HTTP/1.1\r\nHost: x\r\ncontent-length: 9\r\n\r\nabc"])
async def test_request_that_does_not_arrive_is_answered_and_closed(sent: bytes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_protocol, "RECEIVE_TIMEOUT_S", 0.05)
    async with connected(App(is_holding=False)) as (reader, writer):
        writer.write(sent)
        assert (await reader.read()).startswith(b"HTTP/1.1 408")
