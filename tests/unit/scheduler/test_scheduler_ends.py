"""Cancels, deadlines, preemption and the death of other processes."""

from dataclasses import replace

import pytest

from services.common.errors import ErrorReason
from services.scheduler.core import (
    Commit,
    Finish,
    FinishReason,
    KVMessage,
    RequestEvent,
    ScheduledRow,
)
from tests.simulation.kv_wire import message_to_kv_cache, reply_to_scheduler
from tests.unit.scheduler.harness import LIMITS, NOW_MS, WORKER, WORKER_INFO, Harness


def error_of(event: RequestEvent) -> ErrorReason:
    assert event.finish is not None
    assert event.finish.error is not None
    return event.finish.error.reason


# Cancels.


def test_cancel_of_a_waiting_request_leaves_nothing() -> None:
    harness = Harness(max_num_requests=1)
    harness.add("a")
    harness.add("b")
    harness.talk()
    assert harness.scheduler.abort_request("b") is True
    assert harness.events() == [RequestEvent("b", "gateway", 0, (), Finish(FinishReason.CANCELLED, 3, 0, 0))]
    assert harness.scheduler.abort_request("b") is False
    assert harness.scheduler.load().num_waiting == 0


def test_cancel_of_a_running_request_commits_releases_and_has_the_worker_forget() -> None:
    harness = Harness()
    harness.add("a", (1, 2, 3, 4, 5), max_tokens=9)
    harness.step()
    harness.scheduler.abort_request("a")
    assert harness.talk() == KVMessage(2, commits=(Commit(101, 5, (50,)),), releases=(101,))
    assert harness.plan().finished_handles == (101,)
    assert harness.events()[0].token_ids == (50,)
    assert harness.manager.usage(WORKER).num_cached == 1


def test_cancel_while_the_admit_is_under_way_releases_the_grant_at_once() -> None:
    harness = Harness()
    harness.add("a")
    message = harness.scheduler.take_kv_message()
    assert message is not None
    harness.scheduler.abort_request("a")
    harness.scheduler.check_invariants()
    harness.scheduler.apply_kv_reply(reply_to_scheduler(harness.manager.apply_batch(message_to_kv_cache(message))))
    assert harness.talk() == KVMessage(2, releases=(101,))
    assert harness.scheduler.schedule(WORKER) is None


def test_cancel_of_a_request_that_the_worker_does_not_know_tells_it_nothing() -> None:
    harness = Harness()
    harness.add("a")
    harness.talk()
    harness.scheduler.abort_request("a")
    assert harness.scheduler.schedule(WORKER) is None


def test_lost_gateway_ends_its_requests_without_events() -> None:
    harness = Harness()
    harness.add("a", gateway="lost")
    harness.add("b")
    harness.step()
    harness.scheduler.abort_gateway("lost")
    assert [event.request_id for event in harness.events()] == ["b"]
    assert harness.scheduler.load().num_running == 1


# Deadlines.


def test_deadline_ends_waiting_and_running_requests_when_it_is_reached() -> None:
    harness = Harness(max_num_requests=1)
    harness.add("a", deadline_ms=NOW_MS + 20)
    harness.add("b", deadline_ms=NOW_MS + 10)
    harness.add("c")
    harness.step()
    assert harness.scheduler.next_deadline_ms() == NOW_MS + 10
    harness.scheduler.expire_deadlines(NOW_MS + 9)
    assert [event.finish for event in harness.events()] == [None]
    harness.scheduler.expire_deadlines(NOW_MS + 20)
    assert [(event.request_id, error_of(event)) for event in harness.events()] == [
        ("b", ErrorReason.DEADLINE_EXCEEDED),
        ("a", ErrorReason.DEADLINE_EXCEEDED),
    ]
    assert harness.scheduler.next_deadline_ms() is None
    assert harness.talk() is not None
    assert harness.scheduler.load().num_running == 1


# Preemption.

TIGHT = replace(WORKER_INFO, num_blocks=6, max_model_len=21)  # 5 blocks of 4 slots


def test_latest_arrival_is_preempted_by_recompute_and_answers_the_same() -> None:
    harness = Harness(LIMITS, TIGHT, max_num_batched_tokens=16)
    harness.add("a", (1,) * 5, max_tokens=12)
    harness.add("b", (2,) * 5, max_tokens=12)
    harness.talk()
    harness.apply(harness.plan())
    harness.apply(harness.plan())
    message = harness.talk()
    assert message is not None
    assert [reserve.handle for reserve in message.reserves] == [101, 102]
    # Five blocks: both have two, a gets the fifth, b is denied and, as the latest, gives way itself.
    assert harness.scheduler.load().num_preemptions == 1
    assert harness.plan().finished_handles == (102,)


