"""The default model on the native engine: a request's tokens and logits are the same bits whatever else is going on.

Alone, beside 2, 8 and 32 others; its prompt in chunks of 16, 64 and 512 tokens; cold and after a prefix hit; left in
peace, swapped out and in, and computed again; greedy and seeded; with every format of the KV cache, with activations of
8 and 32 bits as of 16, and with KV blocks of two sizes. Log-probabilities, which the API refuses by name, would be a
function of the logits: the bits of those stand for them.

Every two levels of two factors meet in a cell that is run. ``TREADLE_FULL_MATRIX=1`` runs the whole product.
"""

import itertools
import os

import pytest

from services.worker.config import WorkerConfig
from services.worker.loaded_model import LoadedModel
from tests.identity.crowd import BLOCK_SIZE, Cell, Choice, Interruption, Observed, Prefix, observe
from tests.pairs import pairs
from tests.unit.worker.native_models import load

pytestmark = [pytest.mark.model, pytest.mark.slow]

SETTINGS = {
    "default": {},
    "activations-8": {"activation_bits": 8},
    "activations-32": {"activation_bits": 32},
    "kv-float32": {"kv_dtype": "float32"},
    "kv-int8": {"kv_dtype": "int8"},
    "activations-8-kv-int8": {"activation_bits": 8, "kv_dtype": "int8"},
}
FACTORS = ([0, 2, 8, 32], [16, 64, 512], list(Prefix), list(Interruption), list(Choice))
IS_FULL = os.environ.get("TREADLE_FULL_MATRIX") == "1"
CELLS = [Cell(*levels) for levels in (itertools.product(*FACTORS) if IS_FULL else pairs(*FACTORS))]
CALM_CELLS = [
    Cell(neighbours, chunk, prefix, Interruption.NONE, choice)
    for neighbours, chunk, prefix, choice in pairs([0, 2, 8, 32], [16, 64, 512], list(Prefix), list(Choice))
]
DEFAULT_BLOCK_SIZE = WorkerConfig(listen="unix:/unused", model="m").block_size


@pytest.fixture(scope="module", params=SETTINGS)
def settings(request) -> dict[str, object]:
    sizes = {"kv_cache_gib": 0.1, "swap_space_gib": 0.1, "max_num_batched_tokens": 512}
    return {**sizes, **SETTINGS[request.param]}


@pytest.fixture(scope="module")
def loaded(settings, model_path) -> LoadedModel:
    return load(model_path, block_size=BLOCK_SIZE, **settings)


@pytest.fixture(scope="module")
def loaded_by_default(settings, model_path) -> LoadedModel:
    return load(model_path, block_size=DEFAULT_BLOCK_SIZE, **settings)


@pytest.fixture(scope="module")
def expected(loaded) -> dict[Choice, Observed]:
    """The target alone, cold, its prompt in one chunk, left in peace."""
    return {choice: observe(loaded, Cell(0, 512, Prefix.COLD, Interruption.NONE, choice)) for choice in Choice}


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_tokens_and_logits_do_not_depend_on_anything_but_the_request(loaded, expected, cell):
    assert observe(loaded, cell) == expected[cell.choice]


@pytest.mark.parametrize("cell", CALM_CELLS, ids=str)
def test_tokens_and_logits_do_not_depend_on_the_size_of_blocks(loaded_by_default, expected, cell):
    assert DEFAULT_BLOCK_SIZE != BLOCK_SIZE
    assert observe(loaded_by_default, cell, DEFAULT_BLOCK_SIZE) == expected[cell.choice]
