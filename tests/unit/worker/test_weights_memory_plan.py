"""Laws of the memory plan: exact sizes, and a refusal that says what is missing."""

import pytest
import torch

from services.common.errors import EngineError, ErrorReason
from services.worker.weights import MemoryPlan
from services.worker.weights.layout import expected_tensors
from services.worker.weights.memory_plan import plan_memory
from tests.model_files import random_weights, tiny_config

MIB = 1 << 20


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_tied", [False, True])
def test_plan_counts_exactly_the_bytes_of_the_tensors(family, dtype, is_tied) -> None:
    config = tiny_config(family, tie_word_embeddings=is_tied)

    plan = plan_memory(config, dtype)

    assert plan.weights_bytes == sum(tensor.nbytes for tensor in random_weights(config, dtype=dtype).values())


def test_layout_lists_every_optional_part_of_a_layer() -> None:
    config = tiny_config(has_qkv_bias=True, has_output_bias=True, has_mlp_bias=True, has_qk_norm=True, num_layers=1)

    assert expected_tensors(config) == {
        "embed_tokens.weight": (288, 64),
        "layers.0.input_layernorm.weight": (64,),
        "layers.0.self_attn.q_proj.weight": (64, 64),
        "layers.0.self_attn.q_proj.bias": (64,),
        "layers.0.self_attn.k_proj.weight": (32, 64),
        "layers.0.self_attn.k_proj.bias": (32,),
        "layers.0.self_attn.v_proj.weight": (32, 64),
        "layers.0.self_attn.v_proj.bias": (32,),
        "layers.0.self_attn.o_proj.weight": (64, 64),
        "layers.0.self_attn.o_proj.bias": (64,),
        "layers.0.self_attn.q_norm.weight": (16,),
        "layers.0.self_attn.k_norm.weight": (16,),
        "layers.0.post_attention_layernorm.weight": (64,),
        "layers.0.mlp.gate_proj.weight": (96, 64),
        "layers.0.mlp.gate_proj.bias": (96,),
        "layers.0.mlp.up_proj.weight": (96, 64),
        "layers.0.mlp.up_proj.bias": (96,),
        "layers.0.mlp.down_proj.weight": (64, 96),
        "layers.0.mlp.down_proj.bias": (64,),
        "norm.weight": (64,),
        "lm_head.weight": (288, 64),
    }


def test_kv_block_holds_keys_and_values_of_every_layer() -> None:
    plan = plan_memory(tiny_config(), torch.float32)

    # 2 (key, value) x 2 layers x 2 heads x 16 numbers x 16 positions x 2 bytes.
    assert plan.kv_bytes_per_block(16, torch.bfloat16) == 4096
    assert plan.kv_bytes_per_block(16, torch.float32) == 8192


def test_plan_is_accepted_when_it_just_fits() -> None:
    MemoryPlan(weights_bytes=300 * MIB, peak_extra_bytes=50 * MIB, kv_values_per_token=1).check(350 * MIB)


def test_plan_refuses_and_says_what_is_missing_when_memory_is_short() -> None:
    plan = MemoryPlan(weights_bytes=300 * MIB, peak_extra_bytes=50 * MIB, kv_values_per_token=1)

    with pytest.raises(EngineError) as refused:
        plan.check(250 * MIB)

    assert refused.value.reason is ErrorReason.MODEL_LOAD_FAILED
    assert "needs 350 MiB (300 MiB of weights and 50 MiB beside them)" in refused.value.message
    assert "250 MiB are available, 100 MiB are missing" in refused.value.message
    assert refused.value.metadata["missing_bytes"] == str(100 * MIB)


def test_plan_counts_the_cache_or_the_loading_peak_whichever_is_larger() -> None:
    plan = MemoryPlan(weights_bytes=300 * MIB, peak_extra_bytes=50 * MIB, kv_values_per_token=1)

    plan.check(350 * MIB, kv_cache_bytes=50 * MIB)
    with pytest.raises(EngineError, match="1 MiB are missing"):
        plan.check(350 * MIB, kv_cache_bytes=51 * MIB)
