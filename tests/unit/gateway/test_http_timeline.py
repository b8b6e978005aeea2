"""``GET /v1/requests/{id}/timeline``: the caller's own requests, with their choices, as JSON."""

from services.gateway.text_generator import GenerationSettings
from tests.unit.gateway.api_harness import Api, speaker


def path(request_id: str) -> str:
    return f"/v1/requests/{request_id}/timeline"


async def test_timeline_of_a_request_is_a_list_of_typed_events() -> None:
    api = Api(speaker("Hey"))
    await api.complete(request_id="mine")
    response = await api.get(path("mine"))
    assert response.status_code == 200
    scheduled = {"type": "scheduled", "worker": "worker-0"}
    assert response.json() == {
        "object": "timeline",
        "request_id": "mine",
        "choices": [
            {
                "request_id": "mine",
                "model": "fake",
                "priority": "normal",
                "status": "finished",
                "num_prompt_tokens": 4,
                "num_events_left_out": 0,
                "events": [
                    {"type": "queued", "at_ms": 0, "num_waiting": 0, "num_running": 0, "behind": None},
                    {
                        "type": "admitted",
                        "at_ms": 0,
                        "worker": "worker-0",
                        "num_known_tokens": 4,
                        "num_cached_tokens": 0,
                        "num_went_before": 0,
                    },
                    scheduled
                    | {"at_ms": 0, "until_ms": 1, "kind": "catch_up", "first_step": 1, "last_step": 1, "num_tokens": 4},
                    scheduled
                    | {"at_ms": 1, "until_ms": 4, "kind": "decode", "first_step": 2, "last_step": 4, "num_tokens": 3},
                    {
                        "type": "finished",
                        "at_ms": 4,
                        "reason": "stop",
                        "num_output_tokens": 4,
                        "error": None,
                        "error_text": "",
                    },
                ],
            }
        ],
    }


async def test_timeline_of_several_samples_has_all_of_them() -> None:
    api = Api(speaker("Hey"))
    await api.complete(request_id="mine", n=2, temperature=1)
    answer = (await api.get(path("mine"))).json()
    assert [choice["request_id"] for choice in answer["choices"]] == ["mine#0", "mine#1"]
    only = (await api.get(path("mine%231"))).json()
    assert [choice["request_id"] for choice in only["choices"]] == ["mine#1"]


async def test_timeline_is_found_by_the_id_of_the_answer() -> None:
    api = Api(speaker("Hey"))
    answers = ((await api.complete()).json(), (await api.chat()).json())
    for answer in answers:
        (choice,) = (await api.get(path(answer["id"]))).json()["choices"]
        assert answer["id"].endswith(choice["request_id"])


async def test_timeline_of_an_unknown_request_is_a_404() -> None:
    response = await Api(speaker("Hey")).get(path("nobody"))
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("unknown_request", "request_id")
    assert "'nobody'" in error["message"]


async def test_timeline_of_another_tenants_request_is_a_404() -> None:
    api = Api(speaker("Hey"))
    await api.complete(request_id="theirs")
    other = Api(api.scheduler)
    other.generator._settings = GenerationSettings(tenant="another")
    assert (await other.get(path("theirs"))).status_code == 404
