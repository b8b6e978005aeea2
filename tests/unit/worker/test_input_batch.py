"""Request states, the tensors made from them, and the laws that a plan must keep."""

import pytest
import torch

from services.common.errors import InvariantError
from services.worker.input_batch import InputBatch
from services.worker.plan import BatchPlan, Handle, NewRequest, SampledToken, SamplingParams, ScheduledRow

BLOCK_SIZE = 4


def make_batch():
    return InputBatch(block_size=BLOCK_SIZE, num_blocks=20, dtype=torch.float32)


def new_request(handle=1, num_tokens=6, *, blocks=(5, 3), num_computed=0, num_prompt=None):
    return NewRequest(
        handle=Handle(handle),
        request_id=f"r{handle}",
        token_ids=tuple(range(100, 100 + num_tokens)),
        num_prompt_tokens=num_tokens if num_prompt is None else num_prompt,
        sampling=SamplingParams(),
        block_ids=blocks,
        num_computed_tokens=num_computed,
    )


def row(handle=1, num_tokens=6, *, blocks=(), is_sampling=False):
    return ScheduledRow(Handle(handle), num_tokens, blocks, is_sampling)


def plan(*, new=(), rows=(), finished=()):
    return BatchPlan(1, tuple(new), tuple(rows), tuple(map(Handle, finished)))


def run(batch, a_plan, sampled=()):
    batch.check(a_plan)
    batch.apply(a_plan)
    inputs = batch.prepare(a_plan.rows)
    batch.advance(a_plan.rows, [SampledToken(Handle(handle), token) for handle, token in sampled])
    return inputs


def test_prepare_lays_rows_one_after_the_other_and_maps_positions_to_slots():
    batch = make_batch()
    rows = [row(1, 5), row(2, 2, is_sampling=True)]
    inputs = run(batch, plan(new=[new_request(1), new_request(2, 2, blocks=(9,))], rows=rows))
    assert inputs.token_ids.tolist() == [100, 101, 102, 103, 104, 100, 101]
    assert inputs.positions.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert inputs.attention.slot_mapping.tolist() == [20, 21, 22, 23, 12, 36, 37]
    assert inputs.sampled_tokens.tolist() == [6]
    assert [(paged.query_len, paged.context_len) for paged in inputs.attention.batch.rows] == [(5, 5), (2, 2)]


def test_row_starts_where_the_prefix_hit_ends():
    inputs = run(make_batch(), plan(new=[new_request(num_computed=4)], rows=[row(1, 2, is_sampling=True)]))
    assert inputs.token_ids.tolist() == [104, 105]
    assert inputs.positions.tolist() == [4, 5]
    assert inputs.attention.slot_mapping.tolist() == [12, 13]


def test_decode_row_takes_the_token_sampled_here_and_the_next_output_position():
    batch = make_batch()
    run(batch, plan(new=[new_request()], rows=[row(is_sampling=True)]), sampled=[(1, 77)])
    inputs = run(batch, plan(rows=[row(1, 1, is_sampling=True)]), sampled=[(1, 78)])
    assert inputs.token_ids.tolist() == [77]
    assert inputs.positions.tolist() == [6]
    assert inputs.sampling_rows[0].position == 1
    inputs = run(batch, plan(rows=[row(1, 1, is_sampling=True)]), sampled=[(1, 79)])
    assert inputs.token_ids.tolist() == [78]
    inputs = run(batch, plan(rows=[row(1, 1, blocks=(17,), is_sampling=True)]))
    assert inputs.attention.slot_mapping.tolist() == [17 * BLOCK_SIZE]


def test_readmitted_request_continues_at_its_output_position():
    inputs = run(make_batch(), plan(new=[new_request(num_prompt=4)], rows=[row(is_sampling=True)]))
    assert inputs.sampling_rows[0].position == 2


def test_finished_handles_are_forgotten_before_new_requests_are_learnt():
    batch = make_batch()
    run(batch, plan(new=[new_request()]))
    run(batch, plan(new=[new_request(num_tokens=3)], rows=[row(1, 3)], finished=[1]))
    assert len(batch) == 1


def test_forgetting_an_unknown_handle_does_nothing():
    batch = make_batch()
    run(batch, plan(new=[new_request()]))
    run(batch, plan(finished=[8]))
    assert len(batch) == 1
    assert batch.handles == (1,)


def test_rows_of_a_failed_request_are_passed_over_and_reported():
    batch = make_batch()
    run(batch, plan(new=[new_request(1), new_request(2, blocks=(7, 8))]))
    batch.fail([Handle(1), Handle(99)])
    rows = [row(1, 3, is_sampling=True), row(2, 6, is_sampling=True)]
    batch.check(plan(rows=rows))
    inputs = batch.prepare(rows)
    assert inputs.token_ids.numel() == 6
    assert [sampling.handle for sampling in inputs.sampling_rows] == [2]
    assert batch.failed_handles(rows) == (1,)
    assert batch.prepare(rows[:1]) is None


VIOLATIONS = {
    "a row's handle is unknown": plan(rows=[row(9)]),
    "a handle has two rows in a plan": plan(rows=[row(1, 1), row(1, 1)]),
    "a new request's handle is in use": plan(new=[new_request(1)]),
    "a row goes past the known tokens": plan(rows=[row(1, 7, blocks=(9,))]),
    "a row's slot is missing in the block table": plan(new=[new_request(2, 9)], rows=[row(2, 9)]),
    "a sampling row ends before the last known token": plan(rows=[row(1, 5, is_sampling=True)]),
    "a row must compute at least one token": plan(rows=[row(1, 0)]),
    "a new request must leave at least one known token": plan(new=[new_request(2, 8, num_computed=8)]),
    "a prefix hit exceeds the block table": plan(new=[new_request(2, 20, num_computed=12)]),
    "the prompt must be some of the known tokens": plan(new=[new_request(2, 3, num_prompt=4)]),
    "a block is outside the pool": plan(new=[new_request(2, blocks=(20,))]),
}


@pytest.mark.parametrize("law", VIOLATIONS)
def test_check_refuses_a_broken_law_and_changes_nothing(law):
    batch = make_batch()
    run(batch, plan(new=[new_request()]))
    with pytest.raises(InvariantError, match=law):
        batch.check(VIOLATIONS[law])
    assert len(batch) == 1
    assert run(batch, plan(rows=[row(is_sampling=True)])).positions.tolist() == [0, 1, 2, 3, 4, 5]


def test_check_refuses_a_row_of_a_handle_that_finishes_in_the_same_plan():
    batch = make_batch()
    run(batch, plan(new=[new_request()]))
    with pytest.raises(InvariantError, match="unknown"):
        batch.check(plan(rows=[row(1, 1)], finished=[1]))


def test_check_refuses_the_null_block():
    with pytest.raises(InvariantError, match=r"outside the pool .*block_id=0"):
        make_batch().check(plan(new=[new_request(blocks=(0, 1))]))
