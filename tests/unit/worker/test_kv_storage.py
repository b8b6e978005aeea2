"""KV memory: its size, its zero null block, and poison."""

import torch

from services.worker.kv_storage import KVStorage, bytes_per_block
from services.worker.model_config import ModelConfig, RopeConfig

CONFIG = ModelConfig(
    family="llama",
    vocab_size=10,
    hidden_size=8,
    intermediate_size=8,
    num_layers=2,
    num_attention_heads=2,
    num_kv_heads=1,
    head_dim=4,
    rms_norm_eps=1e-5,
    rope=RopeConfig(10000.0),
    max_model_len=64,
    tie_word_embeddings=True,
)


def test_block_bytes_equal_what_the_tensors_take():
    storage = KVStorage(CONFIG, num_blocks=5, block_size=3, dtype=torch.bfloat16)
    taken = sum(layer.numel() * layer.element_size() for layer in storage.layers)
    assert taken == 5 * bytes_per_block(CONFIG, 3, torch.bfloat16)


def test_poison_fills_fresh_slots_of_every_layer_but_the_prefix_hit():
    storage = KVStorage(CONFIG, num_blocks=5, block_size=4, dtype=torch.float32, is_poisoned=True)
    storage.poison([3, 1, 4], num_kept_slots=6)
    for layer in storage.layers:
        is_poisoned = layer.isnan().flatten(2).all(-1)
        assert is_poisoned.tolist() == [
            [False] * 4,
            [False, False, True, True],
            [False] * 4,
            [False] * 4,
            [True] * 4,
        ]


def test_poison_does_nothing_when_off():
    storage = KVStorage(CONFIG, num_blocks=5, block_size=4, dtype=torch.float32)
    storage.poison([1, 2])
    assert all(layer.abs().sum() == 0 for layer in storage.layers)
