"""`treadle explain`: the rendering, and its exit statuses against a real HTTP server."""

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from services.launcher.cli import main
from services.launcher.explain import Timeline, format_timeline

ARRIVAL_MS = 1_800_000_000_000


def at(offset_ms: int, type: str, **fields: object) -> dict[str, object]:
    return {"type": type, "at_ms": ARRIVAL_MS + offset_ms, **fields}


def run(kind: str, offset_ms: int, until_ms: int, steps: tuple[int, int], num_tokens: int) -> dict[str, object]:
    first_step, last_step = steps
    until = {"until_ms": ARRIVAL_MS + until_ms, "worker": "worker-0", "kind": kind}
    return at(offset_ms, "scheduled", **until, first_step=first_step, last_step=last_step, num_tokens=num_tokens)


def admitted(offset_ms: int, num_known: int, num_cached: int, num_went_before: int) -> dict[str, object]:
    counts = {"num_known_tokens": num_known, "num_cached_tokens": num_cached, "num_went_before": num_went_before}
    return at(offset_ms, "admitted", worker="worker-0", **counts)


def choice(request_id: str, *events: dict[str, object], status: str = "finished") -> dict[str, object]:
    return {
        "request_id": request_id,
        "model": "tiny",
        "priority": "normal",
        "status": status,
        "num_prompt_tokens": 1200,
        "num_events_left_out": 0,
        "events": list(events),
    }


QUEUED = at(0, "queued", num_waiting=0, num_running=1, behind=None)
PREEMPTED_ONCE = choice(
    "r7",
    at(0, "queued", num_waiting=3, num_running=8, behind={"request_id": "r2", "priority": "vip"}),
    at(
        20,
        "blocked",
        until_ms=ARRIVAL_MS + 320,
        cause="no_blocks",
        num_times=9,
        num_blocks_needed=76,
        num_blocks_free=12,
    ),
    admitted(321, 1200, 0, 3),
    run("catch_up", 321, 461, (40, 42), 1200),
    run("decode", 461, 1061, (43, 72), 30),
    at(1061, "stalled", num_steps=1),
    run("decode", 1061, 1081, (74, 74), 1),
    at(
        1090,
        "preempted",
        cause="out_of_blocks",
        by={"request_id": None, "priority": "normal"},
        num_lost_tokens=1231,
    ),
    admitted(1500, 1232, 1216, 1),
    run("catch_up", 1500, 1520, (90, 90), 16),
    at(2000, "finished", reason="length", num_output_tokens=64, error=None, error_text=""),
)
RENDERED = """\
r7  finished  model tiny  class normal  1,200 prompt tokens  arrived 2027-01-15 08:00:00.000+00:00
        0 ms  queued     3 waited and 8 ran before it; r2 (vip) was the next to go
       20 ms  blocked    for 300 ms: the pool had too few free blocks (76 needed, 12 free)
      321 ms  admitted   to worker-0, after 3 others; 0 of 1,200 tokens were cached
      321 ms  computed   1,200 tokens in steps 40..42 of worker-0, 140 ms, 46.7 ms a step
      461 ms  decoded    30 tokens in steps 43..72 of worker-0, 600 ms, 20.0 ms a step
    1,061 ms  stalled    for 1 step: a block came late
    1,061 ms  decoded    1 token in step 74 of worker-0, 20 ms
    1,090 ms  preempted  another tenant's request (normal) needed a block and none was free; 1,231 computed tokens lost
    1,500 ms  admitted   again to worker-0, after 1 other; 1,216 of 1,232 tokens were cached
    1,500 ms  computed   16 tokens in step 90 of worker-0, 20 ms
    2,000 ms  finished   length, 64 output tokens"""


def answer(*choices: dict[str, object]) -> bytes:
    return json.dumps({"object": "timeline", "request_id": "r", "choices": list(choices)}).encode()


def rendered(*choices: dict[str, object]) -> str:
    return format_timeline(msgspec.json.decode(answer(*choices), type=Timeline))


def test_timeline_reads_as_a_story() -> None:
    assert rendered(PREEMPTED_ONCE) == RENDERED


def test_choices_are_paragraphs() -> None:
    first, second = rendered(choice("r#0", QUEUED), choice("r#1", QUEUED)).split("\n\n")
    assert (first.split()[0], second.split()[0]) == ("r#0", "r#1")


@pytest.mark.parametrize(
    ("cause", "text"),
    [
        ("place_taken", "v (vip) took its place; 5 computed tokens lost"),
        ("blocks_taken", "v (vip) took its blocks; 5 computed tokens lost"),
        (
            "burst_reclaimed",
            "it held more than is reserved for its tenant, and v (vip) needed blocks; 5 computed tokens lost",
        ),
        ("tenant_limit", "v (vip) needed a block and their tenant was at its limit; 5 computed tokens lost"),
        ("worker_lost", "its worker was lost; 5 computed tokens lost"),
        ("kv_cache_lost", "the KV-cache manager was lost; 5 computed tokens lost"),
        ("sunspots", "sunspots; 5 computed tokens lost"),
    ],
)
def test_every_cause_of_a_preemption_has_its_words(cause: str, text: str) -> None:
    by = None if cause.endswith("lost") else {"request_id": "v", "priority": "vip"}
    event = at(3, "preempted", cause=cause, by=by, num_lost_tokens=5)
    assert rendered(choice("r", QUEUED, event)).splitlines()[-1] == f"        3 ms  preempted  {text}"


def test_failure_tells_its_reason() -> None:
    error = {"error": "STEP_FAILED", "error_text": "the device is gone"}
    event = at(3, "finished", reason="error", num_output_tokens=0, **error)
    assert rendered(choice("r", QUEUED, event)).endswith(
        "finished   error STEP_FAILED: the device is gone, 0 output tokens"
    )


class FakeGateway(http.server.BaseHTTPRequestHandler):
    """Knows the request ``r#0`` and no other."""

    def do_GET(self) -> None:
        is_known = self.path == "/v1/requests/r%230/timeline"
        body = answer(choice("r#0", QUEUED)) if is_known else b'{"error": {"message": "No such request."}}'
        self.send_response(200 if is_known else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def gateway() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeGateway) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield str(server.server_address[1])
        finally:
            server.shutdown()
            thread.join()


def test_explain_prints_the_story_or_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    with gateway() as port:
        assert main(["explain", "r#0", "--http-port", port]) == 0
        assert capsys.readouterr().out.splitlines()[1].endswith("0 waited and 1 ran before it; it was the next to go")
        assert main(["explain", "r#0", "--http-port", port, "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == json.loads(answer(choice("r#0", QUEUED)))


def test_explain_of_an_unknown_request_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    with gateway() as port:
        assert main(["explain", "nobody", "--http-port", port]) == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "treadle: No such request.\n")


def test_explain_exits_with_3_when_no_mesh_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with gateway() as port:
        pass
    assert main(["explain", "r", "--http-port", port]) == 3
    assert "no mesh answers at http://127.0.0.1:" in capsys.readouterr().err
