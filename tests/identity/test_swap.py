"""A request that was preempted goes on with the tokens that it would have had alone, whichever way it comes back.

The default model on the engine that serves it, through a pool too small for five requests: alone, preempted and
computed again, preempted and brought back from host memory. Greedy and seeded, in both precisions.
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

NUM_OUTPUTS = 40
PROMPTS = [varied_prompts(49_152)[index] for index in (5, 7, 8, 9, 11)]
BLOCK_SIZE = 16
"""Small, so that a request of few tokens has blocks that are full and can come back."""
NUM_BLOCKS = 12
"""All five requests fit at first, and three do to the end: three are preempted, and four blocks come back."""

SAMPLING = [SamplingParams(temperature=0.8 * (index % 2), top_p=0.95, seed=index) for index in range(len(PROMPTS))]
"""Greedy and seeded in turn, so that both are beside both."""


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def loaded(model_path, request) -> LoadedModel:
    config = WorkerConfig(
        listen="unix:/unused",
        model=str(model_path),
        dtype=request.param,
        num_threads=1,
        kv_cache_gib=0.03,
        swap_space_gib=0.03,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=64,
        poison_new_blocks=True,
    )
    return load_model(config, SystemClock())


def test_tokens_are_the_same_alone_after_recompute_and_after_swap(loaded):
    roomy = CoreMesh(loaded.runner, Sizes(block_size=BLOCK_SIZE, num_blocks=loaded.num_blocks))
    alone = [roomy.generate([prompt], NUM_OUTPUTS, [one])[0] for prompt, one in zip(PROMPTS, SAMPLING, strict=True)]
    assert roomy.num_preemptions == 0

    recompute = CoreMesh(loaded.runner, Sizes(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS))
    assert recompute.generate(PROMPTS, NUM_OUTPUTS, SAMPLING) == alone
    assert recompute.num_preemptions > 0

    sizes = Sizes(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, num_host_blocks=loaded.num_host_blocks)
    swap = CoreMesh(loaded.runner, sizes)
    assert swap.generate(PROMPTS, NUM_OUTPUTS, SAMPLING) == alone
    assert swap.num_preemptions > 0
    assert swap.usage.num_restored > 0


def test_restoring_a_block_was_measured_to_be_faster_than_computing_it_again(loaded):
    assert loaded.host_costs is not None
    assert 0 < loaded.host_costs.block_restore_us < BLOCK_SIZE * loaded.host_costs.token_prefill_us


def test_tokens_are_the_same_after_swap_in_the_torch_backend(model_path):
    config = WorkerConfig(
        listen="unix:/unused",
        model=str(model_path),
        backend="torch",
        dtype="float32",
        num_threads=1,
        kv_cache_gib=0.03,
        swap_space_gib=0.03,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=64,
        poison_new_blocks=True,
    )
    torch_loaded = load_model(config, SystemClock())
    # Beside each other and undisturbed, not each alone as above, since a step takes several times as long.
    roomy = CoreMesh(torch_loaded.runner, Sizes(block_size=BLOCK_SIZE, num_blocks=torch_loaded.num_blocks))
    undisturbed = roomy.generate(PROMPTS, NUM_OUTPUTS)
    assert roomy.num_preemptions == 0
    sizes = Sizes(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, num_host_blocks=torch_loaded.num_host_blocks)
    swap = CoreMesh(torch_loaded.runner, sizes)
    assert swap.generate(PROMPTS, NUM_OUTPUTS) == undisturbed
    assert swap.num_preemptions > 0
    assert swap.usage.num_restored > 0
