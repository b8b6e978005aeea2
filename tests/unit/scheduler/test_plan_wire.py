"""Plans and results that speak of guesses, as messages."""

from services.scheduler.core import BatchPlan, ScheduledRow, StepResult
from services.scheduler.plan_wire import from_step_result, to_batch_plan
from treadle.worker.v1 import batch_plan_pb2 as pb2


def plan(*rows: ScheduledRow) -> pb2.BatchPlan:
    return to_batch_plan(BatchPlan(3, "worker-0", (), rows, ()), scheduler_epoch=9)


def test_steady_rows_are_handles_with_what_most_of_them_may_draft() -> None:
    message = plan(
        ScheduledRow(1, 1, (), True, 4),
        ScheduledRow(2, 1, (), True, 4),
        ScheduledRow(3, 1, (), True, 2),
        ScheduledRow(4, 1, (8,), True, 4),
        ScheduledRow(5, 6, (), False),
    )
    assert list(message.steady_handles) == [1, 2]
    assert message.steady_max_draft_tokens == 4
    others = [(row.handle, row.num_scheduled_tokens, row.is_sampling, row.max_draft_tokens) for row in message.rows]
    assert others == [(3, 1, True, 2), (4, 1, True, 4), (5, 6, False, 0)]


def test_steady_rows_of_a_plan_without_guesses_are_handles_and_nothing_else() -> None:
    message = plan(ScheduledRow(1, 1, (), True), ScheduledRow(2, 1, (), True))
    assert list(message.steady_handles) == [1, 2]
    assert message.steady_max_draft_tokens == 0
    assert not message.rows


def test_rows_that_may_draft_nothing_are_told_apart_from_those_that_may() -> None:
    message = plan(ScheduledRow(1, 1, (), True, 3), ScheduledRow(2, 1, (), True, 3), ScheduledRow(3, 1, (), True))
    assert list(message.steady_handles) == [1, 2]
    assert [(row.handle, row.max_draft_tokens) for row in message.rows] == [(3, 0)]


def test_result_tells_several_tokens_of_a_row_and_who_guessed() -> None:
    message = pb2.StepResult(
        plan_id=3,
        sampled_handles=[1, 1, 2],
        sampled_token_ids=[50, 51, 60],
        failed_handles=[2],
        device_time_us=7,
        drafting_handles=[1],
        num_draft_tokens=[4],
    )
    assert from_step_result(message) == StepResult(3, ((1, 50), (1, 51), (2, 60)), (2,), 7, ((1, 4),))
