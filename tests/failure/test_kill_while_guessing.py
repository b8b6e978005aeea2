"""A stream of guessed tokens survives the death of a worker or scheduler: a pause, then the same tokens."""

import concurrent.futures
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.failure.test_kill_one_process import NUM_STREAMS, body, stream_ids
from tests.mesh import Mesh, running_mesh
from tests.model_files import random_weights, tiny_config, write_hf_directory

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config(max_model_len=4096)
    return write_hf_directory(tmp_path_factory.mktemp("tiny"), config, random_weights(config))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """What a mesh answers that does not guess."""
    with running_mesh(model, "--kv-cache-gib", "0.01", "--dtype", "float32") as mesh:
        return [mesh.post("/v1/completions", body(i))[1]["choices"][0]["token_ids"] for i in range(NUM_STREAMS)]


@pytest.fixture(scope="module")
def guessing(model: Path) -> Iterator[Mesh]:
    flags = ("--speculation", "ngram", "--speculation-min-ngram", "1")
    with running_mesh(model, "--kv-cache-gib", "0.01", "--dtype", "float32", *flags) as mesh:
        yield mesh


@pytest.mark.parametrize("victim", ["worker-0", "scheduler"])
def test_streams_go_on_with_the_tokens_of_a_mesh_that_does_not_guess(
    expected: list[list[int]], guessing: Mesh, victim: str
) -> None:
    pid = guessing.pid(victim)
    is_under_way = threading.Semaphore(0)
    with concurrent.futures.ThreadPoolExecutor(NUM_STREAMS) as pool:
        streams = [pool.submit(stream_ids, guessing, index, is_under_way) for index in range(NUM_STREAMS)]
        for _ in range(NUM_STREAMS):
            assert is_under_way.acquire(timeout=60)
        os.kill(pid, signal.SIGKILL)
        received = [stream.result(120) for stream in streams]
    assert received == expected
    guessing.wait_until_nothing_is_held(timeout_s=10)
    guessing.wait_until(guessing.is_serving, 20, "ready again")
