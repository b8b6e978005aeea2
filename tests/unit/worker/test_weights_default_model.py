"""The default model's file, against the gguf package's own reader."""

import os
from pathlib import Path

import gguf
import pytest
import torch
from gguf import quants

from services.worker.weights import open_checkpoint
from services.worker.weights.memory_plan import plan_memory
from services.worker.weights.tensors import stream_tensors
from tests.model_files import gguf_name, permute_heads

pytestmark = [pytest.mark.model, pytest.mark.slow]

DEFAULT_FILE = "~/.cache/treadle/models/SmolLM2-135M-Instruct/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def path() -> Path:
    return Path(os.environ.get("TREADLE_TEST_MODEL", DEFAULT_FILE)).expanduser()


def test_default_model_is_read_as_what_it_is(path) -> None:
    checkpoint = open_checkpoint(path)

    config = checkpoint.config
    assert checkpoint.name == "SmolLM2-135M-Instruct"
    assert (config.family, config.num_layers, config.hidden_size, config.intermediate_size) == ("llama", 30, 576, 1536)
    assert (config.num_attention_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.tie_word_embeddings, config.max_model_len) == (49152, True, 8192)
    assert config.rope.theta == 100_000.0
    # <|endoftext|> and <|im_end|>.
    assert config.eos_token_ids == (0, 2)
    assert plan_memory(config, torch.bfloat16).weights_bytes == 269_030_016


def test_default_models_tensors_equal_the_packages(path) -> None:
    checkpoint = open_checkpoint(path)
    stored_by_name = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}

    for name, tensor in stream_tensors(checkpoint, torch.float32):
        stored = stored_by_name.pop(gguf_name(name))
        if ".q_proj." in name:
            tensor = permute_heads(tensor, checkpoint.config.num_attention_heads)
        if ".k_proj." in name:
            tensor = permute_heads(tensor, checkpoint.config.num_kv_heads)
        expected = torch.tensor(quants.dequantize(stored.data, stored.tensor_type))
        assert torch.equal(tensor, expected), name

    assert stored_by_name == {}
