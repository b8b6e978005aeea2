"""Timelines: exact stories of small worlds, and runs of steps that agree with the plans in many random ones."""

from collections import defaultdict
from random import Random

import pytest

from services.common.errors import ErrorReason
from services.gateway.timeline_wire import from_explain_response
from services.scheduler.core import FinishReason, PriorityClass, StepResult
from services.scheduler.core.timeline import MAX_EVENTS, Timeline
from services.scheduler.core.timeline_events import (
    Admitted,
    Blocked,
    BlockedCause,
    Finished,
    Peer,
    Preempted,
    PreemptionCause,
    Queued,
    RequestTimeline,
    RunKind,
    Scheduled,
    Stalled,
    TimelineEvent,
)
from services.scheduler.timeline_wire import to_explain_response
from tests.unit.scheduler.harness import NOW_MS, WORKER, Harness, submission

NORMAL, VIP, BATCH = PriorityClass.NORMAL, PriorityClass.VIP, PriorityClass.BATCH
PROMPT = (1, 2, 3, 4)
OTHER_PROMPT = (5, 6, 7, 8)
FIRST_ARRIVAL = Queued(NOW_MS, num_waiting=0, num_running=0, behind=None)


def story(harness: Harness, request_id: str, tenant: str | None = None) -> RequestTimeline:
    (timeline,) = harness.scheduler.explain(request_id, tenant)
    return timeline


def events(harness: Harness, request_id: str) -> tuple[TimelineEvent, ...]:
    return story(harness, request_id).events


def run(kind: RunKind, at_ms: int, until_ms: int, first_step: int, last_step: int, num_tokens: int) -> Scheduled:
    return Scheduled(at_ms, until_ms, WORKER, kind, first_step, last_step, num_tokens)


def length(at_ms: int, num_output_tokens: int) -> Finished:
    return Finished(at_ms, FinishReason.LENGTH, num_output_tokens, None, "")


def admitted(num_known: int, num_cached: int = 0, num_went_before: int = 0, at_ms: int = NOW_MS) -> Admitted:
    return Admitted(at_ms, WORKER, num_known, num_cached, num_went_before)


def test_request_that_runs_alone_has_one_run_of_chunks_and_one_of_decoding() -> None:
    harness = Harness()
    harness.add("a", tuple(range(1, 13)), 4)
    for second in range(1, 6):
        harness.talk()
        plan = harness.plan()
        harness.scheduler.advance_time(NOW_MS + 10 * second)
        harness.apply(plan)
    assert story(harness, "a") == RequestTimeline(
        request_id="a",
        tenant="tenant",
        model="m",
        priority=NORMAL,
        status="finished",
        num_prompt_tokens=12,
        num_events_left_out=0,
        events=(
            FIRST_ARRIVAL,
            admitted(12),
            run(RunKind.CATCH_UP, 1000, 1020, 1, 2, 12),
            run(RunKind.DECODE, 1020, 1050, 3, 5, 3),
            length(1050, 4),
        ),
    )


def test_live_request_shows_what_is_computed_so_far() -> None:
    harness = Harness()
    harness.add("a", PROMPT, 9)
    for _ in range(3):
        harness.step()
    harness.scheduler.advance_time(NOW_MS + 7)
    timeline = story(harness, "a")
    assert timeline.status == "running"
    assert timeline.events[-1] == run(RunKind.DECODE, NOW_MS, NOW_MS + 7, 2, 3, 2)


def test_waiting_request_tells_behind_whom_and_why_it_waits() -> None:
    harness = Harness(max_num_requests=1)
    harness.add("a", PROMPT, 3)
    harness.step()
    harness.add("b", OTHER_PROMPT, 1)
    harness.add("c", OTHER_PROMPT, 1)
    assert story(harness, "b").status == "waiting"
    harness.run_to_rest()
    first, second = events(harness, "b"), events(harness, "c")
    assert first[0] == Queued(NOW_MS, num_waiting=0, num_running=1, behind=None)
    assert isinstance(first[1], Blocked)
    assert first[1].cause is BlockedCause.NO_PLACE
    assert first[2:] == (admitted(4), run(RunKind.CATCH_UP, 1000, 1000, 4, 4, 4), length(NOW_MS, 1))
    assert second[0] == Queued(NOW_MS, num_waiting=1, num_running=1, behind=Peer("b", "tenant", NORMAL))
    assert second[2].num_went_before == 1  # type: ignore[union-attr]


def test_request_that_finds_too_few_blocks_tells_how_many() -> None:
    harness = Harness()
    harness.add("a", tuple(range(1, 20)), 4)
    harness.step()
    harness.add("b", tuple(range(31, 50)), 4)
    harness.talk()
    assert events(harness, "b")[1] == Blocked(NOW_MS, NOW_MS, BlockedCause.NO_BLOCKS, 1, 6, 2)


