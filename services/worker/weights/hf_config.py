"""Turns the config.json of a Hugging Face directory into a ModelConfig.

A key that is absent has the default of the family's configuration class in huggingface/transformers, because that
library leaves such keys out. What would change the arithmetic in a way that no model module implements is refused.
"""

from pathlib import Path

from services.worker.model_config import ModelConfig, ModelFamily, RopeConfig, RopeScaling
from services.worker.weights.context_length import usable_length
from services.worker.weights.json_object import JsonObject
from services.worker.weights.refusal import listed, refusal

FAMILY_BY_ARCHITECTURE: dict[str, ModelFamily] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_SCALING_BY_NAME: dict[str, RopeScaling] = {
    "default": "none",
    "linear": "linear",
    "llama3": "llama3",
    "yarn": "yarn",
}
_DEFAULT_EPSILON = 1e-6
_DEFAULT_THETA = 10_000.0
_MISTRAL_SLIDING_WINDOW = 4096
_MISTRAL_NUM_KV_HEADS = 8
_QWEN_SLIDING_WINDOW = 4096
_QWEN_MAX_WINDOW_LAYERS = 28
_QWEN3_HEAD_DIM = 128


def read_hf_config(directory: Path) -> ModelConfig:
    """Read config.json and, where there is one, generation_config.json.

    Raises:
        EngineError: MODEL_LOAD_FAILED, when a key is missing, of the wrong type, or asks for what is not supported.
    """
    fields = JsonObject.read(directory / "config.json")
    family = _read_family(fields)
    _refuse_unsupported(fields)
    num_heads = fields.required_integer("num_attention_heads")
    hidden_size = fields.required_integer("hidden_size")
    has_attention_bias = fields.boolean("attention_bias") or False
    default_num_kv_heads = (
        _MISTRAL_NUM_KV_HEADS if family == "mistral" and "num_key_value_heads" not in fields else None
    )
    default_head_dim = _QWEN3_HEAD_DIM if family == "qwen3" else hidden_size // max(num_heads, 1)
    rope = _read_rope(fields)
    return ModelConfig(
        family=family,
        vocab_size=fields.required_integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.required_integer("intermediate_size"),
        num_layers=fields.required_integer("num_hidden_layers"),
        num_attention_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads") or default_num_kv_heads or num_heads,
        head_dim=fields.integer("head_dim") or default_head_dim,
        rms_norm_eps=fields.number("rms_norm_eps") or _DEFAULT_EPSILON,
        rope=rope,
        max_model_len=usable_length(rope, fields.required_integer("max_position_embeddings")),
        tie_word_embeddings=fields.boolean("tie_word_embeddings") or False,
        has_qkv_bias=family == "qwen2" or (family in ("llama", "qwen3") and has_attention_bias),
        has_output_bias=family in ("llama", "qwen3") and has_attention_bias,
        has_mlp_bias=family == "llama" and (fields.boolean("mlp_bias") or False),
        has_qk_norm=family == "qwen3",
        sliding_window=_read_sliding_window(fields, family),
        eos_token_ids=_read_eos_token_ids(directory, fields),
        bos_token_id=fields.integer("bos_token_id"),
    )


def _read_family(fields: JsonObject) -> ModelFamily:
    architectures = fields.strings("architectures")
    for architecture in architectures:
        if architecture in FAMILY_BY_ARCHITECTURE:
            return FAMILY_BY_ARCHITECTURE[architecture]
    found = (
        f"the architecture {listed(architectures)} is not supported" if architectures else "architectures is missing"
    )
    raise refusal(fields.path, f"{found}; supported are {', '.join(FAMILY_BY_ARCHITECTURE)}")


