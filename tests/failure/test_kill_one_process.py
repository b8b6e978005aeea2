"""A stream survives the death of any one process behind the gateway: a pause, then the same tokens."""

import concurrent.futures
import json
import os
import signal
import threading

import httpx
import pytest

from tests.mesh import Mesh

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_STREAMS = 6
NUM_TOKENS = 600


def body(index: int, num_tokens: int = NUM_TOKENS) -> dict[str, object]:
    sampling = {"temperature": 0} if index % 2 else {"temperature": 0.8, "seed": index}
    return {
        "prompt": [5 + index, 6, 7],
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "return_token_ids": True,
    } | sampling


def stream_ids(mesh: Mesh, index: int, is_under_way: threading.Semaphore, num_tokens: int = NUM_TOKENS) -> list[int]:
    ids: list[int] = []
    is_told = False
    finish_reasons: list[str] = []
    with httpx.stream(
        "POST", f"{mesh.url}/v1/completions", json=body(index, num_tokens) | {"stream": True}, timeout=120
    ) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            assert "error" not in chunk, chunk
            ids += chunk["choices"][0].get("token_ids") or []
            if chunk["choices"][0]["finish_reason"]:
                finish_reasons.append(chunk["choices"][0]["finish_reason"])
            if len(ids) >= 20 and not is_told:  # several tokens may come at once
                is_under_way.release()
                is_told = True
    assert finish_reasons == ["length"]
    return ids


@pytest.mark.parametrize("victim", ["worker-0", "scheduler", "kv_cache"])
def test_streams_go_on_with_the_same_tokens_when_a_process_is_killed(mesh: Mesh, victim: str):
    expected = [mesh.post("/v1/completions", body(i))[1]["choices"][0]["token_ids"] for i in range(NUM_STREAMS)]
    epochs = {service["name"]: service["epoch"] for service in mesh.status()}
    pid = mesh.pid(victim)  # asking takes longer than a stream of a tiny model may last
    is_under_way = threading.Semaphore(0)
    with concurrent.futures.ThreadPoolExecutor(NUM_STREAMS) as pool:
        streams = [pool.submit(stream_ids, mesh, index, is_under_way) for index in range(NUM_STREAMS)]
        for _ in range(NUM_STREAMS):
            assert is_under_way.acquire(timeout=60)
        os.kill(pid, signal.SIGKILL)
        received = [stream.result(120) for stream in streams]
    assert received == expected
    mesh.wait_until_nothing_is_held(timeout_s=10)
    mesh.wait_until(mesh.is_serving, 20, "ready again")
    after = {service["name"]: service["epoch"] for service in mesh.status()}
    assert after[victim] > epochs[victim]
    assert {name for name in after if after[name] != epochs[name]} == {victim}


def num_cached_tokens(mesh: Mesh, prompt: list[int]) -> int:
    status, answer = mesh.post("/v1/completions", {"prompt": prompt, "max_tokens": 1, "temperature": 0})
    assert status == 200, answer
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize(("victim", "num_hit_tokens"), [("scheduler", 96), ("worker-0", 0), ("kv_cache", 0)])
def test_repeated_prompt_hits_after_a_death_what_memory_still_holds(mesh: Mesh, victim: str, num_hit_tokens: int):
    prompt = [*range(100, 200), {"scheduler": 1, "worker-0": 2, "kv_cache": 3}[victim]]
    prompt.reverse()  # so that each victim has a prompt that no other has begun
    assert [num_cached_tokens(mesh, prompt) for _ in range(2)] == [0, 96]
    epoch = {service["name"]: service["epoch"] for service in mesh.status()}[victim]
    mesh.kill(victim)

    def has_come_back() -> bool:
        return any(service["name"] == victim and service["epoch"] > epoch for service in mesh.status())

    mesh.wait_until(has_come_back, 30, f"another life of {victim}")
    mesh.wait_until(mesh.is_serving, 30, "ready again")
    assert num_cached_tokens(mesh, prompt) == num_hit_tokens
    assert num_cached_tokens(mesh, prompt) == 96


def test_requests_get_a_retryable_answer_while_the_worker_is_away(mesh: Mesh):
    mesh.kill("worker-0")
    mesh.wait_until(lambda: not mesh.is_serving(), 5, "unready")
    status, answer = mesh.post("/v1/completions", {"prompt": [5], "max_tokens": 2, "temperature": 0})
    assert status in (200, 503)  # it may be back already
    if status == 503:
        assert answer["error"]["type"] == "server_error"
    mesh.wait_until(mesh.is_serving, 30, "ready again")
    assert mesh.post("/v1/completions", {"prompt": [5], "max_tokens": 2, "temperature": 0})[0] == 200
