"""Request states as columns, the arrays made from them, and the laws that a plan must keep."""

import numpy as np
import pytest

from services.common.errors import InvariantError
from services.worker.native.request_table import RequestTable
from services.worker.plan import BatchPlan, Handle, NewRequest, SamplingParams, ScheduledRow

BLOCK_SIZE = 4


def make_table() -> RequestTable:
    return RequestTable(block_size=BLOCK_SIZE, num_blocks=20, vocab_size=200, max_positions=30)


def new_request(handle=1, num_tokens=6, *, blocks=(5, 3), num_computed=0, num_prompt=None, sampling=None, first=100):
    return NewRequest(
        handle=Handle(handle),
        request_id=f"r{handle}",
        token_ids=tuple(range(first, first + num_tokens)),
        num_prompt_tokens=num_tokens if num_prompt is None else num_prompt,
        sampling=sampling or SamplingParams(),
        block_ids=blocks,
        num_computed_tokens=num_computed,
    )


def row(handle=1, num_tokens=6, *, blocks=(), is_sampling=False):
    return ScheduledRow(Handle(handle), num_tokens, blocks, is_sampling)


def plan(*, new=(), rows=(), finished=()):
    return BatchPlan(1, tuple(new), tuple(rows), tuple(map(Handle, finished)))


def run(table, a_plan, sampled=()):
    """Take a plan; return its arrays, as if the engine had then sampled ``sampled``."""
    rows, _ = table.take(a_plan)
    arrays = table.step_arrays(rows)
    table.advance(rows, np.array(sampled, dtype=np.int32))
    return arrays


def tables_of(arrays) -> list[list[int]]:
    rows = arrays.rows
    return [rows.block_ids[a:b].tolist() for a, b in zip(rows.block_starts, rows.block_starts[1:], strict=False)]


def test_arrays_lay_rows_one_after_the_other():
    rows = [row(1, 5), row(2, 2, is_sampling=True)]
    arrays = run(make_table(), plan(new=[new_request(1), new_request(2, 2, blocks=(9,))], rows=rows), [7])
    assert arrays.token_ids.tolist() == [100, 101, 102, 103, 104, 100, 101]
    assert arrays.rows.query_starts.tolist() == [0, 5, 7]
    assert arrays.rows.context_lens.tolist() == [5, 2]
    assert tables_of(arrays) == [[5, 3], [9, 0]]
    assert arrays.sampling["token_index"].tolist() == [6]


def test_row_starts_where_the_prefix_hit_ends():
    arrays = run(make_table(), plan(new=[new_request(num_computed=4)], rows=[row(1, 2, is_sampling=True)]), [7])
    assert arrays.token_ids.tolist() == [104, 105]
    assert arrays.rows.context_lens.tolist() == [6]


def test_decode_row_takes_the_token_sampled_here_and_the_next_output_position():
    table = make_table()
    run(table, plan(new=[new_request()], rows=[row(is_sampling=True)]), [77])
    arrays = run(table, plan(rows=[row(1, 1, is_sampling=True)]), [78])
    assert arrays.token_ids.tolist() == [77]
    assert arrays.rows.context_lens.tolist() == [7]
    assert arrays.sampling["position"].tolist() == [1]
    arrays = run(table, plan(rows=[row(1, 1, is_sampling=True)]), [79])
    assert arrays.token_ids.tolist() == [78]
    arrays = run(table, plan(rows=[row(1, 1, blocks=(17,), is_sampling=True)]), [80])
    assert tables_of(arrays) == [[5, 3, 17]]


def test_decode_and_prefill_rows_mix_in_a_step():
    table = make_table()
    run(table, plan(new=[new_request(1)], rows=[row(1, 6, is_sampling=True)]), [77])
    rows = [row(1, 1, is_sampling=True), row(2, 3)]
    arrays = run(table, plan(new=[new_request(2, 5, blocks=(8, 9), first=50)], rows=rows), [78])
    assert arrays.token_ids.tolist() == [77, 50, 51, 52]
    assert arrays.sampling["token_index"].tolist() == [0]
    arrays = run(table, plan(rows=[row(2, 2, is_sampling=True), row(1, 1, is_sampling=True)]), [60, 79])
    assert arrays.token_ids.tolist() == [53, 54, 78]
    assert arrays.sampling["position"].tolist() == [0, 2]


def test_readmitted_request_continues_at_its_output_position():
    arrays = run(make_table(), plan(new=[new_request(num_prompt=4)], rows=[row(is_sampling=True)]), [7])
    assert arrays.sampling["position"].tolist() == [2]


