"""A mesh that was told to guess tokens: the answers of one that was not, and a replay of its plans."""

import concurrent.futures
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mesh import Mesh, running_mesh
from tests.model_files import random_weights, tiny_config, write_hf_directory

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_REQUESTS = 8
FLAGS = ("--max-num-batched-tokens", "64", "--kv-cache-gib", "0.01")


def body(index: int) -> dict[str, object]:
    sampling = {"temperature": 0} if index % 2 else {"temperature": 0.3, "top_p": 0.9, "seed": index}
    prompt = [5 + index, 6, 7, 8] * 12
    return {"prompt": prompt, "max_tokens": 300, "ignore_eos": True, "return_token_ids": True} | sampling


def ask_all(mesh: Mesh) -> list[list[int]]:
    with concurrent.futures.ThreadPoolExecutor(NUM_REQUESTS) as pool:
        answers = list(pool.map(lambda index: mesh.post("/v1/completions", body(index)), range(NUM_REQUESTS)))
    assert [status for status, _ in answers] == [200] * NUM_REQUESTS
    return [answer["choices"][0]["token_ids"] for _, answer in answers]


def count_guesses(mesh: Mesh, name: str) -> float:
    status, text = mesh.get("/metrics")
    assert status == 200
    return sum(map(float, re.findall(rf"^treadle_gateway_{name}_tokens_total\{{.*\}} (\S+)$", text, re.MULTILINE)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config(max_model_len=512)
    return write_hf_directory(tmp_path_factory.mktemp("tiny"), config, random_weights(config))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """What a mesh answers that does not guess."""
    with running_mesh(model, *FLAGS) as mesh:
        answers = ask_all(mesh)
        assert count_guesses(mesh, "draft") == 0
        assert mesh.stop() == 0
    return answers


@pytest.fixture
def guessing(model: Path, tmp_path: Path) -> Iterator[Mesh]:
    with running_mesh(model, *FLAGS, "--speculation", "ngram", "--record", str(tmp_path / "plans")) as mesh:
        yield mesh


def test_answers_are_those_without_guesses_and_the_plans_replay(
    expected: list[list[int]], guessing: Mesh, tmp_path: Path
) -> None:
    assert ask_all(guessing) == expected
    num_drafted, num_accepted = count_guesses(guessing, "draft"), count_guesses(guessing, "accepted")
    assert 0 < num_accepted < num_drafted
    guessing.wait_until_nothing_is_held(timeout_s=10)
    assert guessing.stop() == 0
    command = [sys.executable, "-P", "-m", "services.launcher", "replay", str(tmp_path / "plans")]
    replayed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=guessing.environ)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert replayed.stdout.splitlines()[-1] == "all tokens are the same"
