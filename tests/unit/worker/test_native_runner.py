"""The native runner on tiny models: the reference's tokens whatever the batching; failures stay where they are."""

import itertools

import numpy as np
import pytest

from services.common.errors import EngineError, ErrorReason, InvariantError
from services.worker.plan import BatchPlan, Handle, NewRequest, RowError, SamplingParams, ScheduledRow
from tests.unit.worker.native_models import BLOCK_SIZE, NUM_BLOCKS, load, reference, write_model
from tests.unit.worker.step_driver import StepDriver

NUM_OUTPUTS = 8
SHARED_PREFIX = list(range(3, 40))
PROMPTS = [[*SHARED_PREFIX, 40], [1, 2, 3], [*SHARED_PREFIX, 41, 42], [50], list(range(30, 60))]
SEEDED = [SamplingParams(temperature=0.8, top_p=0.95, seed=seed) for seed in range(len(PROMPTS))]


def make_driver(runner, **options) -> StepDriver:
    return StepDriver(runner.execute, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, **{"chunk": 64, **options})


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("native"), "qwen3")


@pytest.fixture(scope="module")
def expected(path) -> list[list[int]]:
    return make_driver(reference(path).runner).generate(PROMPTS, NUM_OUTPUTS)


@pytest.fixture
def runner(path):
    return load(path, dtype="float32").runner


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("type_name", [None, "F16", "Q4_0", "Q8_0"])
def test_float32_tokens_equal_the_references_for_each_family_and_file(tmp_path, family, type_name):
    path = write_model(tmp_path, family, type_name=type_name)
    expected = make_driver(reference(path).runner).generate(PROMPTS, NUM_OUTPUTS)
    assert make_driver(load(path, dtype="float32").runner).generate(PROMPTS, NUM_OUTPUTS) == expected


@pytest.mark.parametrize("type_name", [None, "F32"])
@pytest.mark.parametrize(
    "changes",
    [{"tie_word_embeddings": True}, {"has_qkv_bias": True, "has_output_bias": True, "has_mlp_bias": True}],
)
def test_tied_embeddings_and_every_bias_are_run(tmp_path, type_name, changes):
    path = write_model(tmp_path, type_name=type_name, **changes)
    expected = make_driver(reference(path).runner).generate(PROMPTS, NUM_OUTPUTS)
    assert make_driver(load(path, dtype="float32").runner).generate(PROMPTS, NUM_OUTPUTS) == expected


@pytest.mark.parametrize(("chunk", "depth"), list(itertools.product([5, 64], [1, 2, 3])))
def test_greedy_tokens_equal_the_references_whatever_chunk_and_depth(runner, expected, chunk, depth):
    assert make_driver(runner, chunk=chunk, depth=depth).generate(PROMPTS, NUM_OUTPUTS) == expected
    assert runner.num_requests == 0


def test_greedy_tokens_equal_the_references_after_a_prefix_hit(runner, expected):
    driver = make_driver(runner, chunk=9, depth=2, has_prefix_cache=True)
    assert [driver.generate([prompt], NUM_OUTPUTS)[0] for prompt in PROMPTS] == expected
    assert driver.num_prefix_hit_tokens == 2 * BLOCK_SIZE


@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}, {"quantization": "int4"}, {"kv_dtype": "int8"}])
def test_sampled_tokens_do_not_depend_on_batch_chunk_or_depth(path, options):
    runner = load(path, **options).runner
    together = make_driver(runner, chunk=64).generate(PROMPTS, NUM_OUTPUTS, SEEDED)
    driver = make_driver(runner, chunk=3, depth=2)
    alone = [driver.generate([prompt], NUM_OUTPUTS, [how])[0] for prompt, how in zip(PROMPTS, SEEDED, strict=True)]
    assert alone == together


def test_seeded_tokens_equal_the_references(path, runner):
    expected = make_driver(reference(path).runner).generate(PROMPTS, NUM_OUTPUTS, SEEDED)
    assert make_driver(runner).generate(PROMPTS, NUM_OUTPUTS, SEEDED) == expected


