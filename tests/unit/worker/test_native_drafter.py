"""Drafts on the native engine: how they are laid out, which samples count, and that no token or logit changes."""

import numpy as np
import pytest

from services.common.errors import InvariantError
from services.worker.drafting import DraftSettings
from services.worker.native.drafter import Drafter, verify
from services.worker.native.request_table import RequestTable
from services.worker.native.runner import NativeRunner
from services.worker.plan import BatchPlan, Handle, NewRequest, RowDraft, RowError, SamplingParams, ScheduledRow
from tests.unit.worker.native_models import load, write_model

SETTINGS = DraftSettings(max_draft_tokens=4, min_ngram=2, max_ngram=3)
GREEDY = SamplingParams(0.0)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=11)
PROMPTS = {1: list(range(3, 24)), 2: [7, 8, 9, 7, 8, 9, 7, 8], 3: [50]}
NUM_OUTPUTS = 24
VOCAB_SIZE = 288


def new_request(handle: int, token_ids, sampling=GREEDY) -> NewRequest:
    blocks = tuple(range(4 * handle - 3, 4 * handle + 1))
    return NewRequest(Handle(handle), f"r{handle}", tuple(token_ids), len(token_ids), sampling, blocks)


def row(handle: int, num_tokens: int = 1, max_draft_tokens: int = 0, *, is_sampling: bool = True) -> ScheduledRow:
    return ScheduledRow(Handle(handle), num_tokens, (), is_sampling, max_draft_tokens)


# The arrays of a step.


def make_table() -> RequestTable:
    """Requests 1 and 2 have sampled the tokens 70 and 80; 3 has four prompt tokens to compute."""
    table = RequestTable(block_size=4, num_blocks=20, vocab_size=200, max_positions=30)
    requests = [new_request(1, range(100, 106)), new_request(2, range(110, 113)), new_request(3, range(120, 124))]
    rows, _ = table.take(BatchPlan(1, tuple(requests), (row(1, 6), row(2, 3))))
    table.advance(rows, np.array([70, 80], dtype=np.int32))
    return table


def test_drafted_tokens_follow_their_row_and_are_sampled_after_at_the_next_positions():
    table = make_table()
    rows, _ = table.take(BatchPlan(2, (), (row(1, 1, 3), row(3, 2, is_sampling=False), row(2, 1, 3))))
    arrays = table.step_arrays(rows, [[71, 72], []])
    assert arrays.token_ids.tolist() == [70, 71, 72, 120, 121, 80]
    assert arrays.rows.query_starts.tolist() == [0, 3, 5, 6]
    assert arrays.rows.context_lens.tolist() == [9, 2, 4]
    assert arrays.sampling["token_index"].tolist() == [0, 1, 2, 5]
    assert arrays.sampling["position"].tolist() == [1, 2, 3, 1]


def test_row_of_prompt_tokens_may_draft_too():
    table = make_table()
    rows, _ = table.take(BatchPlan(2, (), (row(3, 4, 2), row(1))))
    arrays = table.step_arrays(rows, [[90, 91], []])
    assert arrays.token_ids.tolist() == [120, 121, 122, 123, 90, 91, 70]
    assert arrays.sampling["token_index"].tolist() == [3, 4, 5, 6]
    assert arrays.sampling["position"].tolist() == [0, 1, 2, 1]


def test_request_continues_after_the_last_token_that_counts():
    table = make_table()
    rows, _ = table.take(BatchPlan(2, (), (row(1, 1, 3), row(2, 1, 3))))
    table.advance(rows, np.array([73, 81], dtype=np.int32), np.array([3, 1], dtype=np.int32))
    rows, _ = table.take(BatchPlan(3, (), (row(1), row(2))))
    arrays = table.step_arrays(rows)
    assert arrays.token_ids.tolist() == [73, 81]
    assert arrays.rows.context_lens.tolist() == [10, 5]
    assert arrays.sampling["position"].tolist() == [4, 2]


@pytest.mark.parametrize(
    ("a_row", "law"),
    [
        (row(1, 1, 10), "a row's slot is missing in the block table .*end=17"),
        (row(3, 2, 1, is_sampling=False), "only a sampling row may draft"),
        (row(1, 1, -1), "only a sampling row may draft"),
    ],
)
def test_take_refuses_drafts_without_a_slot_or_a_sample(a_row, law):
    with pytest.raises(InvariantError, match=law):
        make_table().take(BatchPlan(2, (), (a_row,)))


# The verdict.


@pytest.mark.parametrize(
    ("drafts", "sampled", "kept", "num_tokens", "last"),
    [
        ([[5, 6]], [5, 6, 7], [0, 1, 2], [3], [7]),
        ([[5, 6]], [5, 9, 7], [0, 1], [2], [9]),
        ([[5, 6]], [9, 6, 7], [0], [1], [9]),
        ([[5, 6]], [-1, 6, 7], [0], [1], [-1]),
        ([[], [5], []], [1, 5, 2, 3], [0, 1, 2, 3], [1, 2, 1], [1, 2, 3]),
    ],
)
def test_samples_count_up_to_the_first_that_was_not_drafted(drafts, sampled, kept, num_tokens, last):
    tokens = np.array(sampled, dtype=np.int32)
    verdict = verify(drafts, tokens)
    assert verdict.kept.tolist() == kept
    assert verdict.num_tokens.tolist() == num_tokens
    assert verdict.last_tokens(tokens).tolist() == last


