"""What a message says of drafts, and what a plan without them says."""

from services.worker.plan import Handle, ScheduledRow
from services.worker.servicer.plan_wire import from_plan
from treadle.worker.v1 import batch_plan_pb2 as pb2


def test_steady_rows_may_draft_what_the_plan_says_and_other_rows_what_they_say():
    message = pb2.BatchPlan(plan_id=1, steady_handles=[4, 5], steady_max_draft_tokens=3)
    message.rows.add(handle=6, num_scheduled_tokens=1, new_block_ids=[9], is_sampling=True, max_draft_tokens=2)
    message.rows.add(handle=7, num_scheduled_tokens=8)
    assert from_plan(message).rows == (
        ScheduledRow(Handle(4), 1, (), is_sampling=True, max_draft_tokens=3),
        ScheduledRow(Handle(5), 1, (), is_sampling=True, max_draft_tokens=3),
        ScheduledRow(Handle(6), 1, (9,), is_sampling=True, max_draft_tokens=2),
        ScheduledRow(Handle(7), 8),
    )


def test_rows_may_draft_nothing_when_the_plan_does_not_say():
    assert from_plan(pb2.BatchPlan(plan_id=1, steady_handles=[4])).rows[0].max_draft_tokens == 0
