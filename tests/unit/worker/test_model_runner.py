"""The runner on a tiny model: the reference's tokens whatever the batching; failures stay where they are."""

import itertools

import pytest
import torch

from services.common.clock import ManualClock
from services.common.errors import EngineError, ErrorReason, InvariantError
from services.worker.kv_storage import KVStorage
from services.worker.model_runner import ModelRunner
from services.worker.plan import BatchPlan, Handle, NewRequest, RowError, SamplingParams, ScheduledRow
from tests.unit.worker.step_driver import StepDriver
from tests.unit.worker.tiny_models import TinyModel, tiny_model

NUM_BLOCKS = 80
BLOCK_SIZE = 4
NUM_OUTPUTS = 10
SHARED_PREFIX = list(range(3, 24))
PROMPTS = [[*SHARED_PREFIX, 40], [1, 2, 3], [*SHARED_PREFIX, 41, 42], [50], list(range(30, 60))]


@pytest.fixture(scope="module")
def tiny() -> TinyModel:
    torch.set_num_threads(1)
    return tiny_model("qwen3", num_heads=6, num_kv_heads=2)


@pytest.fixture(scope="module")
def expected(tiny) -> list[list[int]]:
    """Greedy outputs of the reference model, each prompt alone, without a KV cache."""
    outputs = []
    for prompt in PROMPTS:
        token_ids = list(prompt)
        for _ in range(NUM_OUTPUTS):
            token_ids.append(int(tiny.reference_logits(token_ids)[-1].argmax()))
        outputs.append(token_ids[len(prompt) :])
    return outputs


def make_runner(tiny, **options) -> ModelRunner:
    kv = KVStorage(tiny.config, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=torch.float32, is_poisoned=True)
    return ModelRunner(tiny.model, kv, max_num_batched_tokens=64, **options)


def make_driver(runner, **options) -> StepDriver:
    return StepDriver(runner.execute, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, **options)


@pytest.mark.parametrize(("chunk", "depth"), list(itertools.product([5, 64], [1, 2, 3])))
def test_greedy_tokens_equal_the_references_whatever_chunk_and_depth(tiny, expected, chunk, depth):
    runner = make_runner(tiny)
    assert make_driver(runner, chunk=chunk, depth=depth).generate(PROMPTS, NUM_OUTPUTS) == expected
    assert runner.num_requests == 0


def test_greedy_tokens_equal_the_references_after_a_prefix_hit(tiny, expected):
    driver = make_driver(make_runner(tiny), chunk=9, depth=2, has_prefix_cache=True)
    outputs = [driver.generate([prompt], NUM_OUTPUTS)[0] for prompt in PROMPTS]
    assert outputs == expected
    assert driver.num_prefix_hit_tokens == 20


def test_sampled_tokens_do_not_depend_on_batch_chunk_or_depth(tiny):
    sampling = [SamplingParams(temperature=0.8, top_p=0.95, seed=seed) for seed in range(len(PROMPTS))]
    together = make_driver(make_runner(tiny), chunk=64).generate(PROMPTS, NUM_OUTPUTS, sampling)
    driver = make_driver(make_runner(tiny), chunk=3, depth=2)
    alone = [
        driver.generate([prompt], NUM_OUTPUTS, [params])[0] for prompt, params in zip(PROMPTS, sampling, strict=True)
    ]
    assert alone == together


def new_request(handle=1, num_tokens=3) -> NewRequest:
    return NewRequest(Handle(handle), "r", tuple(range(num_tokens)), num_tokens, SamplingParams(0.0), (handle,))


def sampling_row(handle=1, num_tokens=1) -> ScheduledRow:
    return ScheduledRow(Handle(handle), num_tokens, (), is_sampling=True)


def test_plan_without_rows_forgets_finished_requests(tiny):
    runner = make_runner(tiny)
    runner.execute(BatchPlan(1, (new_request(),), (sampling_row(1, 3),)))
    assert runner.num_requests == 1
    result = runner.execute(BatchPlan(2, finished_handles=(Handle(1),)))
    assert (result.plan_id, result.sampled, runner.num_requests) == (2, (), 0)


def test_reset_forgets_every_request(tiny):
    runner = make_runner(tiny)
    runner.execute(BatchPlan(1, (new_request(1), new_request(2))))
    runner.reset()
    assert runner.num_requests == 0


def test_plan_over_the_token_bound_is_refused_before_it_changes_anything(tiny):
    runner = make_runner(tiny)
    with pytest.raises(InvariantError, match=r"exceeds max_num_batched_tokens .*num_tokens=65"):
        runner.execute(BatchPlan(1, (new_request(),), (ScheduledRow(Handle(1), 65),)))
    assert runner.num_requests == 0


def test_row_with_nan_logits_fails_alone_and_its_run_ahead_rows_are_passed_over(tiny):
    kv = KVStorage(tiny.config, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=torch.float32)
    runner = ModelRunner(tiny.model, kv, max_num_batched_tokens=64)
    rows = (sampling_row(1, 3), sampling_row(2, 3))
    healthy = runner.execute(BatchPlan(1, (new_request(1), new_request(2)), rows)).sampled
    assert [token.handle for token in healthy] == [1, 2]
    for layer in kv.layers:
        layer[2] = float("nan")  # block 2 is request 2's
    decode = (sampling_row(1), sampling_row(2))
    result = runner.execute(BatchPlan(2, (), decode))
    assert [token.handle for token in result.sampled] == [1]
    assert result.row_errors == (RowError(Handle(2), "The model's logits at output position 1 are not finite."),)
    result = runner.execute(BatchPlan(3, (), (ScheduledRow(Handle(1), 1, (11,), is_sampling=True), sampling_row(2))))
    assert [token.handle for token in result.sampled] == [1]
    assert result.row_errors == (RowError(Handle(2), "The request failed in an earlier step."),)


def test_step_that_fails_on_the_device_says_so_and_its_requests_cannot_go_on(tiny, monkeypatch):
    runner = make_runner(tiny)
    runner.execute(BatchPlan(1, (new_request(1), new_request(2)), (sampling_row(2, 3),)))
    with monkeypatch.context() as patch:
        patch.setattr(tiny.model, "forward", lambda *_: 1 / 0)
        with pytest.raises(EngineError, match="Step 2 failed on the device: ZeroDivisionError") as raised:
            runner.execute(BatchPlan(2, (), (ScheduledRow(Handle(1), 2),)))
    assert raised.value.reason is ErrorReason.STEP_FAILED
    result = runner.execute(BatchPlan(3, (), (sampling_row(1, 1), sampling_row(2))))
    assert [token.handle for token in result.sampled] == [2]
    assert [error.handle for error in result.row_errors] == [1]


def test_timings_come_from_the_clock(tiny):
    result = make_runner(tiny, clock=ManualClock()).execute(BatchPlan(1, (new_request(),), (sampling_row(1, 3),)))
    assert (result.timings.prepare_s, result.timings.forward_s, result.timings.sample_s) == (0, 0, 0)
