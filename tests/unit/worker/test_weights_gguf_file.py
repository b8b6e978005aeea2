"""Laws of GGUF files: the same model as the directory, every type as the package decodes it."""

import math

import pytest
import torch
from gguf import GGMLQuantizationType, quants

from services.worker.model_config import RopeConfig
from services.worker.weights import open_checkpoint
from services.worker.weights.gguf_file import GgufFile
from services.worker.weights.tensors import stream_tensors
from tests.gguf_editing import edit_gguf_file
from tests.model_files import random_weights, tiny_config, write_gguf_file, write_hf_directory

FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]
QUANTISED = ["BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


def write(tmp_path, *, type_name="F32", file_name="tiny.gguf", family="llama", **changes):
    config = tiny_config(family, **changes)
    return write_gguf_file(tmp_path / file_name, config, random_weights(config), type_name=type_name)


def assert_same_tensors(found, expected) -> None:
    assert list(found) == list(expected)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
def test_file_equals_the_directory_of_the_same_weights(tmp_path, family, is_tied, stored) -> None:
    config = tiny_config(family, tie_word_embeddings=is_tied, rms_norm_eps=2.0**-17)
    weights = random_weights(config, dtype=stored)
    directory = open_checkpoint(write_hf_directory(tmp_path / "hf", config, weights))
    type_name = "F32" if stored is torch.float32 else "F16"

    file = open_checkpoint(write_gguf_file(tmp_path / "tiny.gguf", config, weights, type_name=type_name))

    # A GGUF file does not tell Mistral from Llama.
    assert file.config.family == ("llama" if family == "mistral" else family)
    assert {**fields(file.config), "family": family} == fields(directory.config)
    assert_same_tensors(dict(stream_tensors(file, torch.float32)), weights_in_float32(weights))


def fields(config):
    return {name: getattr(config, name) for name in config.__slots__}


def weights_in_float32(weights):
    return {name: tensor.float() for name, tensor in weights.items()}


@pytest.mark.parametrize("type_name", QUANTISED)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_quantised_file_holds_what_the_package_decodes(tmp_path, type_name, family) -> None:
    config = tiny_config(family)
    weights = random_weights(config)
    quantised_type = GGMLQuantizationType[type_name]
    expected = {
        name: tensor
        if tensor.dim() == 1
        else torch.from_numpy(quants.dequantize(quants.quantize(tensor.numpy(), quantised_type), quantised_type))
        for name, tensor in weights.items()
    }

    file = open_checkpoint(write_gguf_file(tmp_path / "tiny.gguf", config, weights, type_name=type_name))

    # Rows are quantised one by one, so the order of rows in the file does not change their values.
    assert_same_tensors(dict(stream_tensors(file, torch.float32)), expected)


def test_tensor_larger_than_the_read_buffer_is_read_whole(tmp_path) -> None:
    config = tiny_config(vocab_size=288 * 40, num_layers=1)
    weights = random_weights(config)
    path = write_gguf_file(tmp_path / "tiny.gguf", config, weights)

    assert weights["lm_head.weight"].nbytes > 2 << 20
    assert_same_tensors(dict(stream_tensors(open_checkpoint(path), torch.float32)), weights)


def test_biases_of_llama_files_are_brought_into_order_like_their_weights(tmp_path) -> None:
    config = tiny_config(has_qkv_bias=True, has_output_bias=True, has_mlp_bias=True)
    weights = random_weights(config)

    file = open_checkpoint(write_gguf_file(tmp_path / "tiny.gguf", config, weights))

    assert (file.config.has_qkv_bias, file.config.has_output_bias, file.config.has_mlp_bias) == (True, True, True)
    assert_same_tensors(dict(stream_tensors(file, torch.float32)), weights)


def test_tensors_are_contiguous_and_of_the_dtype_asked_for(tmp_path) -> None:
    found = dict(stream_tensors(open_checkpoint(write(tmp_path, type_name="Q8_0")), torch.bfloat16))

    assert all(tensor.dtype is torch.bfloat16 and tensor.is_contiguous() for tensor in found.values())


def test_progress_rises_to_the_total(tmp_path) -> None:
    calls = []

    checkpoint = open_checkpoint(write(tmp_path, type_name="Q4_0"))
    list(stream_tensors(checkpoint, torch.float32, lambda done, total: calls.append((done, total))))

    total_bytes = calls[0][1]
    assert calls[0] == (0, total_bytes)
    assert calls[-1] == (total_bytes, total_bytes)
    assert calls == sorted(calls)


def test_weight_version_depends_on_content_not_on_place(tmp_path) -> None:
    version = open_checkpoint(write(tmp_path, file_name="a.gguf")).weight_version

    assert open_checkpoint(write(tmp_path, file_name="b.gguf")).weight_version == version
    assert open_checkpoint(write(tmp_path, file_name="c.gguf", type_name="F16")).weight_version != version


@pytest.mark.parametrize(
    ("file_name", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
        ("qwen2.5-0.5b-instruct-q4_k_m.gguf", "qwen2.5-0.5b-instruct"),
        ("Llama-3.2-1B-IQ4_XS.gguf", "Llama-3.2-1B"),
        ("model-f16.gguf", "model"),
        ("Qwen3-8B.gguf", "Qwen3-8B"),
    ],
)
def test_model_is_named_after_the_file_less_its_format(tmp_path, file_name, name) -> None:
    assert open_checkpoint(write(tmp_path, file_name=file_name)).name == name


def test_rope_freqs_tensor_becomes_the_frequency_factors(tmp_path) -> None:
    factors = (1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0)

    config = open_checkpoint(write(tmp_path, rope=RopeConfig(theta=5e5, freq_factors=factors))).config

    assert config.rope == RopeConfig(theta=5e5, freq_factors=factors)


def test_yarn_keys_become_yarn_rope(tmp_path) -> None:
    rope = RopeConfig(theta=1e6, scaling="yarn", factor=4.0, original_max_position=512)

    config = open_checkpoint(write(tmp_path, family="qwen2", rope=rope)).config

    assert (config.rope, config.max_model_len) == (rope, 2048)


def test_yarn_attention_factor_of_the_file_multiplies_yarns_own(tmp_path) -> None:
    rope = RopeConfig(theta=1e6, scaling="yarn", factor=4.0, original_max_position=512)

    path = edit_gguf_file(write(tmp_path, rope=rope), llama__rope__scaling__attn_factor=0.5)

    assert GgufFile(path).config.rope.attention_factor == 0.5 * (1.0 + 0.1 * math.log(4.0))


def test_linear_rope_is_read_in_both_spellings(tmp_path) -> None:
    path = write(tmp_path, rope=RopeConfig(theta=10_000.0, scaling="linear", factor=4.0))
    old = edit_gguf_file(write(tmp_path, file_name="old.gguf"), llama__rope__scale_linear=4.0)

    expected = RopeConfig(theta=10_000.0, scaling="linear", factor=4.0)
    assert open_checkpoint(path).config.rope == expected
    assert GgufFile(old).config.rope == expected


def test_end_ids_come_from_keys_and_from_well_known_tokens(tmp_path) -> None:
    path = edit_gguf_file(write(tmp_path), tokenizer__ggml__eos_token_id=9, tokenizer__ggml__eot_token_id=11)

    # 0 and 2 are <|endoftext|> and <|im_end|>.
    assert GgufFile(path).config.eos_token_ids == (0, 2, 9, 11)


def test_reading_never_holds_more_than_one_tensor_beside_its_buffers(tmp_path) -> None:
    """The stream is lazy: a tensor is read when it is asked for."""
    done = []
    stream = stream_tensors(open_checkpoint(write(tmp_path)), torch.float32, lambda num_done, _: done.append(num_done))

    name, tensor = next(stream)

    assert (name, tensor.shape) == ("embed_tokens.weight", (288, 64))
    assert done[-1] == math.prod(tensor.shape) * 4
