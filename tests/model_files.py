"""Builds tiny models with random weights on disk, as Hugging Face directories and as GGUF files.

Everybody's tests use these. A model is a ``ModelConfig`` (``tiny_config``) and its weights (``random_weights``); both
writers take the two, so that one model can be written in both formats. The tokenizer has byte-level BPE over 288
tokens with ChatML's special ones, so any text can be encoded. Nothing here imports transformers, which takes seconds;
``tests/unit/worker/test_weights_transformers.py`` shows that transformers reads these directories as the same models.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from safetensors.torch import save_file

from services.worker.model_config import ModelConfig, ModelFamily, RopeConfig
from services.worker.weights.layout import expected_tensors

Weights = dict[str, torch.Tensor]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TEXT_ID, TURN_START_ID, TURN_END_ID = 0, 1, 2
_MERGES = (
    *("Ġ t", "h e", "Ġ a", "i n", "Ġt he", "r e", "o n", "e r", "Ġ s", "Ġ w", "a t", "e n", "Ġ o", "i s", "o r"),
    *("Ġ c", "e s", "n d", "Ġ b", "Ġ f", "in g", "Ġa nd", "a l", "i t", "Ġ in", "e d", "o u", "Ġ m", "a r"),
)
VOCAB_SIZE = len(SPECIAL_TOKENS) + 256 + len(_MERGES)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_ARCHITECTURE_BY_FAMILY = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_GGUF_NAME_BY_PART = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_config(family: ModelFamily = "llama", **changes: Any) -> ModelConfig:
    """A model of two layers, 64 wide, with two query heads to a key head; ``changes`` are fields of ModelConfig."""
    config = ModelConfig(
        family=family,
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_attention_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=10_000.0),
        max_model_len=512,
        tie_word_embeddings=False,
        has_qkv_bias=family == "qwen2",
        has_qk_norm=family == "qwen3",
        sliding_window=24 if family == "mistral" else None,
        eos_token_ids=(END_OF_TEXT_ID, TURN_END_ID),
        bos_token_id=TURN_START_ID,
    )
    return replace(config, **changes)


def random_weights(config: ModelConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Weights:
    """Weights that keep activations near unit size, so that greedy choices are clear-cut; equal for equal arguments."""
    generator = torch.Generator().manual_seed(seed)
    weights: Weights = {}
    for name, shape in expected_tensors(config).items():
        noise = torch.randn(shape, generator=generator)
        if "norm" in name:
            weights[name] = (1 + noise / 10).to(dtype)
        elif name == "embed_tokens.weight" or name.endswith(".bias"):
            weights[name] = noise.to(dtype)
        else:
            weights[name] = (noise / math.sqrt(shape[-1])).to(dtype)
    return weights


def write_hf_directory(directory: Path, config: ModelConfig, weights: Weights, *, num_shards: int = 1) -> Path:
    """Write config.json, generation_config.json, tokenizer files and safetensors (with an index, when sharded)."""
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", hf_config_fields(config))
    _write_json(
        directory / "generation_config.json",
        {"eos_token_id": list(config.eos_token_ids), "bos_token_id": config.bos_token_id},
    )
    write_tokenizer(directory)
    tensor_by_name = {name if name == "lm_head.weight" else f"model.{name}": t for name, t in weights.items()}
    if num_shards == 1:
        save_file(tensor_by_name, directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    shard_by_name: dict[str, str] = {}
    names = list(tensor_by_name)
    for number in range(num_shards):
        shard = f"model-{number + 1:05d}-of-{num_shards:05d}.safetensors"
        # Dealt out like cards, so that every layer is spread over the shards.
        part = {name: tensor_by_name[name] for name in names[number::num_shards]}
        save_file(part, directory / shard, metadata={"format": "pt"})
        shard_by_name.update(dict.fromkeys(part, shard))
    total_bytes = sum(tensor.nbytes for tensor in weights.values())
    _write_json(
        directory / "model.safetensors.index.json",
        {"metadata": {"total_size": total_bytes}, "weight_map": shard_by_name},
    )
    return directory


def hf_config_fields(config: ModelConfig) -> dict[str, Any]:
    """The content of config.json, in the spelling of transformers 4."""
    fields: dict[str, Any] = {
        "architectures": [_ARCHITECTURE_BY_FAMILY[config.family]],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": _hf_rope_scaling(config.rope),
        "max_position_embeddings": config.max_model_len,
        "tie_word_embeddings": config.tie_word_embeddings,
        "eos_token_id": config.eos_token_ids[0],
        "bos_token_id": config.bos_token_id,
        "torch_dtype": "float32",
    }
    if config.family in ("llama", "qwen3"):
        fields["attention_bias"] = config.has_output_bias
    if config.family == "llama":
        fields["mlp_bias"] = config.has_mlp_bias
    if config.family == "mistral":
        fields["sliding_window"] = config.sliding_window
    if config.family in ("qwen2", "qwen3"):
        slides = config.sliding_window is not None
        fields |= {"use_sliding_window": slides, "sliding_window": config.sliding_window, "max_window_layers": 0}
    return fields


def _hf_rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.scaling == "none":
        return None
    fields: dict[str, Any] = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.original_max_position is not None:
        fields["original_max_position_embeddings"] = rope.original_max_position
    if rope.scaling == "llama3":
        fields |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.scaling == "yarn":
        fields |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
    return fields


def write_gguf_file(path: Path, config: ModelConfig, weights: Weights, *, type_name: str = "F32") -> Path:
    """Write a GGUF file whose matrices have the given ggml type (any that ``gguf.quants`` can quantise to)."""
    architecture = "llama" if config.family == "mistral" else config.family
    writer = gguf.GGUFWriter(path, architecture)
    _add_gguf_metadata(writer, config)
    _add_gguf_tokenizer(writer, config)
    matrix_type = GGMLQuantizationType[type_name]
    if config.rope.freq_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(config.rope.freq_factors, dtype=np.float32))
    for name, tensor in weights.items():
        values = tensor.float()
        if architecture == "llama" and ".q_proj." in name:
            values = permute_heads(values, config.num_attention_heads)
        if architecture == "llama" and ".k_proj." in name:
            values = permute_heads(values, config.num_kv_heads)
        tensor_type = matrix_type if values.dim() > 1 else GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), quants.quantize(values.numpy(), tensor_type), raw_dtype=tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    """The name that a GGUF file gives to a tensor."""
    part, _, kind = name.rpartition(".")
    if not part.startswith("layers."):
        return f"{_GGUF_NAME_BY_PART[part]}.{kind}"
    _, layer, layer_part = part.split(".", 2)
    return f"blk.{layer}.{_GGUF_NAME_BY_PART[layer_part]}.{kind}"


def permute_heads(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Interleave the two halves of each head's rows, as converters to GGUF do for the llama architecture."""
    halves = tensor.reshape(num_heads, 2, -1, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape).contiguous()