def test_preempted_request_names_who_needed_its_blocks_and_what_it_lost() -> None:
    harness = Harness(max_num_requests=2)
    harness.add("a", PROMPT, 17)
    harness.add("b", OTHER_PROMPT, 17)
    harness.run_to_rest()
    before, blocked, after = events(harness, "b")[:5], events(harness, "b")[5], events(harness, "b")[6:]
    assert before == (
        Queued(NOW_MS, num_waiting=1, num_running=0, behind=Peer("a", "tenant", NORMAL)),
        admitted(4, num_went_before=1),
        run(RunKind.CATCH_UP, NOW_MS, NOW_MS, 1, 1, 4),
        run(RunKind.DECODE, NOW_MS, NOW_MS, 2, 11, 10),
        Preempted(NOW_MS, PreemptionCause.OUT_OF_BLOCKS, Peer("a", "tenant", NORMAL), num_lost_tokens=14),
    )
    assert isinstance(blocked, Blocked)
    assert blocked.cause is BlockedCause.NO_BLOCKS
    assert after == (
        admitted(15, num_cached=12),
        run(RunKind.CATCH_UP, NOW_MS, NOW_MS, 18, 18, 3),
        run(RunKind.DECODE, NOW_MS, NOW_MS, 19, 23, 5),
        length(NOW_MS, 17),
    )


def test_displaced_request_names_the_vip_that_took_its_place() -> None:
    harness = Harness(max_num_requests=1)
    harness.add("a", PROMPT, 10, priority=BATCH)
    harness.step()
    harness.step()
    harness.add("v", OTHER_PROMPT, 3, priority=VIP)
    harness.run_to_rest()
    preempted = Preempted(NOW_MS, PreemptionCause.PLACE_TAKEN, Peer("v", "tenant", VIP), num_lost_tokens=5)
    assert preempted in events(harness, "a")


@pytest.mark.parametrize("cause", [PreemptionCause.WORKER_LOST, PreemptionCause.KV_CACHE_LOST])
def test_request_whose_peer_process_was_lost_tells_which(cause: PreemptionCause) -> None:
    harness = Harness(run_ahead_depth=2)
    harness.add("a", PROMPT, 10)
    harness.step()
    harness.plan()
    if cause is PreemptionCause.WORKER_LOST:
        harness.scheduler.close_worker(WORKER)
    else:
        harness.scheduler.reset_kv()
    assert events(harness, "a")[2:] == (
        run(RunKind.CATCH_UP, NOW_MS, NOW_MS, 1, 1, 4),
        Preempted(NOW_MS, cause, None, num_lost_tokens=4),
    )


def test_request_without_a_worker_waits_for_one() -> None:
    harness = Harness()
    harness.scheduler.close_worker(WORKER)
    harness.add("a")
    harness.talk()
    assert events(harness, "a")[1] == Blocked(NOW_MS, NOW_MS, BlockedCause.NO_WORKER, 1)


def test_late_block_is_a_stall_between_two_runs() -> None:
    harness = Harness()
    harness.add("a", PROMPT, 17)
    harness.add("b", tuple(range(11, 18)), 9)
    harness.step()
    for _ in range(6):
        harness.apply(harness.plan())  # the manager is not heard, and the slots of the shorter one run out first
    harness.run_to_rest()
    assert events(harness, "a")[2:] == (
        run(RunKind.CATCH_UP, NOW_MS, NOW_MS, 1, 1, 4),
        run(RunKind.DECODE, NOW_MS, NOW_MS, 2, 5, 4),
        Stalled(NOW_MS, num_steps=2),
        run(RunKind.DECODE, NOW_MS, NOW_MS, 8, 19, 12),
        length(NOW_MS, 17),
    )


def test_failed_request_ends_with_its_reason_and_no_tokens_of_the_failed_step() -> None:
    harness = Harness()
    harness.add("a", PROMPT)
    harness.talk()
    plan = harness.plan()
    harness.scheduler.apply(WORKER, StepResult(plan.plan_id, (), (plan.rows[0].handle,)))
    finished = events(harness, "a")[-1]
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.error) == (FinishReason.ERROR, ErrorReason.STEP_FAILED)
    assert not any(isinstance(event, Scheduled) for event in events(harness, "a"))


def test_choices_of_a_request_are_told_together_and_in_order() -> None:
    harness = Harness()
    for index in (10, 1, 9):
        harness.add(f"r#{index}", PROMPT, 1)
    harness.add("rr", PROMPT, 1)
    harness.scheduler.abort_request("r#9")
    assert [timeline.request_id for timeline in harness.scheduler.explain("r")] == ["r#1", "r#9", "r#10"]
    assert [timeline.status for timeline in harness.scheduler.explain("r#9")] == ["finished"]


