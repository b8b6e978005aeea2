"""What a step holds, by exact plans: one request, several, chunks, run-ahead, ends."""

import pytest

from services.common.errors import ErrorReason, InvariantError
from services.scheduler.core import (
    BatchPlan,
    Commit,
    Finish,
    FinishReason,
    KVMessage,
    NewRequest,
    RequestEvent,
    Reserve,
    SamplingParams,
    ScheduledRow,
    StepResult,
)
from tests.unit.scheduler.harness import WORKER, Harness

H1, H2, H3 = 101, 102, 103


def rows(plan: BatchPlan) -> list[ScheduledRow]:
    return list(plan.rows)


def test_first_plan_introduces_the_request_with_all_that_the_worker_needs() -> None:
    harness = Harness()
    harness.add("a", (1, 2, 3))
    harness.talk()
    assert harness.plan() == BatchPlan(
        plan_id=1,
        worker=WORKER,
        new_requests=(NewRequest(H1, "a", (1, 2, 3), 3, SamplingParams(seed=5), (1, 2), 0, block_epoch=7),),
        rows=(ScheduledRow(H1, 3, (), True),),
        finished_handles=(),
    )


def test_request_runs_from_prompt_to_length_with_one_token_a_step() -> None:
    harness = Harness()
    harness.add("a", (1, 2, 3), max_tokens=3)
    assert rows(harness.step()) == [ScheduledRow(H1, 3, (), True)]
    assert harness.events() == [RequestEvent("a", "gateway", 0, (50,), None)]
    assert rows(harness.step()) == [ScheduledRow(H1, 1, (), True)]
    assert rows(harness.step()) == [ScheduledRow(H1, 1, (), True)]
    finish = Finish(FinishReason.LENGTH, 3, 3, 0)
    assert harness.events() == [RequestEvent("a", "gateway", 1, (51, 52), finish)]
    assert harness.plan() == BatchPlan(4, WORKER, (), (), (H1,))


def test_nothing_is_left_after_the_end() -> None:
    harness = Harness()
    harness.add("a")
    harness.run_to_rest()
    assert harness.scheduler.is_idle() is False
    harness.events()
    assert harness.scheduler.is_idle() is True
    assert harness.manager.usage(WORKER).num_leases == 0


def test_long_prompt_is_computed_in_chunks_and_samples_only_at_its_end() -> None:
    harness = Harness()
    harness.add("a", tuple(range(18)), max_tokens=2)
    assert rows(harness.step()) == [ScheduledRow(H1, 8, (), False)]
    assert rows(harness.step()) == [ScheduledRow(H1, 8, (), False)]
    assert rows(harness.step()) == [ScheduledRow(H1, 2, (), True)]
    assert harness.outputs() == {"a": [50]}


def test_decodes_come_first_and_chunks_get_the_rest_in_order_of_admission() -> None:
    harness = Harness()
    harness.add("a", (1, 2, 3))
    harness.step()
    harness.add("b", tuple(range(10, 15)))
    harness.add("c", tuple(range(20, 25)))
    assert rows(harness.step()) == [
        ScheduledRow(H1, 1, (), True),
        ScheduledRow(H2, 5, (), True),
        ScheduledRow(H3, 2, (), False),
    ]
    assert rows(harness.step()) == [
        ScheduledRow(H1, 1, (), True),
        ScheduledRow(H2, 1, (), True),
        ScheduledRow(H3, 3, (), True),
    ]


def test_request_that_finds_no_budget_is_introduced_only_with_its_first_row() -> None:
    harness = Harness()
    harness.add("a", tuple(range(8)))
    harness.add("b", tuple(range(10, 13)))
    plan = harness.step()
    assert [request.handle for request in plan.new_requests] == [H1]
    plan = harness.step()
    assert [request.handle for request in plan.new_requests] == [H2]


def test_run_ahead_plans_the_next_token_before_the_result_and_stops_at_its_depth() -> None:
    harness = Harness(run_ahead_depth=2)
    harness.add("a", (1, 2, 3))
    harness.talk()
    first, second = harness.plan(), harness.plan()
    assert rows(second) == [ScheduledRow(H1, 1, (), True)]
    assert second.new_requests == ()
    assert harness.scheduler.can_schedule(WORKER) is False
    assert harness.scheduler.schedule(WORKER) is None
    harness.apply(first)
    assert harness.scheduler.can_schedule(WORKER) is True
    assert rows(harness.plan()) == [ScheduledRow(H1, 1, (), True)]


def test_run_ahead_never_samples_beyond_max_tokens() -> None:
    harness = Harness(run_ahead_depth=3)
    harness.add("a", (1, 2, 3), max_tokens=2)
    harness.talk()
    harness.plan(), harness.plan()
    assert harness.scheduler.schedule(WORKER) is None


def test_rows_in_flight_of_a_finished_request_are_thrown_away() -> None:
    harness = Harness(run_ahead_depth=2)
    harness.add("a", (1, 2, 3), max_tokens=9, eos_token_ids=(50,))
    harness.talk()
    first, second = harness.plan(), harness.plan()
    harness.apply(first)
    harness.apply(second)
    assert harness.events() == [RequestEvent("a", "gateway", 0, (50,), Finish(FinishReason.STOP, 3, 1, 0, 50))]
    assert harness.plan().finished_handles == (H1,)


