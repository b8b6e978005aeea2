"""The default model says the same whether it guesses tokens or not: the same tokens, chosen from the same logits.

Greedy and seeded, prompts that repeat themselves and others, side by side and with run-ahead; also while requests
preempt each other. That guesses come true at all is checked too.
"""

import hashlib
from collections import defaultdict

import numpy as np
import pytest

from services.scheduler.core import SamplingParams
from services.worker.loaded_model import LoadedModel
from services.worker.plan import Handle
from tests.core_mesh import CoreMesh, Sizes
from tests.identity.conftest import varied_prompts
from tests.unit.worker.native_models import BLOCK_SIZE, load

pytestmark = [pytest.mark.model, pytest.mark.slow]

NUM_OUTPUTS = 32
MAX_DRAFT_TOKENS = 4
VARIED = varied_prompts(49_152)
PROMPTS = [VARIED[index] for index in (3, 5, 9, 15)]  # all but the second are repeated phrases
SCARCE_BLOCKS = 10

SAMPLING = {
    "greedy": [SamplingParams()] * 4,
    "seeded": [SamplingParams(temperature=0.7, top_p=0.9, top_k=40, seed=seed) for seed in range(4)],
}


@pytest.fixture(scope="module", params=["bfloat16", "int8"])
def loaded(model_path, request) -> LoadedModel:
    options = {"kv_dtype": request.param, "kv_cache_gib": 0.03, "speculation": "ngram"}
    return load(model_path, **options, speculation_tokens=MAX_DRAFT_TOKENS)


def generate(
    loaded: LoadedModel, how: str, *, max_draft_tokens: int, num_blocks: int | None = None
) -> tuple[list[list[int]], dict[Handle, list[str]], CoreMesh]:
    """Run all prompts together; return tokens, digests of the logits of each admission, and the mesh."""
    digests: dict[Handle, list[str]] = defaultdict(list)

    def observe(handles, logits) -> None:
        for handle, row in zip(handles, logits, strict=True):
            digests[handle].append(hashlib.sha256(np.ascontiguousarray(row)).hexdigest())

    loaded.runner._observe_logits = observe
    num_blocks = num_blocks or loaded.num_blocks
    sizes = Sizes(block_size=BLOCK_SIZE, num_blocks=num_blocks, max_draft_tokens=max_draft_tokens)
    mesh = CoreMesh(loaded.runner, sizes)
    outputs = mesh.generate(PROMPTS, NUM_OUTPUTS, SAMPLING[how])
    # What run-ahead computed beyond the end belongs to nobody.
    return outputs, {handle: rows[:NUM_OUTPUTS] for handle, rows in digests.items()}, mesh


@pytest.mark.parametrize("how", SAMPLING)
def test_tokens_and_logits_are_the_same_with_guesses_and_steps_are_fewer(loaded, how):
    expected, expected_digests, plain = generate(loaded, how, max_draft_tokens=0)
    outputs, digests, guessing = generate(loaded, how, max_draft_tokens=MAX_DRAFT_TOKENS)
    assert outputs == expected
    assert digests == expected_digests
    assert plain.acceptance == []
    assert len(guessing.acceptance) == MAX_DRAFT_TOKENS
    assert all(accepted <= drafted for drafted, accepted in guessing.acceptance)
    assert guessing.acceptance[0][1] > 0
    assert guessing.num_steps < plain.num_steps


@pytest.mark.parametrize("how", SAMPLING)
def test_tokens_are_the_same_while_requests_preempt_each_other(loaded, how):
    expected, _, _ = generate(loaded, how, max_draft_tokens=0)
    outputs, _, mesh = generate(loaded, how, max_draft_tokens=MAX_DRAFT_TOKENS, num_blocks=SCARCE_BLOCKS)
    assert outputs == expected
    assert mesh.num_preemptions > 0
    assert sum(accepted for _, accepted in mesh.acceptance) > 0
