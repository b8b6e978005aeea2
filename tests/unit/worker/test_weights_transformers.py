"""transformers as the oracle: it reads what the builders write, and the loaders read what it writes."""

import pytest
import torch

from services.worker.model_config import RopeConfig
from services.worker.weights import open_checkpoint
from services.worker.weights.tensors import stream_tensors
from tests.model_files import Weights, random_weights, tiny_config, write_hf_directory

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")

LLAMA3 = RopeConfig(theta=5e5, scaling="llama3", factor=8.0, original_max_position=256)
YARN = RopeConfig(theta=1e6, scaling="yarn", factor=4.0, original_max_position=128)
CONFIGS = {
    "llama": tiny_config("llama"),
    "llama tied": tiny_config("llama", tie_word_embeddings=True),
    "llama with biases": tiny_config(has_qkv_bias=True, has_output_bias=True, has_mlp_bias=True),
    "llama 3 rope": tiny_config("llama", rope=LLAMA3),
    "mistral": tiny_config("mistral"),
    "mistral without window": tiny_config("mistral", sliding_window=None),
    "qwen2": tiny_config("qwen2"),
    "qwen2 with window": tiny_config("qwen2", sliding_window=24),
    "qwen2 yarn": tiny_config("qwen2", rope=YARN),
    "qwen3": tiny_config("qwen3", tie_word_embeddings=True, head_dim=32),
}


def load(directory):
    model, report = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    return model


def weights_of(model) -> Weights:
    return {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}


def unequal_names(found: Weights, expected: Weights) -> list[str]:
    return [name for name in expected if not torch.equal(found[name], expected[name])]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_transformers_reads_what_the_builders_write(tmp_path, config) -> None:
    weights = random_weights(config)

    model = load(write_hf_directory(tmp_path, config, weights))

    assert unequal_names(weights_of(model), weights) == []


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("max_shard_size", ["50GB", "60KB"], ids=["whole", "sharded"])
def test_loader_reads_what_transformers_writes(tmp_path, config, max_shard_size) -> None:
    weights = random_weights(config)
    model = load(write_hf_directory(tmp_path / "built", config, weights))
    model.save_pretrained(tmp_path / "saved", max_shard_size=max_shard_size)

    checkpoint = open_checkpoint(tmp_path / "saved")

    assert (tmp_path / "saved" / "model.safetensors.index.json").exists() == (max_shard_size == "60KB")
    assert checkpoint.config == config
    assert unequal_names(dict(stream_tensors(checkpoint, torch.float32)), weights) == []


def test_transformers_reads_the_builders_tokenizer(tmp_path) -> None:
    config = tiny_config()
    write_hf_directory(tmp_path, config, random_weights(config))

    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)

    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "the thing"}], add_generation_prompt=True, tokenize=False
    )
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert text == "<|im_start|>user\nthe thing<|im_end|>\n<|im_start|>assistant\n"
    assert (len(tokenizer), token_ids[0], token_ids.count(2)) == (config.vocab_size, 1, 1)
    assert tokenizer.decode(token_ids) == text