def test_tenant_sees_its_own_requests_and_of_others_only_the_class() -> None:
    harness = Harness()
    harness.add("a", tenant="one", priority=VIP)
    harness.add("b", tenant="two")
    assert harness.scheduler.explain("a", "two") == []
    (queued,) = story(harness, "b", "two").events
    assert queued == Queued(NOW_MS, num_waiting=1, num_running=0, behind=Peer("", "", VIP))
    assert story(harness, "b").events == (Queued(NOW_MS, 1, 0, Peer("a", "one", VIP)),)


def test_ring_forgets_the_request_that_ended_first() -> None:
    harness = Harness(max_timelines=2)
    for request_id in ("a", "b", "c"):
        harness.add(request_id)
        harness.scheduler.abort_request(request_id)
    assert harness.scheduler.explain("a") == []
    assert [story(harness, request_id).status for request_id in ("b", "c")] == ["finished"] * 2


def test_timeline_without_end_keeps_its_beginning_and_what_is_new() -> None:
    timeline = Timeline(submission("a"))
    timeline.note_queued(0, 0, 0, None, 0)
    for time_ms in range(1, 501):
        timeline.note_preempted(time_ms, PreemptionCause.WORKER_LOST, None, 0, 0)
    snapshot = timeline.snapshot("waiting", 500, None)
    assert len(snapshot.events) == MAX_EVENTS
    assert snapshot.num_events_left_out == 501 - MAX_EVENTS
    assert (snapshot.events[0].at_ms, snapshot.events[-1].at_ms) == (0, 500)


class Observer(Harness):
    """Notes which rows came to something, beside the timelines, and exchanges messages only now and then."""

    def __init__(self, random: Random) -> None:
        super().__init__(run_ahead_depth=random.randint(1, 3), max_num_batched_tokens=random.choice((4, 8)))
        self._random = random
        self._id_by_handle: dict[int, str] = {}
        self.rows: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)

    def act(self) -> None:
        if self._random.random() < 0.4:
            self.talk()
        lane = self.scheduler._lane_by_worker[WORKER]
        plan = self.scheduler.schedule(WORKER)
        if plan is not None:
            self._id_by_handle.update((new.handle, new.request_id) for new in plan.new_requests)
        if lane.in_flight and self._random.random() < 0.6:
            oldest = lane.in_flight[0]
            for row in oldest.rows:
                if row.handle in lane.running:
                    self.rows[self._id_by_handle[row.handle]].append((oldest.plan_id, row.num_scheduled_tokens))
            sampled = tuple((row.handle, 50) for row in oldest.rows if row.is_sampling)
            self.scheduler.apply(WORKER, StepResult(oldest.plan_id, sampled))

    def check(self, request_id: str) -> None:
        runs = [event for event in events(self, request_id) if isinstance(event, Scheduled)]
        steps = [step for each in runs for step in range(each.first_step, each.last_step + 1)]
        assert steps == [step for step, _ in self.rows[request_id]]
        for each in runs:
            tokens = [num for step, num in self.rows[request_id] if each.first_step <= step <= each.last_step]
            assert sum(tokens) == each.num_tokens
            assert each.kind is RunKind.CATCH_UP or set(tokens) == {1}


@pytest.mark.parametrize("seed", range(40))
def test_runs_name_exactly_the_steps_whose_results_counted(seed: int) -> None:
    random = Random(seed)
    observer = Observer(random)
    for index in range(8):
        prompt = tuple(random.randint(1, 3) for _ in range(random.randint(1, 12)))
        observer.add(f"r{index}", prompt, random.randint(1, 12))
    for _ in range(150):
        observer.act()
        if random.random() < 0.01:
            observer.scheduler.abort_request(f"r{random.randint(0, 7)}")
    while observer.scheduler.load().num_waiting + observer.scheduler.load().num_running:
        observer.act()
    for index in range(8):
        observer.check(f"r{index}")


def test_every_cause_crosses_the_wire_by_its_own_name() -> None:
    blocked = [Blocked(NOW_MS, NOW_MS, cause, 1) for cause in BlockedCause]
    preempted = [Preempted(NOW_MS, cause, None, 0) for cause in PreemptionCause]
    timeline = RequestTimeline("r", "t", "m", NORMAL, "running", 1, 0, (*blocked, *preempted))
    (told,) = from_explain_response(to_explain_response([timeline], scheduler_epoch=1))
    causes = [event.cause.value for event in blocked] + [event.cause.value for event in preempted]
    assert [event.cause for event in told.events] == causes  # type: ignore[union-attr]
