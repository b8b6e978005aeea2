"""A mesh that keeps its log and its plans, and a replay of them on a worker of its own."""

import concurrent.futures
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from services.scheduler.plan_log.files import read_plan_log
from tests.mesh import running_mesh
from tests.model_files import random_weights, tiny_config, write_hf_directory
from treadle.kv_cache.v1 import block_pb2

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state directory of a mesh that has served some requests and stopped."""
    config = tiny_config(max_model_len=512)
    model = write_hf_directory(tmp_path_factory.mktemp("tiny"), config, random_weights(config))
    state = tmp_path_factory.mktemp("state") / "of" / "mesh"
    flags = ["--state-dir", str(state), "--record", "--max-num-batched-tokens", "64", "--kv-cache-gib", "0.01"]
    with running_mesh(model, *flags) as mesh:
        assert {service["health"] for service in mesh.status()} == {"SERVING"}
        bodies = [
            {"prompt": [5 + index, 6, 7] * 20, "max_tokens": 30, "temperature": index % 2, "seed": index}
            for index in range(12)
        ]
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(lambda body: mesh.post("/v1/completions", body), bodies))
        assert [status for status, _ in answers] == [200] * 12
        assert mesh.stop() == 0
        assert (state / "mesh.log").read_text().splitlines() == mesh.log
    return state


def replay(directory: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-P", "-m", "services.launcher", "replay", str(directory), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ})


def workers() -> set[int]:
    """Process ids of the workers that any mesh of this test run has."""
    children = psutil.Process().children(recursive=True)
    return {child.pid for child in children if "services.worker" in child.cmdline()}


def test_state_directory_belongs_to_this_user_alone(recorded: Path) -> None:
    paths = [recorded, *recorded.rglob("*")]
    assert not [path for path in paths if path.stat().st_mode & 0o077]


def test_replay_samples_every_recorded_token_again_and_leaves_nothing_behind(recorded: Path) -> None:
    before = workers()
    result = replay(recorded / "plans")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == "all tokens are the same"
    assert workers() <= before


def test_replay_follows_blocks_to_host_memory_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_SCHEDULER_HOST_TIER", "always")
    config = tiny_config(max_model_len=512)
    model = write_hf_directory(tmp_path / "tiny", config, random_weights(config))
    plans = tmp_path / "plans"
    flags = ["--record", str(plans), "--swap-space-gib", "0.01", "--kv-cache-gib", "0.0002"]  # a few tens of blocks
    with running_mesh(model, *flags) as mesh:
        bodies = [{"prompt": [5 + index, 6, 7] * 20, "max_tokens": 60, "seed": index} for index in range(12)]
        for _ in range(2):  # the second time, what was driven out is brought back
            with concurrent.futures.ThreadPoolExecutor(12) as pool:
                answers = list(pool.map(lambda body: mesh.post("/v1/completions", body), bodies))
            assert [status for status, _ in answers] == [200] * 12
        assert mesh.stop() == 0
    copies = [copy for record in read_plan_log(plans) for copy in record.plan_sent.plan.block_copies]
    assert {copy.direction for copy in copies} == {
        block_pb2.COPY_DIRECTION_TO_HOST,
        block_pb2.COPY_DIRECTION_TO_DEVICE,
    }
    result = replay(plans)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == "all tokens are the same"


def test_replay_names_the_record_that_was_changed(recorded: Path, tmp_path: Path) -> None:
    (log,) = (recorded / "plans").glob("plans-*.log")
    damaged = bytearray(log.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (tmp_path / log.name).write_bytes(damaged)
    result = replay(tmp_path)
    assert result.returncode == 2
    assert "breaks the log" in result.stderr