def _refuse_unsupported(fields: JsonObject) -> None:
    if (quantization := fields.child("quantization_config")) is not None:
        method = quantization.string("quant_method") or "unknown"
        raise refusal(
            fields.path, f"weights quantised by {method!r} are not supported; use the original weights or a GGUF file"
        )
    activation = fields.string("hidden_act") or "silu"
    if activation != "silu":
        raise refusal(fields.path, f"hidden_act {activation!r} is not supported; 'silu' is")
    rotated_share = fields.number("partial_rotary_factor")
    if rotated_share not in (None, 1.0):
        raise refusal(fields.path, f"partial_rotary_factor {rotated_share} is not supported; heads are rotated wholly")


def _read_rope(fields: JsonObject) -> RopeConfig:
    """Read ``rope_parameters`` (transformers 5) or ``rope_theta`` with ``rope_scaling`` (before)."""
    parameters = fields.child("rope_parameters") or fields.child("rope_scaling") or JsonObject(fields.path, {})
    theta = parameters.number("rope_theta") or fields.number("rope_theta") or _DEFAULT_THETA
    name = parameters.string("rope_type") or parameters.string("type") or "default"
    if name not in _SCALING_BY_NAME:
        raise refusal(fields.path, f"rope type {name!r} is not supported; {', '.join(_SCALING_BY_NAME)} are")
    scaling = _SCALING_BY_NAME[name]
    if scaling == "none":
        return RopeConfig(theta=theta)
    if parameters.number("mscale_all_dim") is not None or parameters.boolean("truncate") is False:
        raise refusal(fields.path, "the yarn parameters mscale_all_dim and truncate = false are not supported")
    factor = parameters.number("factor")
    if factor is None:
        raise refusal(fields.path, f"rope type {name!r} needs a factor")
    original = parameters.integer("original_max_position_embeddings")
    return RopeConfig(
        theta=theta,
        scaling=scaling,
        factor=factor,
        low_freq_factor=parameters.number("low_freq_factor") or 1.0,
        high_freq_factor=parameters.number("high_freq_factor") or 4.0,
        original_max_position=original or fields.integer("max_position_embeddings"),
        beta_fast=parameters.number("beta_fast") or 32.0,
        beta_slow=parameters.number("beta_slow") or 1.0,
        attention_factor=parameters.number("attention_factor"),
    )


def _read_sliding_window(fields: JsonObject, family: ModelFamily) -> int | None:
    if family == "llama":
        return None
    if family == "mistral":
        return fields.integer("sliding_window") if "sliding_window" in fields else _MISTRAL_SLIDING_WINDOW
    if not fields.boolean("use_sliding_window"):
        return None
    window = fields.integer("sliding_window") if "sliding_window" in fields else _QWEN_SLIDING_WINDOW
    if window is None or not _has_sliding_layers(fields):
        return None
    return window


def _has_sliding_layers(fields: JsonObject) -> bool:
    """Tell whether all of a Qwen's layers slide (True) or none (False).

    Raises:
        EngineError: MODEL_LOAD_FAILED, when some do and some do not.
    """
    kinds = set(fields.strings("layer_types"))
    if not kinds:
        first_sliding = fields.integer("max_window_layers")
        if first_sliding is None:
            first_sliding = _QWEN_MAX_WINDOW_LAYERS
        if first_sliding > 0:
            kinds.add("full_attention")
        if first_sliding < fields.required_integer("num_hidden_layers"):
            kinds.add("sliding_attention")
    if kinds not in ({"full_attention"}, {"sliding_attention"}):
        raise refusal(fields.path, "layers with and without a sliding window in one model are not supported")
    return "sliding_attention" in kinds


def _read_eos_token_ids(directory: Path, fields: JsonObject) -> tuple[int, ...]:
    """Join the ids of both files: chat models often name their end of turn in generation_config.json only."""
    ids = set(fields.integers("eos_token_id"))
    generation_path = directory / "generation_config.json"
    if generation_path.is_file():
        ids.update(JsonObject.read(generation_path).integers("eos_token_id"))
    return tuple(sorted(ids))
