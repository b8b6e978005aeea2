"""`treadle explain` against a mesh of processes: by the id of an answer, with the prefix hit and the choices."""

import json

import httpx
import pytest

from services.launcher.cli import main
from tests.mesh import Mesh

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.slow]


def test_explain_tells_of_an_answer_what_was_cached_and_of_both_its_choices(
    mesh: Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {"prompt": list(range(300, 400)), "max_tokens": 8, "temperature": 1, "n": 2, "ignore_eos": True}
    answer = httpx.post(f"{mesh.url}/v1/completions", json=body, timeout=60).json()
    assert main(["explain", answer["id"], "--http-port", str(mesh.http_port)]) == 0
    first, second = capsys.readouterr().out.split("\n\n")
    for story in (first, second):
        assert "100 prompt tokens" in story
        assert story.rstrip().endswith("finished   length, 8 output tokens")
    assert main(["explain", answer["id"], "--http-port", str(mesh.http_port), "--json"]) == 0
    choices = json.loads(capsys.readouterr().out)["choices"]
    assert [choice["events"][0]["type"] for choice in choices] == ["queued", "queued"]
    num_computed = [
        sum(event["num_tokens"] for event in choice["events"] if event["type"] == "scheduled") for choice in choices
    ]
    num_cached = [
        event["num_cached_tokens"] for choice in choices for event in choice["events"] if event["type"] == "admitted"
    ]
    assert [sum(pair) for pair in zip(num_computed, num_cached, strict=True)] == [107, 107]
