"""Laws of Hugging Face directories: every family and layout reads back exactly; what is wrong is named."""

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.common.errors import EngineError, ErrorReason
from services.worker.weights import open_checkpoint
from services.worker.weights.tensors import stream_tensors
from tests.model_files import random_weights, tiny_config, write_hf_directory

FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]


def refused_message(directory) -> str:
    with pytest.raises(EngineError) as refused:
        open_checkpoint(directory)
    assert refused.value.reason is ErrorReason.MODEL_LOAD_FAILED
    assert str(directory) in refused.value.message
    return refused.value.message


def assert_same_tensors(found, expected) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def rewrite_weights(directory, change) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.fixture
def directory(tmp_path):
    config = tiny_config()
    return write_hf_directory(tmp_path / "Tiny-Model", config, random_weights(config))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("is_tied", [False, True])
def test_directory_reads_back_config_and_weights(tmp_path, family, num_shards, is_tied) -> None:
    config = tiny_config(family, tie_word_embeddings=is_tied)
    weights = random_weights(config)

    checkpoint = open_checkpoint(write_hf_directory(tmp_path, config, weights, num_shards=num_shards))

    assert checkpoint.config == config
    assert_same_tensors(dict(stream_tensors(checkpoint, torch.float32)), weights)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.float16, torch.bfloat16])
def test_directory_converts_to_the_dtype_asked_for(tmp_path, stored, wanted) -> None:
    config = tiny_config()
    weights = random_weights(config, dtype=stored)

    checkpoint = open_checkpoint(write_hf_directory(tmp_path, config, weights))

    expected = {name: tensor.to(wanted) for name, tensor in weights.items()}
    found = dict(stream_tensors(checkpoint, wanted))
    assert {tensor.dtype for tensor in found.values()} == {wanted}
    assert_same_tensors(found, expected)


def test_tensors_stay_valid_when_the_file_is_overwritten(directory) -> None:
    expected = random_weights(tiny_config())
    found = dict(stream_tensors(open_checkpoint(directory), torch.float32))

    with (directory / "model.safetensors").open("r+b") as file:
        file.write(bytes(100_000))

    assert_same_tensors(found, expected)


def test_every_optional_bias_is_read_when_config_says_so(tmp_path) -> None:
    config = tiny_config(has_qkv_bias=True, has_output_bias=True, has_mlp_bias=True)
    weights = random_weights(config)

    checkpoint = open_checkpoint(write_hf_directory(tmp_path, config, weights))

    assert checkpoint.config == config
    assert_same_tensors(dict(stream_tensors(checkpoint, torch.float32)), weights)


def test_head_is_ignored_when_embeddings_are_tied(tmp_path) -> None:
    config = tiny_config(tie_word_embeddings=True)
    weights = random_weights(tiny_config())

    checkpoint = open_checkpoint(write_hf_directory(tmp_path, config, weights))

    assert "lm_head.weight" not in dict(stream_tensors(checkpoint, torch.float32))


def test_stored_rotary_frequencies_are_ignored(directory) -> None:
    rewrite_weights(directory, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))

    assert len(dict(stream_tensors(open_checkpoint(directory), torch.float32))) == 21


def test_progress_rises_to_the_total(directory) -> None:
    calls = []
    total_bytes = sum(tensor.nbytes for tensor in random_weights(tiny_config()).values())

    list(stream_tensors(open_checkpoint(directory), torch.bfloat16, lambda done, total: calls.append((done, total))))

    assert calls[0] == (0, total_bytes)
    assert calls[-1] == (total_bytes, total_bytes)
    assert calls == sorted(calls)


def test_model_is_named_after_its_directory(directory) -> None:
    assert open_checkpoint(directory).name == "Tiny-Model"


def test_model_in_the_hubs_cache_is_named_after_the_repository(tmp_path) -> None:
    config = tiny_config()
    snapshot = tmp_path / "models--owner--Small-Model-1B" / "snapshots" / "0123abcd"

    assert open_checkpoint(write_hf_directory(snapshot, config, random_weights(config))).name == "Small-Model-1B"


def test_weight_version_depends_on_content_not_on_place(tmp_path) -> None:
    config = tiny_config()
    versions = [
        open_checkpoint(write_hf_directory(tmp_path / name, config, random_weights(config, seed=seed))).weight_version
        for name, seed in [("a", 1), ("b", 1), ("c", 2)]
    ]

    assert versions[0] == versions[1] != versions[2]
    assert len(versions[0]) == 16


def test_missing_and_surplus_and_misshapen_tensors_are_all_named(directory) -> None:
    def damage(tensors) -> None:
        del tensors["model.norm.weight"]
        tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(2)
        tensors["model.layers.1.self_attn.k_proj.weight"] = torch.zeros(32, 63)

    rewrite_weights(directory, damage)

    message = refused_message(directory)
    assert "lacks the tensors norm.weight" in message
    assert "a llama model does not have: layers.7.mlp.up_proj.weight" in message
    assert "layers.1.self_attn.k_proj.weight (is [32, 63], should be [32, 64])" in message


def test_head_is_missed_when_embeddings_are_not_tied(directory) -> None:
    rewrite_weights(directory, lambda tensors: tensors.pop("lm_head.weight"))

    assert "lacks the tensors lm_head.weight" in refused_message(directory)


def test_tensor_of_another_dtype_is_refused(directory) -> None:
    rewrite_weights(directory, lambda t: t.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}))

    assert "model.norm.weight has the type I8; F32, F16, BF16 are supported" in refused_message(directory)


@pytest.mark.parametrize("num_bytes", [0, 7, 100, 50_000])
def test_truncated_file_is_refused(directory, num_bytes) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:num_bytes])

    assert "is not a whole safetensors file" in refused_message(directory)


def test_file_with_a_damaged_header_is_refused(directory) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 20) + b"{not json at all....")

    assert "is not a whole safetensors file" in refused_message(directory)


def test_file_that_vanishes_between_opening_and_reading_is_an_engine_error(directory) -> None:
    checkpoint = open_checkpoint(directory)
    (directory / "model.safetensors").unlink()

    with pytest.raises(EngineError, match="changed since it was opened"):
        list(stream_tensors(checkpoint, torch.float32))


def test_missing_shard_is_named(tmp_path) -> None:
    config = tiny_config()
    write_hf_directory(tmp_path, config, random_weights(config), num_shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()

    assert "lacks the shards model-00002-of-00003.safetensors" in refused_message(tmp_path)


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/passwd", "weights.bin"])
def test_index_that_names_anything_but_safetensors_beside_it_is_refused(tmp_path, shard) -> None:
    config = tiny_config()
    write_hf_directory(tmp_path, config, random_weights(config), num_shards=2)
    index_path = tmp_path / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    index["weight_map"]["model.norm.weight"] = shard
    index_path.write_text(json.dumps(index))

    assert f"not safetensors beside it: {shard}" in refused_message(tmp_path)


def test_pickled_weights_are_refused_with_advice(directory) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")

    assert "pytorch_model.bin can run code and is never read, convert it to safetensors" in refused_message(directory)
