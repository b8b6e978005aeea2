"""`treadle kv fsck` of whole meshes: requests that come, leave and move are no leaks, and no death leaves one."""

import concurrent.futures
import json
import subprocess
import sys
import threading

import httpx
import pytest

from tests.failure.test_kill_one_process import body
from tests.mesh import Mesh

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CLEAN = {"is_clean": True, "disagreements": [], "broken_law": None}


def fsck(mesh: Mesh) -> tuple[int, object]:
    command = [sys.executable, "-P", "-m", "services.launcher", "kv", "fsck", "--json"]
    command += ["--http-port", str(mesh.http_port)]
    result = subprocess.run(command, capture_output=True, text=True, env=mesh.environ, timeout=60, check=False)
    return result.returncode, json.loads(result.stdout) if result.stdout else result.stderr


def has_successor(mesh: Mesh, name: str, former_pid: int) -> bool:
    (service,) = [service for service in mesh.status() if service["name"] == name]
    return service["pid"] not in (None, former_pid) and service["health"] == "SERVING"


def ask_and_leave(mesh: Mesh, index: int, is_over: threading.Event) -> int:
    """Stream answers without pause; leave every other one in the middle."""
    num_streams = 0
    while not is_over.is_set():
        request = body(index, 40 + 100 * (index % 3)) | {"stream": True}
        with httpx.stream("POST", f"{mesh.url}/v1/completions", json=request, timeout=60) as response:
            for num_lines, _ in enumerate(response.iter_lines()):
                if num_streams % 2 and num_lines > 10:
                    break
        num_streams += 1
    return num_streams


def test_mesh_is_clean_under_load_and_after_each_process_was_killed(mesh: Mesh):
    is_over = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        clients = [pool.submit(ask_and_leave, mesh, index, is_over) for index in range(8)]
        try:
            answers = [fsck(mesh) for _ in range(3)]
        finally:
            is_over.set()
        assert all(client.result(60) for client in clients)
    assert answers == [(0, CLEAN)] * 3
    for victim in ("worker-0", "scheduler", "kv_cache"):
        former_pid = mesh.kill(victim)
        mesh.wait_until(lambda victim=victim, pid=former_pid: has_successor(mesh, victim, pid), 30, "a new life")
        mesh.wait_until(mesh.is_serving, 30, "ready again")
        assert fsck(mesh) == (0, CLEAN)
