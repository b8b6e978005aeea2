import pytest
import torch

from scripts.equivalent_weights import off_grid
from services.worker.attention import AttentionMetadata
from services.worker.kv_storage import KVStorage
from services.worker.model_config import ModelConfig
from services.worker.models import build_model
from services.worker.plan import BlockId
from tests.model_files import Weights, random_weights, tiny_config
from treadle_kernels.paged_attention import PagedBatch
from treadle_kernels.paged_attention.batch import PagedRow

TOKENS = [5, 9, 30, 7, 200, 11, 45]


def logits(config: ModelConfig, weights: Weights) -> torch.Tensor:
    model = build_model(config, iter(weights.items()), dtype=torch.float32)
    kv = KVStorage(config, num_blocks=3, block_size=16, dtype=torch.float32)
    batch = PagedBatch((PagedRow(len(TOKENS), len(TOKENS), [BlockId(1)]),), 16, torch.float32, None)
    positions = torch.arange(len(TOKENS))
    return model.compute_logits(
        model.forward(torch.tensor(TOKENS), positions, kv.layers, AttentionMetadata(positions + 16, batch))
    )


def test_equivalent_weights_compute_the_same_and_are_others() -> None:
    config = tiny_config()
    weights = random_weights(config)
    before = {name: tensor.clone() for name, tensor in weights.items()}
    changed = off_grid(weights, config)
    torch.testing.assert_close(logits(config, changed), logits(config, weights), rtol=1e-4, atol=1e-4)
    assert all(torch.equal(weights[name], before[name]) for name in weights)
    matrices = [name for name in weights if name.startswith("layers.") and "norm" not in name]
    assert [name for name in matrices if torch.equal(changed[name], weights[name])] == []


def test_a_model_with_biases_is_refused() -> None:
    config = tiny_config("qwen2")
    with pytest.raises(ValueError, match="without biases"):
        off_grid(random_weights(config), config)
