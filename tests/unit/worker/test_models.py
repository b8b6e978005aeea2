"""Each family against transformers' logits, through the paged path: chunks, batches, permuted block tables, poison."""

import pytest
import torch

from services.worker.input_batch import InputBatch
from services.worker.kv_storage import KVStorage
from services.worker.model_config import RopeConfig
from services.worker.plan import BatchPlan, SampledToken, StepResult, StepTimings
from tests.unit.worker.step_driver import StepDriver
from tests.unit.worker.tiny_models import TinyModel, tiny_model

pytestmark = pytest.mark.slow

NUM_BLOCKS = 64
BLOCK_SIZE = 4
PROMPTS = [list(range(1, 38)), [5], [9, 8, 7, 6], list(range(60, 20, -1)), list(range(2, 19))]


class LogitsRecorder:
    """Executes plans and keeps the logits of every position of every request."""

    def __init__(self, tiny: TinyModel) -> None:
        self._model = tiny.model
        self._kv = KVStorage(
            tiny.config, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=torch.float32, is_poisoned=True
        )
        window = tiny.config.sliding_window
        self._batch = InputBatch(
            block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, dtype=torch.float32, sliding_window=window
        )
        self.logits_by_handle: dict[int, list[torch.Tensor]] = {}

    def execute(self, plan: BatchPlan) -> StepResult:
        self._batch.check(plan)
        self._batch.apply(plan)
        for request in plan.new_requests:
            self._kv.poison(request.block_ids, request.num_computed_tokens)
        for row in plan.rows:
            self._kv.poison(row.new_block_ids)
        inputs = self._batch.prepare(plan.rows)
        sampled = []
        if inputs is not None:
            hidden = self._model.forward(inputs.token_ids, inputs.positions, self._kv.layers, inputs.attention)
            logits = self._model.compute_logits(hidden)
            for row, of_row in zip(
                plan.rows, logits.split([row.num_scheduled_tokens for row in plan.rows]), strict=True
            ):
                self.logits_by_handle.setdefault(row.handle, []).extend(of_row)
            best = logits[inputs.sampled_tokens].argmax(-1).tolist()
            sampled = [SampledToken(row.handle, token) for row, token in zip(inputs.sampling_rows, best, strict=True)]
        self._batch.advance(plan.rows, sampled)
        return StepResult(plan.plan_id, tuple(sampled), StepTimings(0, 0, 0))


def check_against_reference(tiny: TinyModel, *, chunk: int = 16, depth: int = 1) -> None:
    torch.set_num_threads(1)
    recorder = LogitsRecorder(tiny)
    driver = StepDriver(
        recorder.execute,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        chunk=chunk,
        depth=depth,
        seed=3,
        has_random_chunks=True,
    )
    outputs = driver.generate(PROMPTS, 12)
    for index, (prompt, output) in enumerate(zip(PROMPTS, outputs, strict=True)):
        expected = tiny.reference_logits(prompt + output[:-1])
        computed = torch.stack(recorder.logits_by_handle[index + 1])[: len(expected)]
        torch.testing.assert_close(computed, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(3, 3), (3, 1), (8, 1), (6, 2)])
def test_logits_equal_the_references_in_every_family_and_group_size(family, num_heads, num_kv_heads):
    check_against_reference(tiny_model(family, num_heads=num_heads, num_kv_heads=num_kv_heads))


@pytest.mark.parametrize("window", [1, 3, 8, 20, 1000])
def test_logits_equal_the_references_with_a_sliding_window(window):
    check_against_reference(tiny_model("mistral", num_heads=6, num_kv_heads=2, sliding_window=window))


@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_logits_equal_the_references_whatever_the_chunk(chunk):
    check_against_reference(tiny_model("llama"), chunk=chunk, depth=2)


def test_logits_equal_the_references_with_biases_everywhere_and_an_untied_head():
    check_against_reference(tiny_model("llama", has_bias=True, tie_word_embeddings=False, head_dim=16))


ROPES = [
    (RopeConfig(500.0, "linear", factor=4.0), {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}),
    (
        RopeConfig(500.0, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=32),
        {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    (
        RopeConfig(500.0, "yarn", factor=8.0, original_max_position=32),
        {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 32},
    ),
]


@pytest.mark.parametrize(("rope", "parameters"), ROPES, ids=lambda value: getattr(value, "scaling", ""))
def test_logits_equal_the_references_under_rope_scaling(rope, parameters):
    check_against_reference(tiny_model("llama", head_dim=16, rope=rope, rope_parameters=parameters))
