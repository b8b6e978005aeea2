"""Requests that do not end well: clients that leave or do not read, schedulers that refuse, fail or hang."""

import asyncio
import json

import pytest

from services.common.errors import EngineError, ErrorReason
from services.gateway.http_exchange import HttpSettings
from tests.unit.gateway.api_harness import CHAT, END_ID, Api, calling, events, speaker, token_ids

RUNNING = 'treadle_gateway_running_streams{surface="%s"}'
OUTCOMES = 'treadle_gateway_requests_total{outcome="%s",surface="%s"}'
PATHS = {"chat": ("/v1/chat/completions", CHAT), "completion": ("/v1/completions", {"prompt": "a"})}


@pytest.mark.parametrize("surface", ["chat", "completion"])
async def test_client_that_leaves_a_stream_cancels_its_request_once(surface):
    api = Api(speaker("Hello", hang_after=3))
    path, body = PATHS[surface]
    async with calling(api, path, body | {"stream": True, "request_id": "r1"}) as call:
        await call.until(4)  # the head and three texts
        assert list(api.scheduler.live) == ["r1"]
        call.leave()
    assert api.scheduler.cancelled == ["r1"]
    assert api.scheduler.live == {}
    assert not call.is_complete
    assert await api.metric(OUTCOMES % ("cancelled", surface)) == 1
    assert await api.metric(RUNNING % surface) == 0


@pytest.mark.parametrize("surface", ["chat", "completion"])
async def test_client_that_leaves_before_its_whole_answer_cancels_its_request_once(surface):
    api = Api(speaker("Hello", hang_after=3))
    path, body = PATHS[surface]
    async with calling(api, path, body | {"request_id": "r1"}) as call:
        while not api.scheduler.live:
            await asyncio.sleep(0)
        call.leave()
    assert api.scheduler.cancelled == ["r1"]
    assert api.scheduler.live == {}


@pytest.mark.parametrize("is_stream", [False, True])
async def test_client_that_leaves_cancels_every_choice(is_stream):
    api = Api(speaker("Hello", hang_after=2))
    body = {"prompt": ["a", "b", "c"], "stream": is_stream, "request_id": "r"}
    async with calling(api, "/v1/completions", body) as call:
        while len(api.scheduler.live) < 3:
            await asyncio.sleep(0)
        call.leave()
    assert sorted(api.scheduler.cancelled) == ["r#0", "r#1", "r#2"]
    assert api.scheduler.live == {}


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5])
async def test_client_that_leaves_at_any_chunk_leaves_nothing_behind(max_tokens):
    for num_messages in range(1, max_tokens + 3):
        api = Api(speaker("Hello", ends=False))
        async with calling(api, "/v1/completions", {"prompt": "a", "stream": True, "max_tokens": max_tokens}) as call:
            await call.until(num_messages)
            call.leave()
        assert api.scheduler.live == {}
        assert len(api.scheduler.cancelled) <= 1


async def test_client_that_leaves_while_it_sends_gets_nothing_started():
    api = Api(speaker("Hello"))
    async with calling(api, "/v1/completions", {"prompt": "a"}) as call:
        call.leave()
        call._incoming.get_nowait()  # the body never came
    assert api.scheduler.requests == []


async def test_finished_request_is_not_cancelled():
    api = Api(speaker("Hello"))
    await api.complete()
    await api.complete(stream=True)
    assert api.scheduler.cancelled == []
    assert api.scheduler.live == {}
    assert await api.metric(OUTCOMES % ("stop", "completion")) == 2


async def test_reader_that_is_slow_gets_everything_in_one_chunk_when_it_reads_again():
    api = Api(speaker("Hello world", ends=False, is_manual=True))
    async with calling(api, "/v1/completions", {"prompt": "a", "stream": True, "max_tokens": 11}) as call:
        while not api.scheduler.live:
            await asyncio.sleep(0)
        (generation,) = api.scheduler.live.values()
        generation.make(1)
        await call.until(2)
        call.may_send.clear()
        call.wants_to_send.clear()
        generation.make(1)
        await call.wants_to_send.wait()
        generation.make(100)
        call.may_send.set()
    texts = [event.json["choices"][0]["text"] for event in events(call.body)[:-1]]
    assert texts == ["H", "e", "llo world", ""]


async def test_reader_that_never_reads_is_cut_off_and_its_request_cancelled():
    api = Api(speaker("Hello", is_manual=True), settings=HttpSettings(write_timeout_s=0.02))
    async with calling(api, "/v1/completions", {"prompt": "a", "stream": True}) as call:
        call.may_send.clear()
        while not api.scheduler.live:
            await asyncio.sleep(0)
        (generation,) = api.scheduler.live.values()
        generation.make(1)
    assert len(api.scheduler.cancelled) == 1
    assert call.messages == []
    assert await api.metric(OUTCOMES % ("slow_reader", "completion")) == 1


