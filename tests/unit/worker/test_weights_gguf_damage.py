"""Laws of GGUF files that cannot be used: whatever is wrong is named, and nothing but an EngineError comes out."""

import struct

import numpy as np
import pytest
import torch

from services.common.errors import EngineError, ErrorReason
from services.worker.weights import open_checkpoint
from services.worker.weights.gguf_file import GgufFile
from services.worker.weights.tensors import stream_tensors
from tests.gguf_editing import edit_gguf_file
from tests.model_files import random_weights, tiny_config, write_gguf_file


def write(tmp_path, **changes):
    config = tiny_config(**changes)
    return write_gguf_file(tmp_path / "tiny.gguf", config, random_weights(config))


def refused_message(path) -> str:
    with pytest.raises(EngineError) as refused:
        open_checkpoint(path)
    assert refused.value.reason is ErrorReason.MODEL_LOAD_FAILED
    return refused.value.message


@pytest.mark.parametrize(
    ("fields_to_edit", "problem"),
    [
        ({"general__architecture": "gemma2"}, "the architecture 'gemma2' is not supported; llama, qwen2, qwen3 are"),
        ({"llama__block_count": None}, "lacks the key llama.block_count"),
        ({"llama__block_count": 3}, "lacks the tensors layers.2.input_layernorm.weight"),
        ({"llama__block_count": 2**31 - 1}, "should have 2147483647 layers, but holds only 21 tensors"),
        ({"llama__block_count": 1}, "does not have: layers.1."),
        ({"llama__feed_forward_length": 128}, "layers.0.mlp.gate_proj.weight (is [96, 64], should be [128, 64])"),
        ({"llama__attention__layer_norm_rms_epsilon": None}, "lacks the key llama.attention.layer_norm_rms_epsilon"),
        ({"llama__context_length": "long"}, "'llama.context_length' should be an integer"),
        ({"llama__expert_count": 8}, "mixtures of experts are not supported"),
        ({"llama__rope__dimension_count": 8}, "only 8 of 16 numbers of a head are rotated"),
        ({"llama__attention__value_length": 32}, "16 key and 32 value numbers"),
        (
            {"llama__rope__scaling__type": "longrope"},
            "rope scaling 'longrope' is not supported; none, linear, yarn are",
        ),
        ({"llama__rope__scaling__type": "yarn"}, "lacks the key llama.rope.scaling.factor"),
        ({"llama__attention__head_count": 0}, "num_attention_heads must be at least 1"),
        ({"split__count": 3}, "one of 3 parts; merge them with llama-gguf-split --merge"),
    ],
)
def test_bad_metadata_is_refused_by_name(tmp_path, fields_to_edit, problem) -> None:
    path = edit_gguf_file(write(tmp_path), **fields_to_edit)

    with pytest.raises(EngineError) as refused:
        GgufFile(path)

    assert refused.value.reason is ErrorReason.MODEL_LOAD_FAILED
    assert problem in refused.value.message


def test_file_without_embedding_is_refused(tmp_path) -> None:
    config = tiny_config()
    weights = random_weights(config)
    del weights["embed_tokens.weight"]

    path = write_gguf_file(tmp_path / "adapter.gguf", config, weights)

    assert "lacks the tensor token_embd.weight; it is not a whole model" in refused_message(path)


def test_unknown_tensor_is_named(tmp_path) -> None:
    config = tiny_config()
    path = tmp_path / "tiny.gguf"
    write_gguf_file(path, config, random_weights(config))
    content = path.read_bytes()
    path.write_bytes(content.replace(b"blk.0.ffn_gate.weight", b"blk.0.ffn_fate.weight"))

    message = refused_message(path)
    assert "lacks the tensors layers.0.mlp.gate_proj.weight" in message
    assert "a llama model does not have: blk.0.ffn_fate.weight" in message


def test_unknown_tensor_type_is_refused_with_the_known_ones(tmp_path) -> None:
    path = write(tmp_path)
    content = bytearray(path.read_bytes())
    name = b"blk.0.ffn_gate.weight"
    type_offset = content.index(name) + len(name) + 4 + 2 * 8
    content[type_offset : type_offset + 4] = struct.pack("<I", 99)
    path.write_bytes(content)

    assert "blk.0.ffn_gate.weight has the type 99; supported are F32, F16, Q4_0" in refused_message(path)


def test_rows_that_are_no_whole_blocks_are_refused(tmp_path) -> None:
    path = write(tmp_path)
    content = bytearray(path.read_bytes())
    name = b"blk.0.ffn_gate.weight"
    type_offset = content.index(name) + len(name) + 4 + 2 * 8
    content[type_offset : type_offset + 4] = struct.pack("<I", 12)
    path.write_bytes(content)

    assert "has the shape [96, 64], but rows of Q4_K are multiples of 256" in refused_message(path)


@pytest.mark.parametrize("num_kept", [1, 4, 20, 2_000, 9_000, -1])
def test_truncated_file_is_refused_wherever_it_ends(tmp_path, num_kept) -> None:
    path = write(tmp_path)
    path.write_bytes(path.read_bytes()[:num_kept])

    assert str(path) in refused_message(path)


def test_truncation_in_the_data_says_what_is_missing(tmp_path) -> None:
    path = write(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) - 1000])

    assert "the file is truncated: tensor" in refused_message(path)


def test_damaged_header_gives_a_model_or_a_refusal_never_another_error(tmp_path) -> None:
    path = write(tmp_path, num_layers=1)
    content = path.read_bytes()
    random = np.random.default_rng(0)
    reasons = set()
    for offset in random.integers(0, 1_200, 60):
        damaged = bytearray(content)
        damaged[offset] ^= 1 << random.integers(0, 8)
        path.write_bytes(damaged)
        try:
            open_checkpoint(path)
        except EngineError as error:
            reasons.add(error.reason)

    assert reasons == {ErrorReason.MODEL_LOAD_FAILED}


def test_file_cut_between_opening_and_reading_is_an_engine_error(tmp_path) -> None:
    path = write(tmp_path)
    checkpoint = open_checkpoint(path)
    path.write_bytes(path.read_bytes()[:30_000])

    with pytest.raises(EngineError, match="the file ended early"):
        list(stream_tensors(checkpoint, torch.float32))


def test_big_endian_file_is_refused(tmp_path) -> None:
    path = write(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[:4] + struct.pack(">I", 3) + content[8:])

    assert "is not supported; versions 2 and 3 (little-endian) are" in refused_message(path)
