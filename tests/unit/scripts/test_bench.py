"""The load generator: what it parses, what it counts, what it sends."""

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.bench.fairness import make_varied_bodies, output_lengths, tokens_between
from scripts.bench.memory import Memory, read_memory
from scripts.bench.report import Objective, format_report, inter_token_latencies_ms, make_report, percentile
from scripts.bench.serve import Load, make_bodies, run, run_closed_loop
from scripts.bench.streaming_client import Endpoint, Outcome, StreamingClient

TOKEN = b'data: {"choices": [{"text": "a"}]}\n\n'
EMPTY = b'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 3}}\n\n'
DONE = b"data: [DONE]\n\n"
LOAD = Load("tiny", "ids", 4, 3, 10, 20, num_requests=6, num_warm_up=2, concurrency=2, rate=None, seed=1)


@asynccontextmanager
async def a_server(pieces: Sequence[bytes], status: str = "200 OK") -> AsyncIterator[tuple[Endpoint, list[object]]]:
    """A server that answers each request on a connection with the pieces, a chunk each."""
    bodies: list[object] = []
    connections: list[tuple[asyncio.StreamWriter, asyncio.Event]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        has_ended = asyncio.Event()
        connections.append((writer, has_ended))
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0])
                bodies.append(json.loads(await reader.readexactly(length)))
                writer.write(f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
                for piece in (*pieces, b""):
                    writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()
        finally:
            has_ended.set()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield Endpoint("127.0.0.1", port, "/v1/completions"), bodies
        for writer, has_ended in connections:
            writer.close()
            await has_ended.wait()


async def post_once(pieces: Sequence[bytes], status: str = "200 OK") -> Outcome:
    async with a_server(pieces, status) as (endpoint, _):
        client = StreamingClient(endpoint, timeout_s=10)
        outcome = await client.post(b"{}")
        client.close()
        return outcome


async def test_client_counts_events_with_text_and_takes_tokens_from_usage() -> None:
    outcome = await post_once([TOKEN, TOKEN + TOKEN, EMPTY, USAGE, DONE])
    assert (len(outcome.event_s), outcome.num_output_tokens, outcome.num_prompt_tokens) == (3, 3, 4)
    assert outcome.error is None
    assert outcome.sent_s <= outcome.event_s[0] <= outcome.event_s[1] == outcome.event_s[2] <= outcome.end_s


async def test_client_joins_events_that_are_split_over_chunks() -> None:
    data = TOKEN + USAGE + DONE
    outcome = await post_once([data[index : index + 7] for index in range(0, len(data), 7)])
    assert (len(outcome.event_s), outcome.num_output_tokens, outcome.error) == (1, 3, None)


@pytest.mark.parametrize(
    ("pieces", "status", "text"),
    [
        ([b'{"error": {"message": "queue full"}}'], "429 Too Many Requests", "HTTP 429.*queue full"),
        ([TOKEN], "200 OK", r"ended without \[DONE\]"),
        ([TOKEN, b'data: {"error": {"message": "worker lost"}}\n\n', DONE], "200 OK", "worker lost"),
        ([b"data: {\n\n"], "200 OK", "JSONDecodeError"),
    ],
    ids=["refused", "cut off", "error event", "no JSON"],
)
async def test_client_reports_a_failure_as_the_outcome(pieces: list[bytes], status: str, text: str) -> None:
    outcome = await post_once(pieces, status)
    assert outcome.error is not None
    assert re.search(text, outcome.error)


async def test_client_reports_a_server_that_is_not_there() -> None:
    async with a_server([]) as (endpoint, _):
        pass
    assert "ConnectionRefusedError" in ((await StreamingClient(endpoint, 10).post(b"{}")).error or "")


async def test_closed_loop_sends_every_body_once() -> None:
    async with a_server([TOKEN, DONE]) as (endpoint, bodies):
        clients = [StreamingClient(endpoint, 10) for _ in range(3)]
        outcomes = await run_closed_loop(clients, [str(number).encode() for number in range(10)])
        for client in clients:
            client.close()
    assert sorted(bodies, key=str) == list(range(10))
    assert [outcome.error for outcome in outcomes] == [None] * 10


@pytest.mark.parametrize("rate", [None, 1000.0], ids=["closed loop", "open loop"])
async def test_run_measures_the_load_without_its_warm_up(rate: float | None) -> None:
    load = Load(**{**{name: getattr(LOAD, name) for name in LOAD.__slots__}, "rate": rate})
    async with a_server([TOKEN, TOKEN, TOKEN, USAGE, DONE]) as (endpoint, bodies):
        report = await run(load, endpoint, Objective(), timeout_s=10)
    assert (report.num_completed, report.num_failed, len(bodies)) == (6, 0, 8)
    assert (report.num_prompt_tokens, report.num_output_tokens) == (24, 18)
    assert "6 completed, 0 failed" in format_report(report)


def test_prompts_are_determined_by_the_seed_and_share_no_prefix() -> None:
    first, again, other = make_bodies(LOAD, 5, 1), make_bodies(LOAD, 5, 1), make_bodies(LOAD, 5, 2)
    assert first == again
    assert first != other
    prompts = [tuple(json.loads(body)["prompt"]) for body in first]
    assert len(set(prompts)) == 5
    assert all(len(prompt) == 4 and all(10 <= token <= 20 for token in prompt) for prompt in prompts)
    assert json.loads(first[0])["ignore_eos"] is True


def test_edit_prompt_is_a_program_and_the_beginning_of_its_copy_with_one_name_changed() -> None:
    load = replace(LOAD, prompt_kind="edit", input_tokens=120)
    first, second = (json.loads(body)["prompt"] for body in make_bodies(load, 2, 1))
    assert first != second
    heading, *program, renamed, one, two, three, blank, _ = first.split("\n")
    assert heading == "# shapes.py"
    assert len(program) == 12  # three functions of four lines
    old, new = re.fullmatch(r"# shapes.py with (\w+) renamed to (\w+)", renamed).groups()  # type: ignore[union-attr]
    assert [one, two, three, blank] == [line.replace(old, new) for line in program[:4]]


def test_requests_are_greedy_unless_a_temperature_is_given_and_then_seeded() -> None:
    (greedy,), (sampled,) = make_bodies(LOAD, 1, 1), make_bodies(replace(LOAD, temperature=1.0), 1, 1)
    assert (json.loads(greedy)["temperature"], "seed" in json.loads(greedy)) == (0, False)
    assert (json.loads(sampled)["temperature"], "seed" in json.loads(sampled)) == (1, True)


def an_outcome(event_s: list[float], *, tokens: int, end_s: float, error: str | None = None) -> Outcome:
    return Outcome(0.0, event_s, end_s, num_prompt_tokens=None, num_output_tokens=tokens, error=error)


def test_report_follows_the_definitions() -> None:
    outcomes = [
        an_outcome([0.1, 0.2, 0.4], tokens=4, end_s=0.5),
        an_outcome([0.3], tokens=1, end_s=1.0),
        an_outcome([], tokens=0, end_s=2.0, error="refused"),
    ]
    report = make_report(outcomes, 10, Objective(ttft_ms=200), client_cpu_s=0.5)
    assert (report.num_completed, report.num_failed, report.errors) == (2, 1, ("refused",))
    assert (report.num_prompt_tokens, report.num_output_tokens) == (20, 5)
    assert (report.output_tokens_per_s, report.total_tokens_per_s) == (2.5, 12.5)
    assert (report.requests_per_s, report.goodput_requests_per_s, report.client_cpu_ratio) == (1.0, 0.5, 0.25)
    assert report.ttft_ms.mean == pytest.approx(200)
    assert report.tpot_ms.mean == pytest.approx(100)
    assert inter_token_latencies_ms(outcomes[0]) == pytest.approx([100, 200])
    assert report.e2e_ms.max == pytest.approx(1000)


def test_report_of_failures_alone_has_no_latencies() -> None:
    report = make_report([an_outcome([], tokens=0, end_s=1.0, error="x")], 10, Objective(), 0.0)
    assert math.isnan(report.ttft_ms.p99)
    assert report.output_tokens_per_s == 0


@pytest.mark.parametrize(("percent", "expected"), [(0, 1.0), (50, 2.5), (90, 3.7), (100, 4.0)])
def test_percentile_interpolates_as_numpy_does(percent: int, expected: float) -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], percent) == pytest.approx(expected)


