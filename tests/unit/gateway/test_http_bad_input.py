"""Bad input: every row is a 4xx in OpenAI's form that names the field, and nothing reaches the scheduler."""

import time
from typing import Any

import pytest

from services.gateway.http_exchange import HttpSettings
from services.gateway.openai_fields import CHAT_FIELDS, COMPLETION_FIELDS
from tests.unit.gateway.api_harness import CHAT, VOCAB_SIZE, Api, speaker

MESSAGES = "messages"


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


# fields of the body, the field that the error must name
COMMON_ROWS: list[tuple[dict[str, Any], str]] = [
    *(({"max_tokens": value}, "max_tokens") for value in (0, -1, 1.5, "5", 2**63, 2**70, True, [], {}, [[1]])),
    *(({"max_completion_tokens": value}, "max_completion_tokens") for value in (0, -1, "7", 10**6)),
    *(({"temperature": value}, "temperature") for value in (-1e9, -1, 1e9, "1", True, [], {}, 10**400)),
    *(({"top_p": value}, "top_p") for value in (-1e9, -1, 0, 1.01, 1e9, "1", False)),
    *(({"top_k": value}, "top_k") for value in (-2, -(10**9), 1.5, 2**63, "1", True)),
    *(({"min_p": value}, "min_p") for value in (-1, 1.5, 1e9, "0")),
    *(({"seed": value}, "seed") for value in (1.5, 2**64, -(2**63) - 1, "7", True)),
    *(({"stop": value}, "stop") for value in (0, {}, True, "", "x" * 4097, ["a"] * 17, ["a"] * 1000, "x" * 100_000)),
    *(({"stop": value}, "stop[0]") for value in ([""], [1], [None], [["a"]])),
    ({"stop": ["a", ""]}, "stop[1]"),
    *(({"stop_token_ids": value}, "stop_token_ids") for value in ("1", [1.5], [True], [-1], [VOCAB_SIZE], [2**63], 1)),
    ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
    *(({"stream": value}, "stream") for value in ("false", 1, 0, [], {})),
    *(({"stream": True, "stream_options": value}, "stream_options") for value in (1, "x", [], True)),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    *(({name: 1}, name) for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output")),
    *(({name: "yes"}, name) for name in ("return_token_ids", "add_special_tokens")),
    *(({"metadata": value}, "metadata") for value in (1, [], {"a": 1}, {"a": {"b": []}}, {"a": "x" * 513}, "x")),
    ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
    *(({"user": value}, "user") for value in (1, [], {}, True, "x" * 2000)),
    *(({"request_id": value}, "request_id") for value in (1, "", "a b", "x" * 129, "a\n", "ä")),
    *(({"timeout": value}, "timeout") for value in (0, -1, "1", 1e9, True)),
    *(({"model": value}, "model") for value in (1, [], {}, True)),
    # known and not served
    *(({"n": value}, "n") for value in (0, -1, 129, "1", True, 1.5, [])),
    ({"best_of": 2}, "best_of"),
    ({"min_tokens": 4}, "min_tokens"),
    ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ({"presence_penalty": -1}, "presence_penalty"),
    ({"repetition_penalty": 1.1}, "repetition_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"bad_words": ["a"]}, "bad_words"),
    ({"prompt_logprobs": 0}, "prompt_logprobs"),
    ({"echo": True}, "echo"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"structured_outputs": {"regex": "(a+)+$"}}, "structured_outputs"),
    ({"guided_json": {}}, "guided_json"),
    ({"tools": 5}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    *(({"priority": value}, "priority") for value in ("high", "VIP", -1, 10, 1e12, True, [])),
    ({"service_tier": "flex"}, "service_tier"),
]
CHAT_ROWS = [
    *(({MESSAGES: value}, MESSAGES) for value in (None, 0, "", [], {}, True, "hi")),
    *(({MESSAGES: value}, "messages[0]") for value in ([1], ["hi"], [[1]], [None])),
    *(({MESSAGES: [{"role": role, "content": "a"}]}, "messages[0].role") for role in (None, 1, "", "pirate", [], {})),
    *(({MESSAGES: [{"role": role, "content": "a"}]}, "messages[0].role") for role in ("tool", "function")),
    ({MESSAGES: [{"content": "a"}]}, "messages[0].role"),
    *((user(content), "messages[0].content") for content in (None, 1, True, {}, [])),
    ({MESSAGES: [{"role": "user"}]}, "messages[0].content"),
    *((user([part]), "messages[0].content[0]") for part in (1, "a", {}, {"type": 1}, {"text": "a"})),
    (user([{"type": "text", "text": 1}]), "messages[0].content[0].text"),
    (user([{"type": "image_url", "image_url": {"url": "x"}}]), "messages[0].content"),
    ({MESSAGES: [{"role": "user", "content": "a", "name": 1}]}, "messages[0].name"),
    ({MESSAGES: [{"role": "assistant", "content": None, "tool_calls": 1}]}, "messages[0].tool_calls"),
    ({"add_generation_prompt": "no"}, "add_generation_prompt"),
    *(({"logprobs": value}, "logprobs") for value in (True, 0, 1, "x")),
    ({"top_logprobs": 3}, "top_logprobs"),
    (user("x" * 100), MESSAGES),
]
COMPLETION_ROWS = [
    *(({"prompt": value}, "prompt") for value in (None, 0, "", [], {}, True, [-1], [VOCAB_SIZE], [2**31], [2**63])),
    *(({"prompt": value}, "prompt[0]") for value in ([1.5], [None], [True], [{}], [[]], [""], [[1.5]], [[True]])),
    *(({"prompt": value}, "prompt[1]") for value in ([[1, 2], [-1]], ["a", 1], ["a", ""], [[1], "a"], [1, "a"])),
    ({"prompt": ["a"] * 257}, "prompt"),
    ({"prompt": ["fine", "x" * 100, "fine"]}, "prompt[1]"),
    *(({"logprobs": value}, "logprobs") for value in (0, 1, 5, -1, 1000, True, False)),
    ({"suffix": "x"}, "suffix"),
]


def is_refusal(response: Any, param: str | None, status: int = 400) -> bool:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 500
    assert error["param"] == param, error
    return True


@pytest.mark.slow
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("path", "base", "rows"),
    [
        ("/v1/chat/completions", CHAT, COMMON_ROWS + CHAT_ROWS),
        ("/v1/completions", {"prompt": "a"}, COMMON_ROWS + COMPLETION_ROWS),
    ],
)
async def test_bad_field_is_a_400_that_names_it(path, base, rows, is_stream):
    api = Api(speaker("x"))
    for fields, param in rows:
        body = base | ({"stream": True} if is_stream else {}) | fields
        if is_stream and fields == {"stream_options": {"include_usage": True}}:
            continue
        assert is_refusal(await api.post(path, body), param), fields
    assert api.scheduler.requests == []


JUNK = [0, "", [], {}, True, [[1]], "\x00", -1, 1e300, [None], {"a": {"b": []}}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "known"), [("/v1/chat/completions", CHAT_FIELDS), ("/v1/completions", COMPLETION_FIELDS)]
)
async def test_any_junk_in_any_known_field_is_answered_or_refused_by_name(path, known):
    api = Api(speaker("x"))
    base = CHAT if "chat" in path else {"prompt": "a"}
    for name in sorted(known.served | known.neutral_values.keys()):
        for junk in JUNK:
            response = await api.post(path, base | {name: junk})
            if response.status_code == 200:
                continue
            assert response.status_code in (400, 404), (name, junk, response.text)
            param = response.json()["error"]["param"]
            assert param is not None, (name, junk, response.text)
            assert param.split("[")[0].split(".")[0] == name, (name, junk, response.text)
        assert (await api.post(path, base | {name: None})).status_code in (200, 400)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"  ", None),
        (b"{:", None),
        (b"[]", None),
        (b'"x"', None),
        (b"null", None),
        (b"5", None),
        (b'{"prompt":"a"', None),
        (b'{"prompt":"a"}}', None),
        (b"\xef\xbb\xbf{}", None),
        ("{'prompt':'a'}".encode("gbk"), None),
        ('{"prompt":"你"}'.encode("gbk"), None),
        ('{"prompt":"a"}'.encode("utf-16"), None),
        (b'{"prompt":"\\ud800"}', "prompt"),
        (b'{"messages":[{"role":"user","content":"\\ud800 x"}],"stream":true}', "messages[0].content"),
        (b'{"prompt":"a","stop":["\\udc00"]}', "stop[0]"),
        (b'{"prompt":"a","temperature":NaN}', "temperature"),
        (b'{"prompt":"a","temperature":Infinity}', "temperature"),
        (b'{"prompt":"a","temperature":1e999}', "temperature"),
        (b'{"prompt":"a","max_tokens":1' + b"0" * 6000 + b"}", "max_tokens"),
        (b'{"prompt":"a","logit_bias":{"1":-Infinity}}', "logit_bias.1"),
    ],
)
async def test_bad_body_is_a_400(body, param):
    api = Api(speaker("x"))
    path = "/v1/chat/completions" if b"messages" in body else "/v1/completions"
    assert is_refusal(await api.post(path, body), param)
    assert api.scheduler.requests == []


