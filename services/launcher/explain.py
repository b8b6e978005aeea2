"""`treadle explain ID`: what happened to a request, and when, for people; asks the gateway's public HTTP interface.

Times are shown in milliseconds since the request arrived. A step is named by its worker's count of plans.
"""

import http.client
import json
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, TypeAlias
from urllib.parse import quote

import msgspec

from services.common.errors import EngineError, ErrorReason
from services.launcher.topology import join_host_port

EXIT_NO_MESH: Final = 3
_TIMEOUT_S: Final = 5.0

_BLOCKED_TEXTS: Final = {
    "no_worker": "no worker with its model took requests",
    "no_place": "as many requests ran as may",
    "no_blocks": "the pool had too few free blocks",
    "tenant_limit": "its tenant held as many blocks as it may",
}
_PREEMPTED_TEXTS: Final = {
    "out_of_blocks": "{by} needed a block and none was free",
    "place_taken": "{by} took its place",
    "blocks_taken": "{by} took its blocks",
    "burst_reclaimed": "it held more than is reserved for its tenant, and {by} needed blocks",
    "tenant_limit": "{by} needed a block and their tenant was at its limit",
    "worker_lost": "its worker was lost",
    "kv_cache_lost": "the KV-cache manager was lost",
}


class Peer(msgspec.Struct, frozen=True):
    """Another request; without an id it is another tenant's."""

    request_id: str | None
    priority: str


class Queued(msgspec.Struct, frozen=True, tag="queued"):
    """It arrived."""

    at_ms: int
    num_waiting: int
    num_running: int
    behind: Peer | None


class Blocked(msgspec.Struct, frozen=True, tag="blocked"):
    """It was the next to go, and could not."""

    at_ms: int
    until_ms: int
    cause: str
    num_times: int
    num_blocks_needed: int
    num_blocks_free: int


class Admitted(msgspec.Struct, frozen=True, tag="admitted"):
    """It got its blocks."""

    at_ms: int
    worker: str
    num_known_tokens: int
    num_cached_tokens: int
    num_went_before: int


class Scheduled(msgspec.Struct, frozen=True, tag="scheduled"):
    """It had rows in a run of steps."""

    at_ms: int
    until_ms: int
    worker: str
    kind: str
    first_step: int
    last_step: int
    num_tokens: int


class Stalled(msgspec.Struct, frozen=True, tag="stalled"):
    """Steps went by without it."""

    at_ms: int
    num_steps: int


class Preempted(msgspec.Struct, frozen=True, tag="preempted"):
    """It lost its blocks."""

    at_ms: int
    cause: str
    by: Peer | None
    num_lost_tokens: int


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """It ended."""

    at_ms: int
    reason: str
    num_output_tokens: int
    error: str | None
    error_text: str


Event: TypeAlias = Queued | Blocked | Admitted | Scheduled | Stalled | Preempted | Finished


class Choice(msgspec.Struct, frozen=True):
    """One request, or one choice of it."""

    request_id: str
    model: str
    priority: str
    status: str
    num_prompt_tokens: int
    num_events_left_out: int
    events: list[Event]


class Timeline(msgspec.Struct, frozen=True):
    """The answer."""

    choices: list[Choice]


@dataclass(frozen=True, slots=True)
class Question:
    """Which request, of which mesh."""

    request_id: str
    host: str
    http_port: int


def explain(question: Question, *, as_json: bool) -> int:
    """Print what happened to a request.

    Returns:
        0: it was printed; 3: no mesh answers there.

    Raises:
        EngineError: UNKNOWN_REQUEST: the mesh knows no such request; SCHEDULER_UNAVAILABLE: it cannot tell.
    """
    try:
        body = _fetch(question)
    except (OSError, http.client.HTTPException) as error:
        place = join_host_port(question.host, question.http_port)
        print(f"treadle: no mesh answers at http://{place} ({error}); name its port with --http-port", file=sys.stderr)
        return EXIT_NO_MESH
    if as_json:
        print(json.dumps(json.loads(body), indent=2, ensure_ascii=False))
    else:
        print(format_timeline(msgspec.json.decode(body, type=Timeline)))
    return 0


