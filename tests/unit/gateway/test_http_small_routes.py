"""Models, tokenizing, health, readiness, metrics, and what every answer has in common."""

import json

import pytest

from services.gateway.ports import ServedModel
from tests.unit.gateway.api_harness import CHAT, CHAT_PROMPT, END_ID, MARK_ID, MODEL, Api, speaker, token_ids


async def test_models_are_listed_and_described():
    served = (ServedModel("org/one", 64, 5, "aa"), ServedModel("two", 32, 6, "bb"))
    api = Api(speaker("x", served=served))
    listing = (await api.get("/v1/models")).json()
    assert listing["object"] == "list"
    assert listing["data"][0] == {
        "id": "org/one",
        "object": "model",
        "created": 5,
        "owned_by": "treadle",
        "max_model_len": 64,
    }
    assert (await api.get("/v1/models/org/one")).json() == listing["data"][0]
    missing = await api.get("/v1/models/three")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_requests_are_a_503_while_nothing_is_served():
    api = Api(speaker("x", served=()))
    for response in (await api.chat(), await api.get("/v1/models/x"), await api.post("/tokenize", {"prompt": "a"})):
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
    assert (await api.get("/v1/models")).json()["data"] == []


async def test_tokenize_counts_the_tokens_of_a_prompt():
    response = await Api(speaker("x")).post("/tokenize", {"prompt": "a日", "return_token_strs": True})
    assert response.json() == {
        "count": 4,
        "max_model_len": 64,
        "tokens": token_ids("a日"),
        "token_strs": ["a", "�", "�", "�"],
    }


async def test_tokenize_counts_the_tokens_of_messages():
    api = Api(speaker("x"))
    assert (await api.post("/tokenize", CHAT)).json()["tokens"] == token_ids(CHAT_PROMPT)
    response = await api.post("/tokenize", CHAT | {"add_generation_prompt": False})
    assert response.json()["tokens"] == token_ids("user:hi\n")


async def test_detokenize_gives_the_text_with_special_tokens():
    response = await Api(speaker("x")).post("/detokenize", {"tokens": [*token_ids("a日"), MARK_ID]})
    assert response.json() == {"prompt": "a日<mark>"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "return_token_strs": 1}, "return_token_strs"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "model": 1}, "model"),
        *(
            ("/detokenize", {"tokens": tokens}, "tokens")
            for tokens in (None, [-1], [1.5], ["a"], "a", [2**63], [END_ID + 9])
        ),
    ],
)
async def test_tokenizing_names_the_bad_field(path, body, param):
    response = await Api(speaker("x")).post(path, body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_health_does_not_depend_on_the_mesh_and_readiness_does():
    api = Api(speaker("x"))
    assert (await api.get("/ready")).json() == {"status": "ready"}
    api.scheduler.reasons = ("scheduler: not connected",)
    assert (await api.get("/health")).json() == {"status": "ok"}
    response = await api.get("/ready")
    assert response.status_code == 503
    assert response.json() == {"status": "unready", "reasons": ["scheduler: not connected"]}


async def test_version_names_the_build():
    assert (await Api(speaker("x")).get("/version")).json() == {"version": "1.2.3"}


async def test_metrics_are_classic_text_whatever_the_scraper_prefers():
    api = Api(speaker("x"))
    for accept in ("application/openmetrics-text; version=1.0.0", "application/json", "*/*"):
        response = await api.get("/metrics", headers={"accept": accept})
        assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert "# TYPE treadle_gateway_requests_total counter" in response.text
        assert "# EOF" not in response.text


async def test_metrics_count_guessed_tokens_and_those_that_came_true():
    api = Api(speaker("x", guesses=(7, 5)))
    await api.complete()
    await api.complete()
    text = (await api.get("/metrics")).text
    assert 'treadle_gateway_draft_tokens_total{surface="completion"} 14.0' in text
    assert 'treadle_gateway_accepted_tokens_total{surface="completion"} 10.0' in text


async def test_unknown_path_and_wrong_method_are_json():
    api = Api(speaker("x"))
    missing = await api.get("/v2/what")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    wrong = await api.get("/v1/chat/completions")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"
    assert (await api.get("/v1/models/")).status_code == 404
    assert (await api.post("/v1/completions/", {"prompt": "a"})).status_code == 404


async def test_every_answer_has_a_request_id():
    api = Api(speaker("x"))
    for path in ("/health", "/ready", "/metrics", "/nothing", "/v1/completions"):
        assert len((await api.get(path)).headers["x-request-id"]) == 32


async def test_request_id_of_the_client_is_echoed_if_it_is_sane():
    api = Api(speaker("x"))
    assert (await api.get("/health", headers={"x-request-id": "my-1"})).headers["x-request-id"] == "my-1"
    for bad in ("a b", "x" * 129, "ä", ""):
        answer = await api.get("/health", headers={b"x-request-id": bad.encode()})
        assert answer.headers["x-request-id"] != bad
    stream = await api.chat(stream=True, request_id="mine")
    assert stream.headers["x-request-id"] == "mine"
    both = await api.post("/v1/completions", {"prompt": "a", "request_id": "r2"}, headers={"x-request-id": "h2"})
    assert both.headers["x-request-id"] == "h2"
    assert both.json()["id"] == "cmpl-r2"
    assert [request.request_id for request in api.scheduler.requests] == ["mine", "r2"]


async def test_bug_is_a_500_that_tells_nothing_but_where_to_look(caplog):
    api = Api(speaker("x"))

    def fail(request):
        raise RuntimeError("secret")

    api.scheduler.answer = fail
    response = await api.post("/v1/completions", {"prompt": "a"}, headers={"x-request-id": "look-here"})
    assert response.status_code == 500
    assert response.headers["x-request-id"] == "look-here"
    assert "secret" not in response.text
    assert "look-here" in json.loads(response.text)["error"]["message"]
    assert "secret" in caplog.text


async def test_model_named_in_the_answer_is_the_served_name():
    assert (await Api(speaker("x")).chat(model=MODEL)).json()["model"] == MODEL
