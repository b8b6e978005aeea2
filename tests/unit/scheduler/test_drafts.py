"""Rows that may draft: how much they are granted, what a result takes back, and that a request ends where it must."""

from dataclasses import replace

import pytest

from services.common.errors import InvariantError
from services.scheduler.core import BatchPlan, Commit, FinishReason, ScheduledRow, StepResult
from services.scheduler.core.deadlines import min_num_steps
from services.scheduler.core.timeline_events import RunKind, Scheduled
from tests.unit.scheduler.harness import EPOCH, LIMITS, WORKER, WORKER_INFO, Harness

H1, H2 = EPOCH + 1, EPOCH + 2
GUESSING = replace(WORKER_INFO, max_draft_tokens=3)


def make_harness(**changes: int) -> Harness:
    return Harness(replace(LIMITS, **changes), GUESSING)


def prefilled(**changes: int) -> Harness:
    """A harness with one request of three prompt tokens, whose first output token is known."""
    harness = make_harness(**changes)
    harness.add("r1", max_tokens=12)
    harness.step()
    harness.events()
    return harness


def apply(harness: Harness, plan: BatchPlan, *token_ids: int, num_drafted: int = 3, failed: bool = False) -> None:
    sampled = tuple((H1, token_id) for token_id in token_ids)
    failed_handles = (H1,) if failed else ()
    harness.scheduler.apply(WORKER, StepResult(plan.plan_id, sampled, failed_handles, 0, ((H1, num_drafted),)))
    harness.scheduler.check_invariants()


def test_decode_rows_may_draft_and_rows_of_prompts_may_not() -> None:
    harness = make_harness(credit_tokens=8)
    harness.add("r1", max_tokens=12)
    assert harness.step().rows == (ScheduledRow(H1, 3, (), True),)
    assert harness.step().rows == (ScheduledRow(H1, 1, (), True, 3),)


def test_worker_that_does_not_guess_is_granted_nothing() -> None:
    harness = Harness(LIMITS, WORKER_INFO)
    harness.add("r1", max_tokens=12)
    harness.step()
    assert harness.step().rows == (ScheduledRow(H1, 1, (), True),)


def test_every_token_that_came_true_is_reported_at_once() -> None:
    harness = prefilled()
    apply(harness, harness.plan(), 60, 61, 62)
    assert harness.outputs() == {"r1": [60, 61, 62]}


def test_next_row_begins_after_what_came_true() -> None:
    harness = prefilled(run_ahead_depth=2, credit_tokens=8)
    first = harness.plan()
    second = harness.plan()  # planned as if all guesses came true: positions 3..6, then 7..10
    assert second.rows == (ScheduledRow(H1, 1, (), True, 3),)
    apply(harness, first, 60, 61)
    apply(harness, second, 62)
    assert harness.outputs() == {"r1": [60, 61, 62]}
    request = harness.scheduler._book.request_by_id["r1"]
    assert (request.num_computed_tokens, request.num_planned_tokens, request.num_expected_tokens) == (6, 6, 7)


def test_drafts_stop_where_the_slots_do() -> None:
    harness = prefilled(credit_tokens=1)
    request = harness.scheduler._book.request_by_id["r1"]
    assert request.num_slots == 8  # prompt and credit, a token and three guesses
    apply(harness, harness.plan(), 60, 61, 62, 63)
    assert harness.plan().rows == (ScheduledRow(H1, 1, (), True),)


def test_blocks_are_asked_for_when_the_guesses_might_use_the_credit_up() -> None:
    harness = prefilled(credit_tokens=1)
    harness.plan()
    message = harness.talk()
    assert message is not None
    assert [reserve.num_blocks for reserve in message.reserves] == [1]


def test_drafts_stop_where_the_output_does_and_run_ahead_waits_there() -> None:
    harness = make_harness(run_ahead_depth=3)
    harness.add("r1", max_tokens=6)
    harness.step()
    first, second = harness.plan(), harness.plan()
    assert [plan.rows[0].max_draft_tokens for plan in (first, second)] == [3, 0]
    assert harness.scheduler.schedule(WORKER) is None  # all six might be known by then
    apply(harness, first, 60)
    assert harness.plan().rows == (ScheduledRow(H1, 1, (), True, 2),)