# The runner.


class Oracle(Drafter):
    """Drafts what will be sampled, but for every ``period``-th output position."""

    def __init__(self, expected: dict[int, list[int]], period: int) -> None:
        super().__init__(SETTINGS)
        self._expected = expected
        self._period = period

    def draft(self, rows):
        if rows.max_drafts is None:
            return None
        drafts = []
        for handle, count in zip(rows.sampling_handles, rows.max_drafts[rows.is_sampling].tolist(), strict=True):
            first = len(self._history_by_handle[handle]._token_ids) - len(PROMPTS[handle])
            outputs = self._expected[handle][first : first + count]
            drafts.append([(token + ((first + i) % self._period == 0)) % VOCAB_SIZE for i, token in enumerate(outputs)])
        return drafts


def generate(runner: NativeRunner, sampling=GREEDY, *, max_draft_tokens=0) -> tuple[dict[int, list[int]], int]:
    """Run all prompts together, without run-ahead; return outputs and steps."""
    runner.reset()
    outputs: dict[int, list[int]] = {handle: [] for handle in PROMPTS}
    requests = tuple(new_request(handle, prompt, sampling) for handle, prompt in PROMPTS.items())
    num_steps = 0
    while rows := tuple(
        row(handle, 1 if known else len(PROMPTS[handle]), min(max_draft_tokens, NUM_OUTPUTS - len(known) - 1))
        for handle, known in outputs.items()
        if len(known) < NUM_OUTPUTS
    ):
        num_steps += 1
        for token in runner.execute(BatchPlan(num_steps, requests, rows)).sampled:
            outputs[token.handle].append(token.token_id)
        requests = ()
    return outputs, num_steps


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("native"), "qwen3")


@pytest.fixture
def runner(path):
    return load(path, kv_cache_gib=0.002).runner


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("period", [1, 2, 3, 5, 100])
def test_tokens_and_logits_are_those_without_drafts_however_many_come_true(runner, sampling, period):
    seen: list[tuple[int, bytes]] = []
    runner._observe_logits = lambda handles, logits: seen.extend(zip(handles, map(bytes, logits), strict=True))
    expected, num_plain_steps = generate(runner, sampling)
    plain, seen[:] = sorted(seen, key=lambda one: one[0]), []
    runner._drafter = Oracle(expected, period)
    outputs, num_steps = generate(runner, sampling, max_draft_tokens=4)
    assert outputs == expected
    assert sorted(seen, key=lambda one: one[0]) == plain
    assert num_steps == num_plain_steps if period == 1 else num_steps < num_plain_steps


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_prompt_lookup_changes_no_token(runner, sampling):
    expected, _ = generate(runner, sampling)
    runner._drafter = Drafter(SETTINGS)
    assert generate(runner, sampling, max_draft_tokens=4)[0] == expected


def test_result_tells_who_drafted_and_what_came_true(runner):
    expected, _ = generate(runner)
    runner.reset()
    runner._drafter = Oracle(expected, period=3)
    requests = tuple(new_request(handle, prompt) for handle, prompt in PROMPTS.items())
    runner.execute(BatchPlan(1, requests, tuple(row(handle, len(prompt)) for handle, prompt in PROMPTS.items())))
    result = runner.execute(BatchPlan(2, (), (row(1, 1, 4), row(2, 1), row(3, 1, 1))))
    assert result.drafts == (RowDraft(Handle(1), 4), RowDraft(Handle(3), 1))
    counted = [token.handle for token in result.sampled]
    assert counted == [1, 1, 1, 2, 3, 3]
    assert [token.token_id for token in result.sampled if token.handle == 1] == expected[1][1:4]


def test_worker_that_does_not_draft_samples_one_token_whatever_it_may(runner):
    runner.execute(BatchPlan(1, (new_request(2, PROMPTS[2]),), (row(2, 8),)))
    result = runner.execute(BatchPlan(2, (), (row(2, 1, 4),)))
    assert len(result.sampled) == 1
    assert result.drafts == ()


def test_plan_whose_drafts_exceed_the_token_bound_is_refused(runner):
    with pytest.raises(InvariantError, match=r"exceeds max_num_batched_tokens .*num_tokens=65"):
        runner.execute(BatchPlan(1, (new_request(1, PROMPTS[1]),), (row(1, 21, 44),)))


def test_request_fails_after_the_drafts_that_came_true_before_the_nan(runner, monkeypatch):
    runner._drafter = Oracle({2: [0, 31, 32, 33]}, period=100)
    runner.execute(BatchPlan(1, (new_request(2, PROMPTS[2]),), (row(2, 8),)))
    monkeypatch.setattr(runner._model, "step", lambda *_: np.array([31, -1, 33, 34], dtype=np.int32))
    result = runner.execute(BatchPlan(2, (), (row(2, 1, 3),)))
    assert [token.token_id for token in result.sampled] == [31]
    assert result.row_errors == (RowError(Handle(2), "The model's logits at output position 2 are not finite."),)


def test_histories_go_when_requests_do(runner):
    drafter = runner._drafter = Drafter(SETTINGS)
    runner.execute(BatchPlan(1, (new_request(1, PROMPTS[1]), new_request(2, PROMPTS[2]))))
    runner.execute(BatchPlan(2, finished_handles=(Handle(1),)))
    assert len(drafter) == 1
    runner.reset()
    assert len(drafter) == 0