def new_request(handle=1, num_tokens=3) -> NewRequest:
    return NewRequest(Handle(handle), "r", tuple(range(num_tokens)), num_tokens, SamplingParams(0.0), (handle,))


def sampling_row(handle=1, num_tokens=1) -> ScheduledRow:
    return ScheduledRow(Handle(handle), num_tokens, (), is_sampling=True)


def test_plan_without_rows_forgets_finished_requests(runner):
    runner.execute(BatchPlan(1, (new_request(),), (sampling_row(1, 3),)))
    assert runner.num_requests == 1
    result = runner.execute(BatchPlan(2, finished_handles=(Handle(1),)))
    assert (result.plan_id, result.sampled, runner.num_requests) == (2, (), 0)


def test_reset_forgets_every_request(runner):
    runner.execute(BatchPlan(1, (new_request(1), new_request(2))))
    runner.reset()
    assert runner.num_requests == 0


def test_plan_over_the_token_bound_is_refused_before_it_changes_anything(runner):
    with pytest.raises(InvariantError, match=r"exceeds max_num_batched_tokens .*num_tokens=65"):
        runner.execute(BatchPlan(1, (new_request(),), (ScheduledRow(Handle(1), 65),)))
    assert runner.num_requests == 0


def test_row_with_nan_logits_fails_alone_and_its_run_ahead_rows_are_passed_over(runner):
    rows = (sampling_row(1, 3), sampling_row(2, 3))
    runner.execute(BatchPlan(1, (new_request(1), new_request(2)), rows))
    runner._cache.memory[2] = 0xFF  # block 2 is request 2's
    result = runner.execute(BatchPlan(2, (), (sampling_row(1), sampling_row(2))))
    assert [token.handle for token in result.sampled] == [1]
    assert result.row_errors == (RowError(Handle(2), "The model's logits at output position 1 are not finite."),)
    result = runner.execute(BatchPlan(3, (), (sampling_row(1), sampling_row(2))))
    assert [token.handle for token in result.sampled] == [1]
    assert result.row_errors == (RowError(Handle(2), "The request failed in an earlier step."),)
    result = runner.execute(BatchPlan(4, (new_request(2),), (sampling_row(2, 3),), (Handle(2),)))
    assert [token.handle for token in result.sampled] == [2]


def test_step_that_fails_in_the_engine_says_so_and_its_requests_cannot_go_on(runner, monkeypatch):
    runner.execute(BatchPlan(1, (new_request(1), new_request(2)), (sampling_row(2, 3),)))
    with monkeypatch.context() as patch:
        patch.setattr(runner._model, "step", lambda *_: 1 / 0)
        with pytest.raises(EngineError, match="Step 2 failed on the device: ZeroDivisionError") as raised:
            runner.execute(BatchPlan(2, (), (ScheduledRow(Handle(1), 2),)))
    assert raised.value.reason is ErrorReason.STEP_FAILED
    result = runner.execute(BatchPlan(3, (), (sampling_row(1, 1), sampling_row(2))))
    assert [token.handle for token in result.sampled] == [2]
    assert [error.handle for error in result.row_errors] == [1]


def test_timings_come_from_the_clock(runner):
    result = runner.execute(BatchPlan(1, (new_request(),), (sampling_row(1, 3),)))
    assert (result.timings.prepare_s, result.timings.forward_s, result.timings.sample_s) == (0, 0, 0)


def test_logits_are_shown_to_who_observes_them(runner):
    seen = []
    runner._observe_logits = lambda handles, logits: seen.append((list(handles), logits))
    result = runner.execute(BatchPlan(1, (new_request(1), new_request(2)), (sampling_row(1, 3), row_of(2, 2))))
    ((handles, logits),) = seen
    assert handles == [1]
    assert logits.shape == (1, 288)
    assert np.argmax(logits[0]) == result.sampled[0].token_id


def row_of(handle: int, num_tokens: int) -> ScheduledRow:
    return ScheduledRow(Handle(handle), num_tokens)
