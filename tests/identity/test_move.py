"""A request whose worker is lost goes on elsewhere with the tokens that it would have had where it was.

The default model on two workers under one scheduler and one manager, in the process of the test: one of them is closed
in the middle of its answers, as the scheduler closes one that was killed, and the other takes its requests over.
"""

import pytest

from services.common.clock import SystemClock
from services.scheduler.core import SamplingParams
from services.worker.config import WorkerConfig
from services.worker.loaded_model import LoadedModel
from services.worker.loading import load_model
from tests.core_mesh import CoreMesh, Sizes
from tests.identity.conftest import varied_prompts

pytestmark = [pytest.mark.model, pytest.mark.slow]

PROMPTS = [varied_prompts(49_152)[index] for index in (5, 8)]
NUM_OUTPUTS = 12
SAMPLING = {
    "greedy": [SamplingParams()] * 2,
    "seeded": [SamplingParams(temperature=0.8, top_p=0.95, seed=seed) for seed in range(2)],
}


def load(model_path, dtype: str, **changes) -> LoadedModel:
    settings = {"num_threads": 1, "kv_cache_gib": 0.03, "max_num_batched_tokens": 64, "poison_new_blocks": True}
    config = WorkerConfig(listen="unix:/unused", model=str(model_path), dtype=dtype, **{**settings, **changes})
    return load_model(config, SystemClock())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_are_the_same_when_a_worker_is_lost_in_the_middle(model_path, dtype):
    first, second = load(model_path, dtype), load(model_path, dtype)
    for params in SAMPLING.values():
        alone_mesh = CoreMesh(first.runner, Sizes(num_blocks=first.num_blocks))
        alone = [
            alone_mesh.generate([prompt], NUM_OUTPUTS, [one])[0] for prompt, one in zip(PROMPTS, params, strict=True)
        ]
        mesh = CoreMesh(first.runner, Sizes(num_blocks=first.num_blocks), second.runner)
        assert mesh.generate(PROMPTS, NUM_OUTPUTS, params, lose_after_steps=8) == alone
        assert mesh.num_preemptions > 0  # so many were moved
