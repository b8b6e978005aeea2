"""Greedy output of the default model in float32 equals ``transformers.generate``, token by token.

The same for every way to get there: alone or batched, chunks of 16 or 512, with or without a prefix hit, one plan or
two plans deep.
"""

import pytest

from tests.identity.conftest import BLOCK_SIZE, NUM_BLOCKS, Identity
from tests.unit.worker.step_driver import StepDriver

pytestmark = [pytest.mark.model, pytest.mark.slow]


def make_driver(identity: Identity, **options) -> StepDriver:
    return StepDriver(identity.make_runner().execute, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, **options)


def check(identity: Identity, outputs: list[list[int]], prompts: range) -> None:
    """Require equal tokens; the message shows where they part and how close the reference's choice was."""
    for index, output in zip(prompts, outputs, strict=True):
        expected = identity.expected[index]
        if output != expected:
            at = next(place for place, (ours, its) in enumerate(zip(output, expected, strict=True)) if ours != its)
            lead = identity.leads[index][at]
            pytest.fail(f"prompt {index}: token {at} is {output[at]}, not {expected[at]} (the lead was {lead:.6f})")


@pytest.mark.parametrize(("chunk", "depth"), [(16, 1), (512, 2)])
def test_batched_tokens_equal_the_references(identity, chunk, depth):
    driver = make_driver(identity, chunk=chunk, depth=depth)
    check(identity, driver.generate(identity.prompts, 64), range(20))


@pytest.mark.parametrize(("chunk", "depth"), [(16, 2), (512, 1)])
def test_tokens_of_a_prompt_alone_equal_the_references(identity, chunk, depth):
    driver = make_driver(identity, chunk=chunk, depth=depth)
    chosen = range(0, 20, 2) if depth == 1 else range(1, 20, 2)
    outputs = [driver.generate([identity.prompts[index]], 64)[0] for index in chosen]
    check(identity, outputs, chosen)


@pytest.mark.parametrize(("chunk", "depth"), [(16, 2), (512, 1)])
def test_tokens_after_a_prefix_hit_equal_the_references(identity, chunk, depth):
    driver = make_driver(identity, chunk=chunk, depth=depth, has_prefix_cache=True)
    driver.generate(identity.prompts[10:11], 1)
    check(identity, driver.generate(identity.prompts[11:20], 64), range(11, 20))
    assert driver.num_prefix_hit_tokens == 3 * BLOCK_SIZE