async def test_silent_stream_says_something_in_time():
    api = Api(speaker("Hello", is_manual=True), settings=HttpSettings(keep_alive_s=0.01))
    async with calling(api, "/v1/completions", {"prompt": "a", "stream": True}) as call:
        await call.until(3)
        assert call.bodies[:2] == [b": keep-alive\n\n"] * 2
        (generation,) = api.scheduler.live.values()
        generation.make(100)
    assert "".join(event.json["choices"][0]["text"] for event in events(call.body)[:-1]) == "Hello"


@pytest.mark.parametrize(
    ("reason", "status", "kind"),
    [
        (ErrorReason.QUEUE_FULL, 429, "rate_limit_error"),
        (ErrorReason.DRAINING, 503, "server_error"),
        (ErrorReason.SCHEDULER_UNAVAILABLE, 503, "server_error"),
        (ErrorReason.EXCEEDS_KV_CAPACITY, 400, "invalid_request_error"),
        (ErrorReason.DUPLICATE_REQUEST, 409, "invalid_request_error"),
        (ErrorReason.STEP_FAILED, 500, "server_error"),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("at_submission", [False, True])
async def test_failure_before_the_first_token_is_an_ordinary_status(reason, status, kind, is_stream, at_submission):
    error = EngineError(reason, "no", retry_after_s="7")
    api = Api(speaker("x", **({"refusal": error} if at_submission else {"fail_after": 0, "failure": error})))
    response = await api.chat(stream=is_stream)
    assert response.status_code == status
    assert response.json()["error"] == {"message": "no", "type": kind, "param": None, "code": reason.value.lower()}
    assert response.headers.get("retry-after") == ("7" if status in (429, 503) else None)
    assert await api.metric(OUTCOMES % (reason.value.lower(), "chat")) == 1
    assert api.scheduler.live == {}


async def test_failure_amid_a_stream_is_one_error_event_and_no_clean_end():
    api = Api(speaker("Hello", fail_after=2))
    response = await api.chat(stream=True)
    assert response.status_code == 200
    parsed = events(response.content)
    assert [event.json["choices"][0]["delta"].get("content") for event in parsed[:-1]] == ["", "H", "e"]
    assert all(event.json["choices"][0]["finish_reason"] is None for event in parsed[:-1])
    assert parsed[-1].json == {
        "error": {"message": "worker died", "type": "server_error", "param": None, "code": "worker_unavailable"}
    }
    assert api.scheduler.cancelled == []
    assert await api.metric(OUTCOMES % ("worker_unavailable", "chat")) == 1


async def test_failure_amid_a_whole_answer_is_an_ordinary_status():
    response = await Api(speaker("Hello", fail_after=2)).chat()
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "worker_unavailable"


async def test_failure_of_one_choice_cancels_the_others():
    api = Api(speaker("Hello", hang_after=2, fail_after=1, failing=frozenset({"r#1"})))
    response = await api.complete(prompt=["a", "b", "c"], request_id="r")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "worker_unavailable"
    assert api.scheduler.live == {}
    assert sorted(api.scheduler.cancelled) == ["r#0", "r#2"]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_request_that_is_cancelled_by_its_id_does_not_look_finished(is_stream):
    api = Api(speaker("Hello", hang_after=2))
    async with calling(api, "/v1/completions", {"prompt": "a", "stream": is_stream, "request_id": "r"}) as call:
        while not api.scheduler.live or api.scheduler.live["r"].num_made < 2:
            await asyncio.sleep(0)
        if is_stream:
            await call.until(3)
        assert api.scheduler.cancel("r")
    if is_stream:
        assert events(call.body)[-1].json["error"]["code"] == "client_cancelled"
    else:
        assert call.messages[0]["status"] == 499
        assert json.loads(call.body)["error"]["code"] == "client_cancelled"


@pytest.mark.parametrize("is_stream", [False, True])
async def test_deadline_ends_a_request_whose_scheduler_is_silent(is_stream):
    api = Api(speaker("Hello", hang_after=0))
    response = await api.complete(stream=is_stream, timeout=0.01)
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline_exceeded"
    assert len(api.scheduler.cancelled) == 1
    assert await api.metric(OUTCOMES % ("deadline_exceeded", "completion")) == 1


async def test_stop_string_in_one_event_with_the_finish_needs_no_cancel():
    api = Api(speaker("ab|cd", burst=100))
    body = (await api.complete(stop="|", stream=False)).json()
    assert body["choices"][0]["text"] == "ab"
    assert body["usage"]["completion_tokens"] == 3
    assert api.scheduler.cancelled == []


async def test_tokens_and_times_are_measured():
    api = Api(speaker(ids=[*token_ids("abc"), END_ID]))
    await api.chat()
    assert await api.metric('treadle_gateway_time_to_first_token_seconds_count{surface="chat"}') == 1
    assert await api.metric('treadle_gateway_inter_token_latency_seconds_count{surface="chat"}') == 3
    assert await api.metric('treadle_gateway_request_duration_seconds_count{surface="chat"}') == 1
    assert await api.metric('treadle_gateway_generation_tokens_total{surface="chat"}') == 4
    assert await api.metric('treadle_gateway_prompt_tokens_total{surface="chat"}') == 18