def test_sampling_parameters_reach_the_engine_within_its_limits():
    table = make_table()
    plain = SamplingParams(0.7, 0.9, 40, 0.1, (1 << 64) - 1, 3)
    odd = SamplingParams(-1.0, 0.0, 1 << 32, 2.0)
    requests = [new_request(1, sampling=plain), new_request(2, blocks=(7, 8), sampling=odd)]
    rows = [row(1, is_sampling=True), row(2, is_sampling=True)]
    sampling = run(table, plan(new=requests, rows=rows), [1, 2]).sampling
    assert sampling["seed"].tolist() == [(1 << 64) - 1, 0]
    assert sampling["sample_index"].tolist() == [3, 0]
    assert sampling["temperature"].tolist() == [np.float32(0.7), 0.0]
    assert sampling["top_k"].tolist() == [40, (1 << 31) - 1]
    assert sampling["min_p"].tolist() == [np.float32(0.1), 1.0]
    assert 0 < sampling["top_p"][1] < 1e-30


def test_finished_handles_are_forgotten_before_new_requests_are_learnt():
    table = make_table()
    run(table, plan(new=[new_request()]))
    run(table, plan(new=[new_request(num_tokens=3)], rows=[row(1, 3)], finished=[1]))
    assert len(table) == 1


def test_forgetting_an_unknown_handle_does_nothing():
    table = make_table()
    run(table, plan(new=[new_request()]))
    run(table, plan(finished=[8]))
    assert len(table) == 1
    assert table.handles == (1,)


def test_slots_and_tables_grow_as_requests_come_and_are_used_again():
    table = RequestTable(block_size=4, num_blocks=1000, vocab_size=200, max_positions=1000)
    many = [new_request(handle, blocks=tuple(range(1, 1 + handle))) for handle in range(2, 92)]
    run(table, plan(new=many, rows=[row(handle, 6, is_sampling=True) for handle in range(2, 92)]), list(range(90)))
    arrays = run(table, plan(rows=[row(91, 1, is_sampling=True), row(2, 1, is_sampling=True)]), [7, 8])
    assert arrays.token_ids.tolist() == [89, 0]
    run(table, plan(finished=range(2, 92)))
    run(table, plan(new=many, rows=[row(handle, 6, is_sampling=True) for handle in range(2, 92)]), list(range(90)))
    assert len(table) == 90
    assert len(table._columns) == 90


def test_rows_of_a_failed_request_are_passed_over_and_reported():
    table = make_table()
    run(table, plan(new=[new_request(1), new_request(2, blocks=(7, 8))]))
    table.fail([Handle(1), Handle(99)])
    rows, passed_over = table.take(plan(rows=[row(1, 30, is_sampling=True), row(2, 6, is_sampling=True)]))
    assert passed_over == [1]
    assert rows.handles == [2]
    assert table.step_arrays(rows).token_ids.tolist() == [100, 101, 102, 103, 104, 105]


VIOLATIONS = {
    "a row's handle is unknown": plan(rows=[row(9)]),
    "a handle has two rows in a plan": plan(rows=[row(1, 1), row(1, 1)]),
    "a new request's handle is in use": plan(new=[new_request(1)]),
    "a row goes past the known tokens": plan(rows=[row(1, 7, blocks=(9,))]),
    "a row's slot is missing in the block table": plan(new=[new_request(2, 9)], rows=[row(2, 9)]),
    "a row goes past the model's length": plan(new=[new_request(2, 31, blocks=range(1, 10))], rows=[row(2, 31)]),
    "a sampling row ends before the last known token": plan(rows=[row(1, 5, is_sampling=True)]),
    "a row must compute at least one token": plan(rows=[row(1, 0)]),
    "a new request must leave at least one known token": plan(new=[new_request(2, 8, num_computed=8)]),
    "a prefix hit exceeds the block table": plan(new=[new_request(2, 20, num_computed=12)]),
    "the prompt must be some of the known tokens": plan(new=[new_request(2, 3, num_prompt=4)]),
    "a token is outside the vocabulary": plan(new=[new_request(2, first=195)]),
    "a block is outside the pool": plan(new=[new_request(2), new_request(3, blocks=(20,))]),
    r"a block is outside the pool .*block_id=0": plan(rows=[row(1, 1, blocks=(0,))]),
}


@pytest.mark.parametrize("law", VIOLATIONS)
def test_take_refuses_a_broken_law_and_changes_nothing(law):
    table = make_table()
    run(table, plan(new=[new_request()]))
    with pytest.raises(InvariantError, match=law):
        table.take(VIOLATIONS[law])
    assert len(table) == 1
    arrays = run(table, plan(rows=[row(is_sampling=True)]), [7])
    assert arrays.rows.context_lens.tolist() == [6]
    assert tables_of(arrays) == [[5, 3]]


def test_take_refuses_a_row_of_a_handle_that_finishes_in_the_same_plan():
    table = make_table()
    run(table, plan(new=[new_request()]))
    with pytest.raises(InvariantError, match="unknown"):
        table.take(plan(rows=[row(1, 1)], finished=[1]))
