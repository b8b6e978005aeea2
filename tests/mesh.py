"""A whole mesh as processes, for tests: started as a user would, asked over its public and its inner surfaces.

Guarantees: ports and the run directory are its own, so meshes can run side by side; whatever a test does, no process is
left when the context ends.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil

from services.common.clock import SystemClock
from services.launcher.model_store import default_store_root
from treadle.kv_cache.v1 import kv_cache_service_pb2, kv_cache_service_pb2_grpc
from treadle.scheduler.v1 import scheduler_service_pb2, scheduler_service_pb2_grpc
from treadle.worker.v1 import worker_service_pb2, worker_service_pb2_grpc

START_TIMEOUT_S = 120.0
ROOT = Path(__file__).resolve().parent.parent


@dataclass(slots=True)
class Mesh:
    """A running mesh.

    Attributes:
        process: The launcher.
        http_port: Of the HTTP API.
        grpc_port: Of the gRPC API.
        environ: Environment of the launcher, which `treadle status` needs too.
        log: Everything that the launcher wrote to standard error so far.
        stdout: Everything that it wrote to standard output so far.
    """

    process: "subprocess.Popen[str]"
    http_port: int
    grpc_port: int
    environ: dict[str, str]
    log: list[str] = field(default_factory=list)
    stdout: list[str] = field(default_factory=list)
    is_ready: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def status(self) -> list[dict[str, Any]]:
        """What `treadle status --json` says."""
        command = [*_treadle(), "status", "--json", "--http-port", str(self.http_port)]
        result = subprocess.run(command, capture_output=True, text=True, env=self.environ, timeout=30, check=False)
        return json.loads(result.stdout) if result.stdout.strip() else []

    def pid(self, name: str) -> int:
        return next(int(service["pid"]) for service in self.status() if service["name"] == name)

    def kill(self, name: str, signal_number: int = signal.SIGKILL) -> int:
        """Send a signal to one service; returns its process id."""
        pid = self.pid(name)
        os.kill(pid, signal_number)
        return pid

    def pids(self) -> list[int]:
        """Process ids of the launcher and everything below it."""
        launcher = psutil.Process(self.process.pid)
        return [launcher.pid, *(child.pid for child in launcher.children(recursive=True))]

    def holdings(self) -> dict[str, int]:
        """What every service behind the gateway holds of requests: all zero when nothing runs."""
        addresses = {service["name"]: service["address"] for service in self.status()}
        held: dict[str, int] = {}
        with grpc.insecure_channel(addresses["scheduler"]) as channel:
            load = scheduler_service_pb2_grpc.SchedulerServiceStub(channel).GetLoad(
                scheduler_service_pb2.GetLoadRequest(), timeout=5
            )
            held["scheduler"] = load.num_waiting + load.num_running
        with grpc.insecure_channel(addresses["kv_cache"]) as channel:
            usage = kv_cache_service_pb2_grpc.KVCacheServiceStub(channel).GetUsage(
                kv_cache_service_pb2.GetUsageRequest(), timeout=5
            )
            for pool in usage.pools:
                assert pool.num_free + pool.num_cached + pool.num_held == pool.num_blocks - 1
            held["kv_cache"] = sum(pool.num_leases + pool.num_held for pool in usage.pools)
        for name, address in addresses.items():
            if name.startswith("worker"):
                with grpc.insecure_channel(address) as channel:
                    state = worker_service_pb2_grpc.WorkerServiceStub(channel).GetState(
                        worker_service_pb2.GetStateRequest(), timeout=5
                    )
                held[name] = state.num_requests
        return held

    def wait_until(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Ask again and again until ``condition`` holds; fail with the log when it does not in time."""
        pause = threading.Event()
        deadline = _now_s() + timeout_s
        while _now_s() < deadline:
            if condition():
                return
            pause.wait(0.05)
        raise AssertionError(f"{what} did not come true within {timeout_s} s\n" + "\n".join(self.log[-40:]))

    def wait_until_nothing_is_held(self, timeout_s: float) -> None:
        self.wait_until(lambda: not any(self.holdings().values()), timeout_s, "holding nothing")

    def get(self, path: str) -> tuple[int, str]:
        """GET a path; returns status and body."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def post(self, path: str, body: object, timeout_s: float = 120.0) -> tuple[int, dict[str, Any]]:
        """POST a JSON body; returns status and decoded answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def is_serving(self) -> bool:
        """Whether the HTTP API says that it is ready."""
        try:
            return self.get("/ready")[0] == 200
        except OSError:
            return False

    def stop(self, timeout_s: float = 60.0) -> int:
        """Ask the launcher to stop, as ^C or a service manager would; returns its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)


@contextlib.contextmanager
def running_mesh(model: Path | str, *flags: str) -> Iterator[Mesh]:
    """Start a mesh and wait until it says that it is ready."""
    with contextlib.ExitStack() as stack:
        run_root = stack.enter_context(tempfile.TemporaryDirectory(prefix="tr-"))
        environ = {**os.environ, "XDG_RUNTIME_DIR": run_root, "TREADLE_CACHE_DIR": _cache_dir()}
        environ.pop("PYTHONPATH", None)
        http_port, grpc_port = free_ports(2)
        command = [*_treadle(), "serve", "--model", str(model), "--http-port", str(http_port)]
        command += ["--grpc-port", str(grpc_port), *flags]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ, cwd=run_root
        )
        mesh = Mesh(process, http_port, grpc_port, environ)
        outputs = ((process.stdout, mesh.stdout), (process.stderr, mesh.log))
        readers = [threading.Thread(target=_read_lines, args=(*output, mesh), daemon=True) for output in outputs]
        for reader in readers:
            reader.start()
            stack.callback(reader.join, 5)
        stack.callback(_end, mesh)  # before the readers are waited for, which end with the processes
        if not mesh.is_ready.wait(START_TIMEOUT_S) or process.poll() is not None:
            raise AssertionError("the mesh did not start\n" + "\n".join(mesh.log[-60:]))
        yield mesh


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _treadle() -> list[str]:
    return [sys.executable, "-P", "-m", "services.launcher"]


def _cache_dir() -> str:
    return str(default_store_root(os.environ).parent)


def _read_lines(stream: Any, lines: list[str], mesh: Mesh) -> None:
    with stream:
        for line in stream:
            lines.append(line.rstrip("\n"))
            if line.startswith("ready: "):
                mesh.is_ready.set()
    mesh.is_ready.set()  # the launcher has ended; nobody should wait any longer


def _end(mesh: Mesh) -> None:
    """Kill what is left; a test that cares how it ends has ended it before."""
    with contextlib.suppress(psutil.NoSuchProcess):
        pids = mesh.pids() if mesh.process.poll() is None else []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    mesh.process.wait(10)


def _now_s() -> float:
    return SystemClock().monotonic_s()