def format_timeline(timeline: Timeline) -> str:
    """Return a paragraph for each choice: a line about it, and a line for each event. Pure."""
    return "\n\n".join("\n".join(_choice_lines(choice)) for choice in timeline.choices)


def _fetch(question: Question) -> bytes:
    with closing(http.client.HTTPConnection(question.host, question.http_port, timeout=_TIMEOUT_S)) as connection:
        connection.request("GET", f"/v1/requests/{quote(question.request_id, safe='')}/timeline")
        response = connection.getresponse()
        body = response.read()
    if response.status == http.HTTPStatus.OK:
        return body
    reason = ErrorReason.SCHEDULER_UNAVAILABLE
    if response.status == http.HTTPStatus.NOT_FOUND:
        reason = ErrorReason.UNKNOWN_REQUEST
    try:
        text = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        text = f"the mesh answered with HTTP status {response.status}"
    raise EngineError(reason, text)


def _choice_lines(choice: Choice) -> Iterator[str]:
    start_ms = choice.events[0].at_ms
    arrived = datetime.fromtimestamp(start_ms / 1000, UTC).isoformat(sep=" ", timespec="milliseconds")
    yield (
        f"{choice.request_id}  {choice.status}  model {choice.model}  class {choice.priority}  "
        f"{_count(choice.num_prompt_tokens, 'prompt token')}  arrived {arrived}"
    )
    num_admissions = 0
    for event in choice.events:
        if isinstance(event, Admitted):
            num_admissions += 1
        word, text = _describe(event, is_again=num_admissions > 1)
        yield f"{event.at_ms - start_ms:>9,} ms  {word:<9}  {text}"
    if choice.num_events_left_out:
        yield f"{'':>12}  {_count(choice.num_events_left_out, 'event')} of the middle left out"


def _describe(event: Event, *, is_again: bool) -> tuple[str, str]:
    """Return the word and the text of an event."""
    match event:
        case Queued(num_waiting=num_waiting, num_running=num_running):
            next_one = "it was the next to go" if event.behind is None else f"{_who(event.behind)} was the next to go"
            return "queued", f"{num_waiting} waited and {num_running} ran before it; {next_one}"
        case Blocked():
            return "blocked", _blocked(event)
        case Admitted(worker=worker):
            again = "again " if is_again else ""
            cached = f"{event.num_cached_tokens:,} of {_count(event.num_known_tokens, 'token')} were cached"
            return "admitted", f"{again}to {worker}, after {_count(event.num_went_before, 'other')}; {cached}"
        case Scheduled():
            return ("decoded" if event.kind == "decode" else "computed"), _scheduled(event)
        case Stalled(num_steps=num_steps):
            return "stalled", f"for {_count(num_steps, 'step')}: a block came late"
        case Preempted(cause=cause, by=by):
            why = _PREEMPTED_TEXTS.get(cause, cause).format(by="nobody" if by is None else _who(by))
            return "preempted", f"{why}; {_count(event.num_lost_tokens, 'computed token')} lost"
        case Finished(reason=reason):
            failure = "" if event.error is None else f" {event.error}: {event.error_text}"
            return "finished", f"{reason}{failure}, {_count(event.num_output_tokens, 'output token')}"


def _blocked(event: Blocked) -> str:
    text = f"for {event.until_ms - event.at_ms:,} ms: {_BLOCKED_TEXTS.get(event.cause, event.cause)}"
    if event.num_blocks_needed:
        text += f" ({event.num_blocks_needed} needed, {event.num_blocks_free} free)"
    return text


def _scheduled(event: Scheduled) -> str:
    num_steps = event.last_step - event.first_step + 1
    steps = f"step {event.first_step}" if num_steps == 1 else f"steps {event.first_step}..{event.last_step}"
    duration_ms = event.until_ms - event.at_ms
    text = f"{_count(event.num_tokens, 'token')} in {steps} of {event.worker}, {duration_ms:,} ms"
    return text if num_steps == 1 else f"{text}, {duration_ms / num_steps:.1f} ms a step"


def _who(peer: Peer) -> str:
    name = "another tenant's request" if peer.request_id is None else peer.request_id
    return f"{name} ({peer.priority})"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