def test_preempted_request_waits_until_another_has_ended_and_repeats_no_token() -> None:
    harness = Harness(LIMITS, TIGHT, max_num_batched_tokens=16)
    harness.add("a", (1,) * 5, max_tokens=12)
    harness.add("b", (2,) * 5, max_tokens=12)
    events = []
    admissions = []
    while not harness.scheduler.is_idle():
        message = harness.talk()
        admissions += [admit.request_id for admit in message.admits] if message else []
        if (plan := harness.scheduler.schedule(WORKER)) is not None:
            harness.apply(plan)
        events += harness.events()
    assert admissions == ["a", "b", "b"]
    seqs = {"a": 0, "b": 0}
    for event in events:
        assert event.seq == seqs[event.request_id]
        seqs[event.request_id] += len(event.token_ids)
    assert seqs == {"a": 12, "b": 12}
    assert [event.request_id for event in events if event.finish] == ["a", "b"]


def test_cached_tokens_are_those_of_the_first_admission_after_a_preemption() -> None:
    harness = Harness(LIMITS, TIGHT, max_num_batched_tokens=16)
    harness.add("a", (1,) * 5, max_tokens=12)
    harness.add("b", (2,) * 5, max_tokens=12)
    harness.run_to_rest()
    assert [event.finish.num_cached_tokens for event in harness.events() if event.finish] == [0, 0]
    assert harness.manager.usage(WORKER).hit_tokens > 0


# Other processes.


def test_lost_worker_returns_its_requests_in_front_with_all_their_tokens() -> None:
    harness = Harness(max_num_requests=2)
    for request_id in ("a", "b", "c"):
        harness.add(request_id, (1, 2, 3), max_tokens=9)
    harness.step()
    harness.scheduler.close_worker(WORKER)
    harness.scheduler.check_invariants()
    assert harness.scheduler.load().num_waiting == 3
    harness.scheduler.open_worker(replace(WORKER_INFO, epoch=2))
    message = harness.talk()
    assert message is not None
    assert message.close_pools == (WORKER,)
    assert [(admit.request_id, admit.token_ids) for admit in message.admits] == [
        ("a", (1, 2, 3, 50)),
        ("b", (1, 2, 3, 51)),
    ]
    plan = harness.plan()
    assert plan.plan_id == 2
    assert plan.finished_handles == ()
    assert [row.num_scheduled_tokens for row in plan.rows] == [4, 4]


def test_result_of_a_lost_worker_is_ignored_after_its_return() -> None:
    harness = Harness()
    harness.add("a")
    harness.talk()
    late = harness.plan()
    harness.scheduler.open_worker(replace(WORKER_INFO, epoch=2))
    harness.apply(late)
    harness.talk()
    harness.plan()
    harness.apply(late)
    assert harness.events() == []


def test_grant_for_a_lost_worker_is_ignored() -> None:
    harness = Harness()
    harness.add("a")
    message = harness.scheduler.take_kv_message()
    assert message is not None
    harness.scheduler.close_worker(WORKER)
    harness.scheduler.apply_kv_reply(reply_to_scheduler(harness.manager.apply_batch(message_to_kv_cache(message))))
    assert harness.talk() == KVMessage(2, close_pools=(WORKER,))
    assert harness.scheduler.load().num_waiting == 1


def test_lost_kv_cache_recomputes_all_requests_against_new_pools() -> None:
    harness = Harness()
    harness.add("a", (1, 2, 3), max_tokens=9)
    harness.step()
    harness.scheduler.reset_kv()
    harness.scheduler.check_invariants()
    message = harness.talk()
    assert message is not None
    assert message.open_pools == (WORKER_INFO.pool_spec,)
    assert [(admit.handle, admit.token_ids) for admit in message.admits] == [(102, (1, 2, 3, 50))]
    plan = harness.plan()
    assert plan.finished_handles == (101,)
    assert plan.rows == (ScheduledRow(102, 4, (), True),)


def test_late_reply_of_a_lost_kv_cache_is_ignored() -> None:
    harness = Harness()
    harness.add("a")
    message = harness.scheduler.take_kv_message()
    assert message is not None
    late = reply_to_scheduler(harness.manager.apply_batch(message_to_kv_cache(message)))
    harness.scheduler.reset_kv()
    harness.scheduler.apply_kv_reply(late)
    assert harness.scheduler.load().num_running == 0
    harness.talk()
    harness.scheduler.apply_kv_reply(late)
    assert harness.scheduler.load().num_running == 1


def test_failed_step_ends_the_requests_of_its_plan_and_no_other() -> None:
    harness = Harness(max_num_batched_tokens=4)
    harness.add("a", (1, 2, 3, 4))
    harness.add("b", (5, 6, 7))
    harness.talk()
    plan = harness.plan()
    assert [row.handle for row in plan.rows] == [101]
    harness.scheduler.apply_failure(WORKER, plan.plan_id, "out of memory")
    (event,) = harness.events()
    assert (event.request_id, error_of(event)) == ("a", ErrorReason.STEP_FAILED)
    harness.scheduler.apply_failure(WORKER, plan.plan_id, "out of memory")
    assert [row.handle for row in harness.step().rows] == [102]


@pytest.mark.parametrize("worker", ["worker-0", "unknown"])
def test_closing_a_worker_is_idempotent(worker: str) -> None:
    harness = Harness()
    harness.scheduler.close_worker(worker)
    harness.scheduler.close_worker(worker)
    assert harness.scheduler.can_schedule(worker) is False
    assert harness.scheduler.schedule(worker) is None
