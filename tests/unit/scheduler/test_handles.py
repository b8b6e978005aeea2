"""Which handles the scheduler may still speak of: from before a lease is asked for until its end is heard of by all."""

from services.scheduler.core import StepResult
from services.scheduler.core.handles import SchedulerHandles, WorkerHandles
from tests.simulation.kv_wire import message_to_kv_cache, reply_to_scheduler
from tests.unit.scheduler.harness import EPOCH, WORKER, WORKER_INFO, Harness

FIRST = EPOCH + 1


def settled(**options: object) -> Harness:
    harness = Harness(**options)  # type: ignore[arg-type]
    harness.talk()
    return harness


def handles(
    running: tuple[tuple[int, str], ...] = (),
    admitting: tuple[int, ...] = (),
    leaving: frozenset[int] = frozenset(),
    unsettled_pools: tuple[str, ...] = (),
) -> SchedulerHandles:
    worker = WorkerHandles(WORKER, WORKER_INFO.epoch, running, admitting)
    return SchedulerHandles((worker,), leaving, unsettled_pools)


def test_handle_is_told_from_the_question_for_its_lease_until_all_have_heard_of_its_end() -> None:
    harness = settled()
    harness.add("a", (1, 2, 3), 1)
    assert harness.scheduler.list_handles() == handles()
    message = harness.scheduler.take_kv_message()
    assert message is not None
    assert harness.scheduler.list_handles() == handles(admitting=(FIRST,))
    harness.scheduler.apply_kv_reply(reply_to_scheduler(harness.manager.apply_batch(message_to_kv_cache(message))))
    assert harness.scheduler.list_handles() == handles(running=((FIRST, "a"),))
    plan = harness.plan()
    assert harness.scheduler.list_handles() == handles(running=((FIRST, "a"),))
    harness.scheduler.apply(WORKER, harness.result_of(plan))
    assert harness.scheduler.list_handles() == handles(leaving=frozenset({FIRST}))
    harness.talk()
    assert harness.scheduler.list_handles() == handles(leaving=frozenset({FIRST}))  # the worker was not told yet
    farewell = harness.plan()
    assert farewell.finished_handles == (FIRST,)
    assert harness.scheduler.list_handles() == handles(leaving=frozenset({FIRST}))
    harness.scheduler.apply(WORKER, StepResult(farewell.plan_id, ()))
    assert harness.scheduler.list_handles() == handles()


def test_release_that_is_not_answered_is_told() -> None:
    harness = settled()
    harness.add("a", (1, 2, 3), 1)
    harness.talk()
    harness.scheduler.apply(WORKER, harness.result_of(harness.plan()))
    harness.scheduler.apply(WORKER, harness.result_of(harness.plan()))
    message = harness.scheduler.take_kv_message()
    assert message is not None
    assert message.releases == (FIRST,)
    assert harness.scheduler.list_handles() == handles(leaving=frozenset({FIRST}))
    harness.scheduler.apply_kv_reply(reply_to_scheduler(harness.manager.apply_batch(message_to_kv_cache(message))))
    assert harness.scheduler.list_handles() == handles()


def test_row_in_flight_of_a_request_that_ended_is_told() -> None:
    harness = settled(run_ahead_depth=3)
    harness.add("a", (1, 2, 3), 4)
    harness.talk()
    plans = [harness.plan(), harness.plan()]
    harness.scheduler.abort_request("a")
    plans.append(harness.plan())
    harness.talk()
    assert [bool(plan.rows) for plan in plans] == [True, True, False]
    for plan in plans:
        assert harness.scheduler.list_handles() == handles(leaving=frozenset({FIRST}))
        harness.scheduler.apply(WORKER, harness.result_of(plan))
    assert harness.scheduler.list_handles() == handles()


def test_request_that_ends_while_its_lease_is_asked_for_is_told_until_the_lease_is_released() -> None:
    harness = settled()
    harness.add("a")
    message = harness.scheduler.take_kv_message()
    assert message is not None
    harness.scheduler.abort_request("a")
    assert harness.scheduler.list_handles() == handles(admitting=(FIRST,))
    harness.scheduler.apply_kv_reply(reply_to_scheduler(harness.manager.apply_batch(message_to_kv_cache(message))))
    assert harness.scheduler.list_handles() == handles(leaving=frozenset({FIRST}))
    harness.talk()
    assert harness.scheduler.list_handles() == handles()


def test_pool_is_unsettled_until_its_opening_or_closing_is_answered() -> None:
    harness = Harness()
    assert harness.scheduler.list_handles() == handles(unsettled_pools=(WORKER,))
    message = harness.scheduler.take_kv_message()
    assert message is not None
    assert harness.scheduler.list_handles() == handles(unsettled_pools=(WORKER,))
    harness.scheduler.apply_kv_reply(reply_to_scheduler(harness.manager.apply_batch(message_to_kv_cache(message))))
    assert harness.scheduler.list_handles() == handles()
    harness.scheduler.close_worker(WORKER)
    assert harness.scheduler.list_handles() == SchedulerHandles((), frozenset(), (WORKER,))
    harness.talk()
    assert harness.scheduler.list_handles() == SchedulerHandles((), frozenset(), ())
    harness.scheduler.open_worker(WORKER_INFO)
    harness.talk()
    harness.scheduler.reset_kv()
    assert harness.scheduler.list_handles() == handles(unsettled_pools=(WORKER,))