@pytest.mark.parametrize("field", ["eos_token_ids", "stop_token_ids"])
def test_end_token_is_reported_and_ends_the_request(field: str) -> None:
    harness = Harness()
    harness.add("a", max_tokens=9, **{field: (51,)})
    harness.run_to_rest()
    finish = Finish(FinishReason.STOP, 3, 2, 0, stop_token_id=51)
    assert harness.events() == [RequestEvent("a", "gateway", 0, (50, 51), finish)]


def test_end_token_does_not_end_the_output_while_it_is_shorter_than_min_tokens() -> None:
    harness = Harness()
    harness.add("a", max_tokens=9, min_tokens=3, eos_token_ids=(50, 51, 52))
    harness.run_to_rest()
    assert harness.events()[0].finish == Finish(FinishReason.STOP, 3, 3, 0, stop_token_id=52)


def test_output_is_cut_at_the_context_length_of_the_worker() -> None:
    harness = Harness()
    harness.add("a", tuple(range(20)), max_tokens=100)
    harness.run_to_rest()
    assert harness.events()[0].finish == Finish(FinishReason.LENGTH, 20, 4, 0)


def test_blocks_are_asked_for_ahead_of_need_and_told_to_the_worker_with_the_next_row() -> None:
    harness = Harness(credit_tokens=2)
    harness.add("a", (1, 2, 3, 4, 5, 6), max_tokens=9)
    harness.step()  # 8 slots; 7 tokens are expected, so the credit runs low
    assert harness.talk() == KVMessage(2, commits=(Commit(H1, 6, (50,)),), reserves=(Reserve(H1, 1),))
    assert rows(harness.step()) == [ScheduledRow(H1, 1, (3,), True)]
    assert rows(harness.step()) == [ScheduledRow(H1, 1, (), True)]


def test_row_without_a_slot_waits_for_its_block_while_others_go_on() -> None:
    harness = Harness(credit_tokens=1)
    harness.add("a", (1, 2, 3), max_tokens=9)
    harness.add("b", (1, 2), max_tokens=9)
    harness.talk()
    plans = []
    for _ in range(3):
        plans.append(harness.plan())
        harness.apply(plans[-1])
    assert [[row.handle for row in plan.rows] for plan in plans] == [[H1, H2], [H1, H2], [H2]]
    harness.talk()
    assert [(row.handle, row.new_block_ids) for row in harness.plan().rows] == [(H1, (3,)), (H2, (4,))]


def test_no_block_is_asked_for_that_the_last_tokens_do_not_need() -> None:
    harness = Harness(credit_tokens=8)
    harness.add("a", (1, 2, 3), max_tokens=2)  # the fifth token is never computed: 4 slots are enough
    message = harness.talk()
    assert message is not None
    assert message.admits[0].num_tokens == 4
    harness.run_to_rest()
    assert harness.outputs() == {"a": [50, 51]}


def test_confirmed_full_blocks_are_committed_and_unconfirmed_ones_are_not() -> None:
    harness = Harness(run_ahead_depth=2)
    harness.add("a", (1, 2, 3), max_tokens=9)
    harness.talk()
    first, second = harness.plan(), harness.plan()
    harness.apply(first)
    assert harness.talk() is None
    harness.apply(second)
    assert harness.talk() == KVMessage(2, commits=(Commit(H1, 4, (50, 51)),))


def test_cached_tokens_are_reported_and_not_computed_again() -> None:
    harness = Harness()
    harness.add("a", tuple(range(10)), max_tokens=1)
    harness.run_to_rest()
    harness.events()
    harness.add("b", tuple(range(10)), max_tokens=1)
    plan = harness.step()
    assert plan.new_requests[0].num_computed_tokens == 8
    assert rows(plan) == [ScheduledRow(H2, 2, (), True)]
    assert harness.events()[0].finish == Finish(FinishReason.LENGTH, 10, 1, 8)


def test_failed_row_ends_its_request_and_no_other() -> None:
    harness = Harness()
    harness.add("a")
    harness.add("b")
    harness.talk()
    plan = harness.plan()
    harness.scheduler.apply(WORKER, StepResult(plan.plan_id, ((H2, 60),), failed_handles=(H1,)))
    failed, going_on = harness.events()
    assert failed.finish is not None
    assert failed.finish.error is not None
    assert failed.finish.error.reason is ErrorReason.STEP_FAILED
    assert going_on == RequestEvent("b", "gateway", 0, (60,), None)


def test_result_without_a_sampled_token_is_an_invariant_violation() -> None:
    harness = Harness()
    harness.add("a")
    harness.talk()
    plan = harness.plan()
    with pytest.raises(InvariantError, match="yields a token"):
        harness.scheduler.apply(WORKER, StepResult(plan.plan_id, ()))


def test_result_out_of_order_is_an_invariant_violation() -> None:
    harness = Harness(run_ahead_depth=2)
    harness.add("a")
    harness.talk()
    harness.plan()
    second = harness.plan()
    with pytest.raises(InvariantError, match="order of plans"):
        harness.scheduler.apply(WORKER, harness.result_of(second))


def test_load_counts_what_waits_runs_and_was_done() -> None:
    harness = Harness(max_num_requests=1)
    harness.add("a", (1, 2, 3), max_tokens=9)
    harness.add("b", (1, 2), max_tokens=9)
    harness.step()
    harness.plan()
    load = harness.scheduler.load()
    assert (load.num_running, load.num_waiting, load.num_waiting_tokens) == (1, 1, 2)
    assert (load.num_steps, load.num_scheduled_tokens, load.num_sampled_tokens) == (1, 3, 1)
    assert (load.workers[0].num_running, load.workers[0].num_in_flight_plans) == (1, 1)
