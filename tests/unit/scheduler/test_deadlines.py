"""Requests that cannot make their deadline any more end before it, and give their blocks back at once."""

from services.common.errors import ErrorReason
from services.scheduler.core import PolicySettings, StepResult
from tests.unit.scheduler.harness import NOW_MS, WORKER, Harness

H1 = 101
STEP_MS = 10


def timed_step(harness: Harness) -> None:
    harness.talk()
    plan = harness.plan()
    result = harness.result_of(plan)
    harness.scheduler.apply(WORKER, StepResult(result.plan_id, result.sampled, (), STEP_MS * 1000))


def ended(harness: Harness) -> dict[str, ErrorReason | None]:
    return {
        event.request_id: event.finish.error.reason if event.finish.error else None
        for event in harness.events()
        if event.finish is not None
    }


def test_running_request_ends_when_its_least_output_takes_too_long_and_its_blocks_go_with_the_next_message() -> None:
    harness = Harness()
    harness.add("a", max_tokens=9, min_tokens=6, deadline_ms=NOW_MS + 60)
    timed_step(harness)
    harness.scheduler.end_hopeless(NOW_MS + 10)  # five steps are due, and fit
    assert ended(harness) == {}
    harness.scheduler.end_hopeless(NOW_MS + 11)
    assert ended(harness) == {"a": ErrorReason.DEADLINE_EXCEEDED}
    message = harness.talk()
    assert message is not None
    assert message.releases == (H1,)
    assert harness.plan().finished_handles == (H1,)


def test_waiting_request_ends_when_not_even_one_step_fits() -> None:
    harness = Harness(max_num_requests=1)
    harness.add("runs", max_tokens=9)
    timed_step(harness)
    harness.add("waits", deadline_ms=NOW_MS + 50)
    harness.scheduler.end_hopeless(NOW_MS + 40)
    assert ended(harness) == {}
    harness.scheduler.end_hopeless(NOW_MS + 41)
    assert ended(harness) == {"waits": ErrorReason.DEADLINE_EXCEEDED}


def test_long_prompt_needs_a_step_for_each_chunk() -> None:
    harness = Harness()
    harness.add("quick", (1,), 1)
    timed_step(harness)
    harness.add("long", (1,) * 20, deadline_ms=NOW_MS + 40)  # chunks of 8, 8 and 4
    harness.talk()
    harness.scheduler.end_hopeless(NOW_MS + 11)
    assert ended(harness) == {"quick": None, "long": ErrorReason.DEADLINE_EXCEEDED}


def test_request_whose_last_step_is_in_flight_is_not_ended_early() -> None:
    harness = Harness()
    harness.add("a", max_tokens=1, deadline_ms=NOW_MS + 60)
    harness.add("b", max_tokens=9)
    timed_step(harness)
    harness.add("c", deadline_ms=NOW_MS + 60)
    harness.talk()
    plan = harness.plan()
    harness.scheduler.end_hopeless(NOW_MS + 59)
    assert ended(harness) == {"a": None}
    harness.apply(plan)


def test_nothing_ends_early_before_a_step_was_measured_or_under_a_policy_without_deadlines() -> None:
    harness = Harness()
    harness.add("a", min_tokens=4, deadline_ms=NOW_MS + 10)
    harness.scheduler.end_hopeless(NOW_MS + 9)
    assert ended(harness) == {}
    harness = Harness(policy=PolicySettings("fcfs"))
    harness.add("a", min_tokens=4, deadline_ms=NOW_MS + 10)
    timed_step(harness)
    harness.scheduler.end_hopeless(NOW_MS + 9)
    assert ended(harness) == {}
    harness.scheduler.expire_deadlines(NOW_MS + 10)
    assert ended(harness) == {"a": ErrorReason.DEADLINE_EXCEEDED}
