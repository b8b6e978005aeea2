"""Laws of config.json: old and new spellings, each family's defaults, and clear refusals."""

import json

import pytest

from services.common.errors import EngineError, ErrorReason
from services.worker.model_config import RopeConfig
from services.worker.weights.hf_config import read_hf_config
from tests.model_files import hf_config_fields, tiny_config

ABSENT = object()
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


def read(directory, family="llama", *, generation=None, **changes):
    fields = hf_config_fields(tiny_config(family)) | changes
    present = {key: value for key, value in fields.items() if value is not ABSENT}
    (directory / "config.json").write_text(json.dumps(present))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return read_hf_config(directory)


def refused_message(directory, family="llama", **changes) -> str:
    with pytest.raises(EngineError) as refused:
        read(directory, family, **changes)
    assert refused.value.reason is ErrorReason.MODEL_LOAD_FAILED
    return refused.value.message


def test_head_dim_is_derived_when_absent(tmp_path) -> None:
    assert read(tmp_path, head_dim=ABSENT, hidden_size=48).head_dim == 12


def test_head_dim_of_qwen3_is_128_when_absent(tmp_path) -> None:
    assert read(tmp_path, "qwen3", head_dim=ABSENT).head_dim == 128


@pytest.mark.parametrize(("family", "num_kv_heads"), [("llama", 16), ("mistral", 8), ("qwen2", 16), ("qwen3", 16)])
def test_absent_kv_heads_have_the_familys_default(tmp_path, family, num_kv_heads) -> None:
    config = read(tmp_path, family, num_attention_heads=16, num_key_value_heads=ABSENT)

    assert config.num_kv_heads == num_kv_heads


def test_rope_is_plain_when_nothing_is_said(tmp_path) -> None:
    config = read(tmp_path, rope_theta=ABSENT, rope_scaling=ABSENT)

    assert config.rope == RopeConfig(theta=10_000.0)


@pytest.mark.parametrize("scaling", [None, {"type": "default"}, {"rope_type": "default"}])
def test_rope_is_plain_when_scaling_is_null_or_default(tmp_path, scaling) -> None:
    assert read(tmp_path, rope_theta=5e5, rope_scaling=scaling).rope == RopeConfig(theta=5e5)


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_linear_rope_is_read_in_both_old_spellings(tmp_path, key) -> None:
    config = read(tmp_path, rope_scaling={key: "linear", "factor": 4})

    assert config.rope == RopeConfig(theta=10_000.0, scaling="linear", factor=4.0, original_max_position=512)
    assert config.max_model_len == 512


def test_llama3_rope_is_read_from_rope_scaling(tmp_path) -> None:
    config = read(tmp_path, rope_theta=5e5, rope_scaling={"rope_type": "llama3", **LLAMA3})

    assert config.rope == RopeConfig(
        theta=5e5, scaling="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=256
    )
    assert config.max_model_len == 512


def test_llama3_rope_is_read_from_rope_parameters(tmp_path) -> None:
    parameters = {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}
    old = read(tmp_path, rope_theta=5e5, rope_scaling={"rope_type": "llama3", **LLAMA3})

    assert read(tmp_path, rope_theta=ABSENT, rope_scaling=ABSENT, rope_parameters=parameters) == old


def test_yarn_rope_stretches_the_usable_length(tmp_path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 16, "beta_slow": 2}

    config = read(tmp_path, "qwen2", rope_scaling=scaling)

    assert config.rope == RopeConfig(
        theta=10_000.0, scaling="yarn", factor=4.0, original_max_position=512, beta_fast=16.0, beta_slow=2.0
    )
    assert config.max_model_len == 2048


def test_yarn_rope_keeps_a_declared_length_that_is_stretched_already(tmp_path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "attention_factor": 1.5}

    config = read(tmp_path, rope_scaling=scaling)

    assert (config.max_model_len, config.rope.attention_factor) == (512, 1.5)


@pytest.mark.parametrize("name", ["dynamic", "longrope", "su", "mrope"])
def test_unknown_rope_type_is_refused(tmp_path, name) -> None:
    message = refused_message(tmp_path, rope_scaling={"type": name, "factor": 2.0})

    assert f"rope type '{name}' is not supported; default, linear, llama3, yarn are" in message


@pytest.mark.parametrize("extra", [{"mscale_all_dim": 1.0}, {"truncate": False}])
def test_yarn_variants_that_change_the_angles_are_refused(tmp_path, extra) -> None:
    assert "mscale_all_dim and truncate" in refused_message(
        tmp_path, rope_scaling={"type": "yarn", "factor": 2.0, **extra}
    )