@pytest.mark.parametrize("depth", [64, 500, 5_000, 100_000])
@pytest.mark.parametrize("name", ["tools", "response_format", "metadata", "messages", "prompt"])
async def test_deep_nesting_is_refused_at_once(name, depth):
    api = Api(speaker("x"))
    body = b'{"prompt":"a","%s":' % name.encode() + b"[" * depth + b"]" * depth + b"}"
    start = time.monotonic()
    response = await api.post("/v1/chat/completions" if name == "messages" else "/v1/completions", body)
    assert response.status_code == 400
    assert time.monotonic() - start < 1


async def test_deep_nesting_in_an_unknown_field_is_harmless():
    for depth in (64, 500, 5_000, 100_000):
        body = b'{"prompt":"a","what":' + b"[" * depth + b"]" * depth + b"}"
        assert (await Api(speaker("x")).post("/v1/completions", body)).status_code in (200, 400)


async def test_large_malformed_body_is_refused_without_a_second_look():
    body = b'{"prompt":"' + b"x" * (1 << 20) + b'","temperature":NaN}'
    assert is_refusal(await Api(speaker("x")).post("/v1/completions", body), None)


async def test_last_of_two_equal_keys_counts():
    api = Api(speaker("abc", ends=False))
    response = await api.post("/v1/completions", b'{"prompt":"a","max_tokens":0,"max_tokens":2}')
    assert response.json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "application/json"}, 200),
        ({"content-type": "application/json; charset=utf-8"}, 200),
        ({"content-type": "application/problem+json"}, 200),
        ({}, 200),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "multipart/form-data; boundary=x"}, 415),
        ({"content-type": "application/json; charset=gbk"}, 415),
        ({"content-type": "application/json", "content-encoding": "gzip"}, 415),
        ({"content-type": "application/json", "content-encoding": "br"}, 415),
        ({"content-type": "application/json", "content-encoding": "identity"}, 200),
    ],
)
async def test_media_type_decides_between_reading_and_415(headers, status):
    api = Api(speaker("x"))
    async with api.client() as client:
        response = await client.post("/v1/completions", content=b'{"prompt":"a"}', headers=headers)
    assert response.status_code == status
    if status == 415:
        assert response.json()["error"]["code"] == "unsupported_media_type"


