"""The server's protocol over a real socket: a client that pipelines is cut off, and what ran for it is cancelled."""

import asyncio

import uvicorn

from services.gateway.http_protocol import HttpProtocol
from services.gateway.service import HttpServer
from tests.mesh import free_ports

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def test_client_that_pipelines_is_cut_off_and_its_exchange_told():
    told: list[str] = []
    is_running = asyncio.Event()

    async def app(scope, receive, send):
        await receive()
        is_running.set()
        told.append((await receive())["type"])

    (port,) = free_ports(1)
    config = uvicorn.Config(app, host="127.0.0.1", port=port, http=HttpProtocol, lifespan="off", log_config=None)
    server = HttpServer(config)
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        tasks.create_task(server.run())
        while not server.started:
            await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST)
        await is_running.wait()
        writer.write(REQUEST)
        assert await reader.read() == b""
        writer.close()
        while not told:
            await asyncio.sleep(0.01)
        await server.stop()
    assert told == ["http.disconnect"]
