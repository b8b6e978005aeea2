"""What request fields do once they are accepted: limits, sampling, models, deadlines, and what is ignored."""

import pytest

from services.gateway.ports import ServedModel
from tests.unit.gateway.api_harness import MAX_MODEL_LEN, Api, speaker


async def test_newer_name_of_the_limit_wins_when_both_are_given():
    api = Api(speaker("abcdefghijkl", ends=False))
    body = (await api.complete(max_completion_tokens=7, max_tokens=20)).json()
    assert body["usage"]["completion_tokens"] == 7
    assert body["choices"][0]["finish_reason"] == "length"


async def test_limit_defaults_to_sixteen_for_completions_and_to_the_context_for_chats():
    api = Api(speaker("abc", ends=False))
    assert (await api.complete(max_tokens=None)).json()["usage"]["completion_tokens"] == 16
    assert (await api.chat()).json()["usage"]["total_tokens"] == MAX_MODEL_LEN


@pytest.mark.parametrize("num_tokens", [MAX_MODEL_LEN - 1, MAX_MODEL_LEN, MAX_MODEL_LEN + 1, MAX_MODEL_LEN + 2])
async def test_prompt_must_leave_room_for_one_token(num_tokens):
    api = Api(speaker("abc", ends=False))
    response = await api.complete(prompt="x" * num_tokens)
    if num_tokens < MAX_MODEL_LEN:
        assert response.json()["usage"]["completion_tokens"] == MAX_MODEL_LEN - num_tokens
    else:
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
        assert str(num_tokens) in error["message"]
        assert str(MAX_MODEL_LEN) in error["message"]
        assert api.scheduler.requests == []


async def test_limit_must_fit_beside_the_prompt():
    api = Api(speaker("abc"))
    assert (await api.complete(max_tokens=MAX_MODEL_LEN - 4)).status_code == 200
    response = await api.complete(max_completion_tokens=MAX_MODEL_LEN - 3)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "max_completion_tokens"


@pytest.mark.parametrize(
    ("given_fields", "expected"),
    [
        ({"temperature": 1e-12}, ("temperature", 0.0)),
        ({"temperature": 0}, ("temperature", 0.0)),
        ({}, ("temperature", 1.0)),
        ({"top_k": -1}, ("top_k", 0)),
        ({"top_k": 0}, ("top_k", 0)),
        ({"top_k": 1}, ("top_k", 1)),
        ({"top_k": 258}, ("top_k", 0)),
        ({"top_k": 9_999_999}, ("top_k", 0)),
        ({"min_p": 1}, ("min_p", 1.0)),
        ({"top_p": 0.25}, ("top_p", 0.25)),
    ],
)
async def test_sampling_is_normalised(given_fields, expected):
    api = Api(speaker("x"))
    assert (await api.complete(**given_fields)).status_code == 200
    name, value = expected
    assert getattr(api.scheduler.requests[0].sampling, name) == value


async def test_neutral_values_of_what_is_not_served_are_accepted():
    neutral = {
        "n": 1,
        "best_of": 1,
        "logprobs": None,
        "top_logprobs": 0,
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
        "min_tokens": 0,
        "echo": False,
        "suffix": "",
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "priority": 0,
        "service_tier": "auto",
        "store": False,
        "truncate_prompt_tokens": None,
    }
    assert (await Api(speaker("x")).complete(**neutral)).status_code == 200


async def test_unknown_fields_are_ignored_and_logged_once(caplog):
    caplog.set_level("INFO", logger="services.gateway.openai_schema")
    api = Api(speaker("x"))
    for _ in range(2):
        assert (await api.complete(some_extension={"a": [1]})).status_code == 200
    assert len(caplog.records) == 1


async def test_model_may_be_left_out_or_named():
    served = (ServedModel("one", 64, 5, "aa"), ServedModel("two", 64, 5, "b" * 16 + "-rotated"))
    api = Api(speaker("x", served=served))
    assert (await api.complete()).json()["model"] == "one"
    body = (await api.complete(model="two")).json()
    assert (body["model"], body["system_fingerprint"]) == ("two", "treadle-1.2.3-bbbbbbbb-rotated")


async def test_deadline_comes_from_the_field_the_header_or_the_default():
    api = Api(speaker("x"))
    now_ms = api.clock.unix_ms()
    await api.complete(timeout=1.5)
    await api.post("/v1/completions", {"prompt": "a"}, headers={"timeout": "20"})
    await api.complete()
    deadlines = [request.deadline_unix_ms - now_ms for request in api.scheduler.requests]
    assert deadlines == [1500, 20_000, 600_000]
    response = await api.post("/v1/completions", {"prompt": "a"}, headers={"timeout": "soon"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "timeout")


async def test_text_parts_of_a_message_are_joined():
    api = Api(speaker("x"))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    response = await api.chat(messages=[{"role": "user", "content": parts}])
    assert response.json()["usage"]["prompt_tokens"] == len("user:a\nb\nassistant:")


async def test_text_that_cannot_fit_is_refused_before_it_is_tokenized():
    api = Api(speaker("x"))
    response = await api.complete(prompt="a" * 1_000_000)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "at least" in response.json()["error"]["message"]


async def test_idempotency_key_is_refused_rather_than_ignored():
    api = Api(speaker("x"))
    response = await api.post("/v1/completions", b'{"prompt":"a"}', headers={"idempotency-key": "k"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "Idempotency-Key")


@pytest.mark.parametrize(
    ("given", "expected"), [("vip", "vip"), ("batch", "batch"), ("normal", "normal"), (0, "normal")]
)
async def test_priority_class_reaches_the_scheduler(given, expected):
    api = Api(speaker("x"))
    await api.complete(priority=given)
    assert api.scheduler.requests[0].priority.value == expected
