"""Workers are stopped one at a time, as in a rolling restart: no client sees an error, or another token."""

import concurrent.futures
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.failure.test_kill_one_process import NUM_STREAMS, NUM_TOKENS, body, stream_ids
from tests.mesh import Mesh, running_mesh
from tests.model_files import random_weights, tiny_config, write_hf_directory
from treadle.scheduler.v1 import scheduler_service_pb2, scheduler_service_pb2_grpc

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_CLIENTS = 4
KV_CACHE = ("--kv-cache-gib", "0.01", "--dtype", "float32")


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config(max_model_len=4096)
    return write_hf_directory(tmp_path_factory.mktemp("tiny"), config, random_weights(config))


def expected_ids(mesh: Mesh, index: int, num_tokens: int = NUM_TOKENS) -> list[int]:
    status, answer = mesh.post("/v1/completions", body(index, num_tokens))
    assert status == 200, answer
    return answer["choices"][0]["token_ids"]


def epochs(mesh: Mesh) -> dict[str, int]:
    return {service["name"]: service["epoch"] for service in mesh.status()}


def num_preemptions(mesh: Mesh) -> int:
    address = next(service["address"] for service in mesh.status() if service["name"] == "scheduler")
    with grpc.insecure_channel(address) as channel:
        stub = scheduler_service_pb2_grpc.SchedulerServiceStub(channel)
        return stub.GetLoad(scheduler_service_pb2.GetLoadRequest(), timeout=5).num_preemptions


def drain(mesh: Mesh, worker: str) -> None:
    """`treadle worker drain`, which waits for the successor."""
    command = [sys.executable, "-P", "-m", "services.launcher", "worker", "drain", worker]
    command += ["--http-port", str(mesh.http_port), "--timeout", "60"]
    result = subprocess.run(command, capture_output=True, text=True, env=mesh.environ, timeout=90, check=False)
    assert (result.returncode, result.stderr) == (0, "")


@contextlib.contextmanager
def clients_without_pause(mesh: Mesh) -> Iterator[None]:
    """Have clients ask one thing after the other; each answer must be the right one."""
    is_over = threading.Event()
    expected = [expected_ids(mesh, index) for index in range(NUM_CLIENTS)]

    def ask(index: int) -> int:
        num_answers = 0
        while not is_over.is_set():
            assert expected_ids(mesh, index) == expected[index]
            num_answers += 1
        return num_answers

    with concurrent.futures.ThreadPoolExecutor(NUM_CLIENTS) as pool:
        clients = [pool.submit(ask, index) for index in range(NUM_CLIENTS)]
        try:
            yield
        finally:
            is_over.set()
        assert all(client.result(120) for client in clients)


@pytest.mark.parametrize(
    ("drain_timeout_s", "num_tokens", "is_moved"), [(30.0, NUM_TOKENS, False), (0.1, 2500, True)], ids=["ends", "moves"]
)
def test_no_stream_fails_or_changes_when_one_of_two_workers_gets_sigterm(
    tiny_model: Path, drain_timeout_s: float, num_tokens: int, is_moved: bool
):
    flags = (*KV_CACHE, "--workers", "2", "--drain-timeout-s", str(drain_timeout_s))
    with running_mesh(tiny_model, *flags) as mesh:
        pid, before = mesh.pid("worker-0"), epochs(mesh)
        is_under_way = threading.Semaphore(0)
        with concurrent.futures.ThreadPoolExecutor(NUM_STREAMS) as pool:
            expected = list(pool.map(lambda index: expected_ids(mesh, index, num_tokens), range(NUM_STREAMS)))
            streams = [pool.submit(stream_ids, mesh, index, is_under_way, num_tokens) for index in range(NUM_STREAMS)]
            for _ in range(NUM_STREAMS):
                assert is_under_way.acquire(timeout=60)
            os.kill(pid, signal.SIGTERM)
            received = [stream.result(120) for stream in streams]
        assert received == expected
        assert bool(num_preemptions(mesh)) == is_moved
        mesh.wait_until(lambda: epochs(mesh)["worker-0"] not in (None, before["worker-0"]), 30, "a new worker-0")
        mesh.wait_until_nothing_is_held(timeout_s=10)
        assert any("worker-0 exited with status 0" in line for line in mesh.log)
        assert {name for name, epoch in epochs(mesh).items() if epoch != before[name]} == {"worker-0"}


def test_no_client_sees_an_error_while_both_workers_are_restarted_one_after_the_other(tiny_model: Path):
    with running_mesh(tiny_model, *KV_CACHE, "--workers", "2") as mesh:
        before = epochs(mesh)
        with clients_without_pause(mesh):
            for worker in ("worker-0", "worker-1"):
                drain(mesh, worker)
        after = epochs(mesh)
        assert {name for name in after if after[name] != before[name]} == {"worker-0", "worker-1"}
        mesh.wait_until_nothing_is_held(timeout_s=10)
        assert mesh.stop() == 0


def test_no_client_sees_an_error_while_the_only_worker_is_restarted(tiny_model: Path):
    with running_mesh(tiny_model, *KV_CACHE) as mesh:
        with clients_without_pause(mesh):
            drain(mesh, "worker-0")
        mesh.wait_until_nothing_is_held(timeout_s=10)


def test_mesh_stops_at_once_while_a_worker_drains(tiny_model: Path):
    with running_mesh(tiny_model, *KV_CACHE, "--drain-timeout-s", "1") as mesh:
        pids = mesh.pids()
        is_under_way = threading.Semaphore(0)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            stream = pool.submit(stream_ids, mesh, 1, is_under_way)
            assert is_under_way.acquire(timeout=60)
            mesh.kill("worker-0", signal.SIGTERM)
            assert mesh.stop(timeout_s=20) == 0
            stream.exception(30)  # its answer ends somehow
        assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
