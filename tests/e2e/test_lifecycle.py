"""Starting, stopping, leaving: no request, block or process stays behind."""

import concurrent.futures
import http.client
import json
import os
import signal
import threading
from pathlib import Path

import grpc
import psutil
import pytest

from tests.mesh import Mesh, running_mesh
from tests.model_files import random_weights, tiny_config, write_hf_directory
from treadle.common.v1 import sampling_pb2
from treadle.gateway.v1 import generation_service_pb2 as pb2
from treadle.gateway.v1 import generation_service_pb2_grpc as pb2_grpc

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Greedy decoding of random weights never ends by itself, and the model is quick to load.
    config = tiny_config(max_model_len=4096)
    return write_hf_directory(tmp_path_factory.mktemp("tiny"), config, random_weights(config))


LONG = {"prompt": [5, 6, 7], "max_tokens": 4000, "ignore_eos": True, "temperature": 0, "stream": True}


def open_stream(mesh: Mesh, body: dict[str, object]) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", mesh.http_port, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200, response.read()
    response.connection = connection  # type: ignore[attr-defined]
    return response


def leave(response: http.client.HTTPResponse) -> None:
    """Close the connection in the middle of its stream."""
    response.connection.close()  # type: ignore[attr-defined]
    response.close()  # the socket closes with its last file object


def read_chunks(response: http.client.HTTPResponse, count: int) -> list[str]:
    chunks: list[str] = []
    while len(chunks) < count:
        line = response.readline().decode()
        if line.startswith("data: "):
            chunks.append(line[6:].strip())
    return chunks


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


@pytest.mark.model
@pytest.mark.parametrize("is_stream", [True, False])
def test_http_client_that_leaves_is_forgotten_everywhere_within_a_second(mesh: Mesh, is_stream: bool):
    body = LONG | {"stream": is_stream}
    connection = http.client.HTTPConnection("127.0.0.1", mesh.http_port, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    mesh.wait_until(lambda: mesh.holdings()["scheduler"] == 1, 10, "running")
    connection.close()
    mesh.wait_until_nothing_is_held(timeout_s=3.0)  # one second, and the time that asking takes


@pytest.mark.model
def test_grpc_client_that_cancels_is_forgotten_everywhere_within_a_second(mesh: Mesh):
    with grpc.insecure_channel(f"127.0.0.1:{mesh.grpc_port}") as channel:
        stop = sampling_pb2.StopConditions(max_tokens=4000, ignore_eos=True)
        call = pb2_grpc.GenerationServiceStub(channel).Generate(pb2.GenerateRequest(text="Hi", stop_conditions=stop))
        assert next(call).HasField("started")
        assert next(call).HasField("delta")
        assert mesh.holdings()["scheduler"] == 1
        call.cancel()
        mesh.wait_until_nothing_is_held(timeout_s=3.0)


@pytest.mark.model
def test_cancel_call_ends_the_stream_with_a_cancelled_finish(mesh: Mesh):
    with grpc.insecure_channel(f"127.0.0.1:{mesh.grpc_port}") as channel:
        stub = pb2_grpc.GenerationServiceStub(channel)
        stop = sampling_pb2.StopConditions(max_tokens=4000, ignore_eos=True)
        call = stub.Generate(pb2.GenerateRequest(request_id="mine", text="Hi", stop_conditions=stop))
        assert next(call).started.request_id == "mine"
        stub.Cancel(pb2.CancelRequest(request_id="mine"), timeout=5)
        assert list(call)[-1].finished.reason == 3
        with pytest.raises(grpc.RpcError) as caught:
            stub.Cancel(pb2.CancelRequest(request_id="mine"), timeout=5)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.model
def test_clients_that_break_early_at_twice_the_capacity_leave_full_capacity(mesh: Mesh):
    def break_early(index: int) -> None:
        response = open_stream(mesh, LONG | {"prompt": [index + 5, 6, 7]})
        read_chunks(response, 1)
        leave(response)

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        list(pool.map(break_early, range(64)))
    mesh.wait_until_nothing_is_held(timeout_s=5.0)
    status, answer = mesh.post(
        "/v1/completions", {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    )
    assert (status, answer["usage"]["completion_tokens"]) == (200, 4)


def test_sigterm_lets_running_streams_finish_refuses_new_ones_and_exits_with_zero(tiny_model: Path):
    with running_mesh(tiny_model) as mesh:
        pids = mesh.pids()
        response = open_stream(mesh, LONG | {"max_tokens": 1500})
        read_chunks(response, 2)
        exit_status: list[int] = []
        stopper = threading.Thread(target=lambda: exit_status.append(mesh.stop()))
        stopper.start()
        mesh.wait_until(lambda: not mesh.is_serving(), 10, "refusing")
        rest = response.read().decode()
        leave(response)
        stopper.join(60)
        assert rest.rstrip().endswith("data: [DONE]")
        assert '"finish_reason":"length"' in rest
        assert exit_status == [0]
        assert alive(pids) == []
        assert mesh.stdout == [f"ready: {mesh.url}"]


def test_no_process_is_left_when_the_launcher_is_killed(tiny_model: Path):
    with running_mesh(tiny_model) as mesh:
        pids = mesh.pids()
        assert len(pids) >= 5
        response = open_stream(mesh, LONG)
        read_chunks(response, 1)
        os.kill(mesh.process.pid, signal.SIGKILL)
        mesh.wait_until(lambda: alive(pids) == [], 8, "all processes gone")
        leave(response)


def test_two_meshes_run_side_by_side(tiny_model: Path):
    body = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with running_mesh(tiny_model) as one, running_mesh(tiny_model, "--tcp") as other:
        answers = [mesh.post("/v1/completions", body) for mesh in (one, other)]
        assert [status for status, _ in answers] == [200, 200]
        assert answers[0][1]["choices"][0]["text"] == answers[1][1]["choices"][0]["text"]
        assert {service["name"] for service in one.status()} == {"gateway", "scheduler", "kv_cache", "worker-0"}
        assert {service["health"] for service in other.status()} == {"SERVING"}