def test_drafts_get_what_decodes_and_prompts_leave_of_the_budget_in_equal_parts() -> None:
    harness = make_harness(max_num_batched_tokens=8)
    harness.add("r1", max_tokens=12)
    harness.add("r2", max_tokens=12)
    harness.step()
    harness.events()
    assert harness.plan().rows == (ScheduledRow(H1, 1, (), True, 3), ScheduledRow(H2, 1, (), True, 3))
    harness = make_harness(max_num_batched_tokens=7)
    harness.add("r1", max_tokens=12)
    harness.add("r2", max_tokens=12)
    harness.step()
    assert [row.max_draft_tokens for row in harness.plan().rows] == [2, 2]


def test_step_that_a_prompt_fills_drafts_nothing() -> None:
    harness = prefilled(max_num_batched_tokens=8, credit_tokens=8)
    harness.add("r2", (1, 2, 3, 4, 5, 6, 7, 8, 9))
    harness.talk()
    assert harness.plan().rows == (ScheduledRow(H1, 1, (), True), ScheduledRow(H2, 7, (), False))


def test_end_token_among_those_that_came_true_ends_the_request_there() -> None:
    harness = make_harness()
    harness.add("r1", max_tokens=12, eos_token_ids=(61,))
    harness.step()
    harness.events()
    apply(harness, harness.plan(), 60, 61, 62)
    (event,) = harness.events()
    assert event.token_ids == (60, 61)
    assert event.finish is not None
    assert (event.finish.reason, event.finish.stop_token_id) == (FinishReason.STOP, 61)
    assert (event.finish.num_draft_tokens, event.finish.num_accepted_tokens) == (3, 2)
    harness.run_to_rest()
    harness.manager.check_invariants()


def test_full_blocks_are_committed_only_up_to_what_came_true() -> None:
    harness = prefilled(credit_tokens=8)
    apply(harness, harness.plan(), 60)  # position 3 fills the first block; guesses for 4, 5 and 6 were wrong
    message = harness.talk()
    assert message is not None
    assert message.commits == (Commit(H1, 4, (50, 60)),)


def test_failed_row_reports_what_came_true_before() -> None:
    harness = prefilled()
    apply(harness, harness.plan(), 60, 61, failed=True)
    (event,) = harness.events()
    assert event.token_ids == (60, 61)
    assert event.finish is not None
    assert event.finish.reason is FinishReason.ERROR


@pytest.mark.parametrize("token_ids", [(), (60, 61, 62, 63, 64)])
def test_result_with_no_token_or_more_than_were_granted_is_refused(token_ids: tuple[int, ...]) -> None:
    harness = prefilled()
    with pytest.raises(InvariantError, match="no more than it may guess"):
        apply(harness, harness.plan(), *token_ids)


def test_rows_of_a_preempted_request_are_dead_with_all_their_guesses() -> None:
    harness = prefilled(run_ahead_depth=2)
    plan = harness.plan()
    harness.scheduler.abort_request("r1")
    harness.events()
    harness.scheduler.apply(WORKER, StepResult(plan.plan_id, ((H1, 60), (H1, 61)), (), 0, ((H1, 3),)))
    assert harness.events() == []


def test_load_counts_guesses_by_their_place() -> None:
    harness = prefilled(credit_tokens=8)
    apply(harness, harness.plan(), 60, 61, 62)
    apply(harness, harness.plan(), 63, num_drafted=1)
    apply(harness, harness.plan(), 64, num_drafted=0)
    load = harness.scheduler.load()
    assert load.num_drafted_by_place == (2, 1, 1)
    assert load.num_accepted_by_place == (1, 1, 0)
    assert load.num_scheduled_tokens == 3 + 4 + 2 + 1
    assert load.num_sampled_tokens == 1 + 3 + 1 + 1


def test_timeline_tells_fewer_steps_than_tokens() -> None:
    harness = prefilled(credit_tokens=8)
    apply(harness, harness.plan(), 60, 61, 62)
    apply(harness, harness.plan(), 63)
    (timeline,) = harness.scheduler.explain("r1")
    run = timeline.events[-1]
    assert isinstance(run, Scheduled)
    assert (run.kind, run.first_step, run.last_step, run.num_tokens) == (RunKind.DECODE, 2, 3, 4)


def test_deadline_counts_as_many_tokens_a_step_as_may_come_true() -> None:
    harness = prefilled()
    request = harness.scheduler._book.request_by_id["r1"]
    request.submission = replace(request.submission, min_tokens=12)
    assert min_num_steps(request, LIMITS) == 11
    assert min_num_steps(request, LIMITS, num_tokens_a_step=4) == 1 + 3
