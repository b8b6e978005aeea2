import asyncio

from starlette.responses import PlainTextResponse

from services.gateway.http_exchange import ExchangeLimit


async def status_of(app, path: str) -> int:
    statuses = []

    async def send(message):
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    await app({"type": "http", "path": path, "method": "GET", "headers": []}, None, send)
    return statuses[0]


async def test_exchange_beyond_the_bound_is_refused_at_once_and_liveness_is_not():
    is_released = asyncio.Event()

    async def slow(scope, receive, send):
        if scope["path"] == "/slow":
            await is_released.wait()
        await PlainTextResponse("served")(scope, receive, send)

    app = ExchangeLimit(slow, 1, PlainTextResponse("refused", 429))
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(status_of(app, "/slow"))
        await asyncio.sleep(0)
        assert await status_of(app, "/v1/models") == 429
        assert await status_of(app, "/health") == 200
        is_released.set()
    assert first.result() == 200
    assert await status_of(app, "/v1/models") == 200