def test_rope_scaling_without_factor_is_refused(tmp_path) -> None:
    assert "rope type 'linear' needs a factor" in refused_message(tmp_path, rope_scaling={"type": "linear"})


@pytest.mark.parametrize(("window", "expected"), [(4096, 4096), (None, None), (ABSENT, 4096)])
def test_mistral_slides_as_its_config_or_class_says(tmp_path, window, expected) -> None:
    assert read(tmp_path, "mistral", sliding_window=window).sliding_window == expected


def test_llama_never_slides(tmp_path) -> None:
    assert read(tmp_path, sliding_window=64).sliding_window is None


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 0}, None),
        ({"use_sliding_window": ABSENT, "sliding_window": 64, "max_window_layers": 0}, None),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, 64),
        ({"use_sliding_window": True, "sliding_window": ABSENT, "max_window_layers": 0}, 4096),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, None),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}, None),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": ABSENT}, None),
        ({"use_sliding_window": True, "sliding_window": 64, "layer_types": ["sliding_attention"] * 2}, 64),
    ],
)
def test_qwen_slides_in_all_layers_or_none(tmp_path, family, changes, expected) -> None:
    assert read(tmp_path, family, **changes).sliding_window == expected


@pytest.mark.parametrize(
    "changes", [{"max_window_layers": 1}, {"layer_types": ["full_attention", "sliding_attention"]}]
)
def test_mixed_sliding_layers_are_refused(tmp_path, changes) -> None:
    message = refused_message(tmp_path, "qwen2", use_sliding_window=True, sliding_window=64, **changes)

    assert "layers with and without a sliding window" in message


def test_biases_follow_the_family(tmp_path) -> None:
    biases = {
        family: (config.has_qkv_bias, config.has_output_bias, config.has_mlp_bias)
        for family in ("llama", "mistral", "qwen2", "qwen3")
        for config in [read(tmp_path, family, attention_bias=True, mlp_bias=True)]
    }

    assert biases == {
        "llama": (True, True, True),
        "mistral": (False, False, False),
        "qwen2": (True, False, False),
        "qwen3": (True, True, False),
    }


def test_end_ids_of_both_files_are_joined(tmp_path) -> None:
    config = read(tmp_path, eos_token_id=7, generation={"eos_token_id": [9, 7, 8]})

    assert config.eos_token_ids == (7, 8, 9)


def test_end_ids_may_be_a_list_or_absent(tmp_path) -> None:
    assert read(tmp_path, eos_token_id=[5, 4]).eos_token_ids == (4, 5)
    assert read(tmp_path, eos_token_id=None).eos_token_ids == ()


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8"])
def test_quantised_weights_are_refused(tmp_path, method) -> None:
    assert f"weights quantised by '{method}' are not supported" in refused_message(
        tmp_path, quantization_config={"quant_method": method}
    )


def test_unknown_architecture_is_refused_with_the_known_ones(tmp_path) -> None:
    message = refused_message(tmp_path, architectures=["GPT2LMHeadModel"])

    assert "GPT2LMHeadModel is not supported; supported are LlamaForCausalLM, MistralForCausalLM" in message


@pytest.mark.parametrize("architectures", [ABSENT, []])
def test_missing_architecture_is_refused(tmp_path, architectures) -> None:
    assert "architectures is missing" in refused_message(tmp_path, architectures=architectures)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"hidden_size": ABSENT}, "hidden_size is missing"),
        ({"hidden_size": "64"}, 'hidden_size should be an integer, is "64"'),
        ({"hidden_size": True}, "hidden_size should be an integer, is true"),
        ({"rms_norm_eps": []}, "rms_norm_eps should be a number, is []"),
        ({"rope_scaling": {"type": 3}}, "rope_scaling.type should be a string, is 3"),
        ({"rope_scaling": "yarn"}, 'rope_scaling should be an object, is "yarn"'),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings should be true or false, is 1"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id should be an integer or a list of integers"),
        ({"architectures": "LlamaForCausalLM"}, "architectures should be a list of strings"),
        ({"num_key_value_heads": 3}, "3 must divide 4 query heads"),
        ({"num_attention_heads": 0}, "num_attention_heads must be at least 1"),
    ],
)
def test_bad_value_is_refused_by_name(tmp_path, changes, problem) -> None:
    assert problem in refused_message(tmp_path, **changes)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff"])
def test_config_that_is_no_json_object_is_refused(tmp_path, text) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))

    with pytest.raises(EngineError, match=r"config\.json: (cannot be read as JSON|should hold a JSON object)"):
        read_hf_config(tmp_path)