def test_base_url_may_have_a_prefix_and_needs_a_host() -> None:
    assert Endpoint.parse("http://h:1/api/", "/v1/x") == Endpoint("h", 1, "/api/v1/x")
    with pytest.raises(ValueError, match="must look like"):
        Endpoint.parse("https://h", "/v1/x")


def test_memory_is_read_from_the_kernel(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7/smaps_rollup").write_text(
        "00-ff ---p 0 00:00 0 [rollup]\nRss: 2000 kB\nPss: 1000 kB\nPss_Dirty: 5 kB\nAnonymous: 500 kB\n"
    )
    assert read_memory("gateway", 7, tmp_path) == Memory("gateway", 7, 2.048, 1.024, 0.512)


def test_tokens_of_a_time_are_those_out_in_it_and_prompts_that_began_to_be_answered_in_it() -> None:
    before = Outcome(sent_s=0.0, event_s=[0.5, 1.5])
    begun = Outcome(sent_s=0.0, event_s=[1.0, 2.0, 3.0])
    late = Outcome(sent_s=0.0, event_s=[4.0])
    waiting = Outcome(sent_s=0.0)
    outcomes = [before, begun, late, waiting]
    assert tokens_between(outcomes, 0.75, 2.0, LOAD) == LOAD.input_tokens + 3
    assert tokens_between(outcomes, 0.0, 9.0, LOAD) == 3 * LOAD.input_tokens + 6


def test_answers_of_both_tenants_differ_in_length_and_are_the_same_when_sent_again() -> None:
    lengths = output_lengths(LOAD, 400, 3)
    bodies = [json.loads(body) for body in make_varied_bodies(LOAD, 400, 3)]
    assert [body["max_tokens"] for body in bodies] == lengths == output_lengths(LOAD, 400, 3)
    assert set(lengths) == set(range(1, 2 * LOAD.output_tokens))
    assert len({tuple(body["prompt"]) for body in bodies}) > 390