async def test_body_beyond_the_limit_is_a_413_declared_or_not():
    api = Api(speaker("x"), settings=HttpSettings(max_body_bytes=100))
    body = b'{"prompt":"' + b"x" * 100 + b'"}'
    assert is_refusal(await api.post("/v1/completions", body), None, status=413)

    async def pieces():
        for start in range(0, len(body), 10):
            yield body[start : start + 10]

    async with api.client() as client:
        headers = {"content-type": "application/json"}
        response = await client.post("/v1/completions", content=pieces(), headers=headers)
    assert is_refusal(response, None, status=413)
    assert (await api.complete()).status_code == 200


async def test_model_that_is_not_served_is_a_404():
    response = await Api(speaker("x")).chat(model="gpt-9\n")
    assert is_refusal(response, "model", status=404)
    assert response.json()["error"]["code"] == "model_not_found"


async def test_chat_of_a_model_without_template_is_a_400():
    assert is_refusal(await Api(speaker("x"), template=None).chat(), "messages")


async def test_refusal_of_the_template_reaches_the_client():
    api = Api(speaker("x"), template="{{ raise_exception('roles must alternate') }}")
    response = await api.chat()
    assert is_refusal(response, "messages")
    assert "roles must alternate" in response.json()["error"]["message"]


async def test_refusals_are_counted_by_reason():
    api = Api(speaker("x"))
    await api.complete(logprobs=2)
    await api.complete(temperature=-1)
    await api.post("/v1/completions", b"{")
    name = 'treadle_gateway_requests_total{outcome="%s",surface="completion"}'
    assert await api.metric(name % "unsupported_parameter") == 1
    assert await api.metric(name % "invalid_sampling_params") == 1
    assert await api.metric(name % "invalid_request") == 1
