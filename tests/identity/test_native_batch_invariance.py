"""The default model on the native engine: a request's tokens and logits are the same bits whatever else is going on.

Alone, beside 2 and beside 8 others; prompts in chunks of 16, 64 and 512 tokens; cold and after a prefix hit; greedy and
seeded; with every format of the KV cache, and with activations as one term.
"""

import hashlib
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import pytest

from services.worker.native.runner import NativeRunner
from services.worker.plan import Handle, SamplingParams
from tests.identity.conftest import BLOCK_SIZE, varied_prompts
from tests.unit.worker.native_models import load
from tests.unit.worker.step_driver import GREEDY, StepDriver

pytestmark = [pytest.mark.model, pytest.mark.slow]

NUM_OUTPUTS = 6
NUM_BLOCKS = 200
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, top_k=50, seed=77)
PROMPTS = varied_prompts(49152)
TARGET, NEIGHBOURS = PROMPTS[17], PROMPTS[8:16]  # 64 tokens; two full blocks in common with two of the neighbours


@dataclass(frozen=True)
class Observed:
    """One request's tokens, and a digest of the logits that each was chosen from."""

    token_ids: list[int]
    logits: list[str]


class Observer:
    """Collects digests of logits by handle."""

    def __init__(self, runner: NativeRunner) -> None:
        self.digests: dict[Handle, list[str]] = defaultdict(list)
        runner._observe_logits = self._observe

    def _observe(self, handles, logits) -> None:
        for handle, row in zip(handles, logits, strict=True):
            self.digests[handle].append(hashlib.sha256(np.ascontiguousarray(row)).hexdigest())


SETTINGS = {
    "bfloat16": {"kv_dtype": "bfloat16"},
    "float32": {"kv_dtype": "float32"},
    "int8": {"kv_dtype": "int8"},
    "activations-8": {"activation_bits": 8},
}


@pytest.fixture(scope="module", params=SETTINGS)
def runner(request, model_path) -> NativeRunner:
    return load(model_path, kv_cache_gib=0.15, max_num_batched_tokens=512, **SETTINGS[request.param]).runner


@pytest.fixture(scope="module")
def expected(runner) -> dict[str, Observed]:
    """The target alone, cold, its prompt in one chunk."""
    return {
        name: observe(runner, sampling, num_neighbours=0, chunk=512, is_hit=False)
        for name, sampling in (("greedy", GREEDY), ("seeded", SEEDED))
    }


def observe(runner, sampling: SamplingParams, *, num_neighbours: int, chunk: int, is_hit: bool) -> Observed:
    runner.reset()
    observer = Observer(runner)
    driver = StepDriver(
        runner.execute, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, chunk=chunk, depth=2, has_prefix_cache=is_hit
    )
    if is_hit:
        driver.generate([TARGET], 1)
    target = Handle(driver._next_handle)
    others = NEIGHBOURS[:num_neighbours]
    ways = [sampling, *(SamplingParams(temperature=index % 2, seed=index) for index in range(num_neighbours))]
    token_ids = driver.generate([TARGET, *others], NUM_OUTPUTS, ways)[0]
    assert driver.num_prefix_hit_tokens >= (48 if is_hit else 0)
    return Observed(token_ids, observer.digests[target][:NUM_OUTPUTS])


@pytest.mark.parametrize("how", ["greedy", "seeded"])
@pytest.mark.parametrize("is_hit", [False, True], ids=["cold", "hit"])
@pytest.mark.parametrize("chunk", [16, 64, 512])
@pytest.mark.parametrize("num_neighbours", [0, 2, 8])
def test_tokens_and_logits_do_not_depend_on_anything_but_the_request(
    runner, expected, how, is_hit, chunk, num_neighbours
):
    sampling = GREEDY if how == "greedy" else SEEDED
    found = observe(runner, sampling, num_neighbours=num_neighbours, chunk=chunk, is_hit=is_hit)
    assert found == expected[how]
