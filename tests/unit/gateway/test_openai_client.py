"""The official OpenAI client against the application: it parses everything and raises what it should."""

import httpx
import openai
import pytest

from services.common.errors import EngineError, ErrorReason
from tests.unit.gateway.api_harness import CHAT, MODEL, Api, speaker


def client(api: Api) -> openai.AsyncOpenAI:
    http_client = httpx.AsyncClient(transport=httpx.ASGITransport(api.app), base_url="http://gateway/v1")
    return openai.AsyncOpenAI(api_key="none", base_url="http://gateway/v1", max_retries=0, http_client=http_client)


async def test_client_reads_a_chat_whole_and_streamed():
    api = Api(speaker("Paris 日本"))
    async with client(api) as caller:
        whole = await caller.chat.completions.create(model=MODEL, messages=CHAT["messages"], max_tokens=20)
        assert whole.choices[0].message.content == "Paris 日本"
        assert whole.choices[0].finish_reason == "stop"
        assert whole.usage is not None
        assert whole.usage.prompt_tokens_details is not None
        stream = await caller.chat.completions.create(
            model=MODEL,
            messages=CHAT["messages"],
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
        )
        parts = [chunk async for chunk in stream]
    assert "".join(part.choices[0].delta.content or "" for part in parts[:-1]) == "Paris 日本"
    assert parts[-2].choices[0].finish_reason == "stop"
    assert parts[-1].usage == whole.usage


async def test_client_reads_a_completion_whole_and_streamed():
    api = Api(speaker("Paris"))
    async with client(api) as caller:
        whole = await caller.completions.create(model=MODEL, prompt=["a", "b"])
        assert [choice.text for choice in whole.choices] == ["Paris", "Paris"]
        stream = await caller.completions.create(model=MODEL, prompt="a", stream=True)
        assert "".join([part.choices[0].text async for part in stream]) == "Paris"


async def test_client_lists_models():
    async with client(Api(speaker("x"))) as caller:
        assert [model.id async for model in caller.models.list()] == [MODEL]
        assert (await caller.models.retrieve(MODEL)).id == MODEL


async def test_client_raises_its_own_errors():
    api = Api(speaker("x"))
    async with client(api) as caller:
        with pytest.raises(openai.BadRequestError) as refused:
            await caller.chat.completions.create(model=MODEL, messages=CHAT["messages"], logprobs=True)
        assert (refused.value.param, refused.value.code) == ("logprobs", "unsupported_parameter")
        with pytest.raises(openai.NotFoundError):
            await caller.chat.completions.create(model="other", messages=CHAT["messages"])
        api.scheduler.refusal = EngineError(ErrorReason.QUEUE_FULL, "full")
        with pytest.raises(openai.RateLimitError):
            await caller.chat.completions.create(model=MODEL, messages=CHAT["messages"], stream=True)


async def test_client_raises_when_a_stream_breaks():
    async with client(Api(speaker("Hello", fail_after=2))) as caller:
        stream = await caller.chat.completions.create(model=MODEL, messages=CHAT["messages"], stream=True)
        parts = aiter(stream)
        assert [(await anext(parts)).choices[0].delta.content for _ in range(3)] == ["", "H", "e"]
        with pytest.raises(openai.APIError, match="worker died"):
            await anext(parts)