def _add_gguf_metadata(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    writer.add_name("Tiny")
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_model_len)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    if config.sliding_window is not None:
        writer.add_sliding_window(config.sliding_window)
    if config.rope.scaling != "none":
        writer.add_rope_scaling_type(gguf.RopeScalingType(config.rope.scaling))
        writer.add_rope_scaling_factor(config.rope.factor)
        if config.rope.original_max_position is not None:
            writer.add_rope_scaling_orig_ctx_len(config.rope.original_max_position)


def _add_gguf_tokenizer(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    token_type = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(list(_vocabulary()))
    writer.add_token_types(
        [token_type.CONTROL if token in SPECIAL_TOKENS else token_type.NORMAL for token in _vocabulary()]
    )
    writer.add_token_merges(list(_MERGES))
    writer.add_eos_token_id(config.eos_token_ids[-1])
    if config.bos_token_id is not None:
        writer.add_bos_token_id(config.bos_token_id)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def write_tokenizer(directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: token_id for token_id, token in enumerate(_vocabulary())}
    merges = [(left, right) for left, right in (merge.split(" ") for merge in _MERGES)]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL_TOKENS[TURN_START_ID],
            "eos_token": SPECIAL_TOKENS[TURN_END_ID],
            "unk_token": SPECIAL_TOKENS[END_OF_TEXT_ID],
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _vocabulary() -> tuple[str, ...]:
    """Special tokens, the 256 bytes in GPT-2's printable spelling, and the merged pairs; the index is the id."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    num_others = 256 - len(printable)
    byte_tokens = [*map(chr, printable), *(chr(256 + index) for index in range(num_others))]
    return (*SPECIAL_TOKENS, *byte_tokens, *(merge.replace(" ", "") for merge in _MERGES))


def _write_json(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2), encoding="utf-8")
