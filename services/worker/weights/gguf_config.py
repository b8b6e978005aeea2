"""Turns the metadata of a GGUF file into a ModelConfig.

Keys as in the GGUF specification (ggml-org/ggml, docs/gguf.md); what they mean to a model as in ggml-org/llama.cpp,
``src/llama-model.cpp`` and ``convert_hf_to_gguf.py``.
"""

import math
from collections.abc import Collection

from services.common.gguf_metadata import GgufMetadata
from services.worker.model_config import ModelConfig, ModelFamily, RopeConfig, RopeScaling
from services.worker.weights.context_length import usable_length
from services.worker.weights.refusal import refusal

# Mistral's files call themselves llama: the architectures are the same.
FAMILY_BY_ARCHITECTURE: dict[str, ModelFamily] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}

_END_ID_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
# Files often name only one end token while chat templates use another; llama.cpp finds the rest by text, as here.
_END_TOKENS = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<EOT>"}
)


def read_gguf_config(
    metadata: GgufMetadata, tensor_names: Collection[str], vocab_size: int, freq_factors: tuple[float, ...] | None
) -> ModelConfig:
    """Read the configuration.

    Args:
        metadata: The open file.
        tensor_names: Names in the file; they tell which optional parts (biases, norms, head) the model has.
        vocab_size: Rows of the embedding; the metadata may lack it.
        freq_factors: Content of ``rope_freqs.weight``, where the file has it.

    Raises:
        EngineError: MODEL_LOAD_FAILED, when a key is missing, of the wrong type, or asks for what is not supported.
    """
    return _GgufConfigReader(metadata).read(tensor_names, vocab_size, freq_factors)


class _GgufConfigReader:
    def __init__(self, metadata: GgufMetadata) -> None:
        self._metadata = metadata
        self._architecture = self._read_architecture()

    def read(
        self, tensor_names: Collection[str], vocab_size: int, freq_factors: tuple[float, ...] | None
    ) -> ModelConfig:
        metadata = self._metadata
        num_heads = self._size("attention.head_count")
        hidden_size = self._size("embedding_length")
        head_dim = self._optional_size("attention.key_length") or hidden_size // max(num_heads, 1)
        self._refuse_unsupported(head_dim)
        epsilon = metadata.floating(self._key("attention.layer_norm_rms_epsilon"))
        if epsilon is None:
            raise self._lacks("attention.layer_norm_rms_epsilon")
        rope = self._read_rope(freq_factors)
        return ModelConfig(
            family=FAMILY_BY_ARCHITECTURE[self._architecture],
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=self._size("feed_forward_length"),
            num_layers=self._size("block_count"),
            num_attention_heads=num_heads,
            num_kv_heads=self._optional_size("attention.head_count_kv") or num_heads,
            head_dim=head_dim,
            rms_norm_eps=epsilon,
            rope=rope,
            max_model_len=usable_length(rope, self._size("context_length")),
            tie_word_embeddings="output.weight" not in tensor_names,
            has_qkv_bias="blk.0.attn_q.bias" in tensor_names,
            has_output_bias="blk.0.attn_output.bias" in tensor_names,
            has_mlp_bias="blk.0.ffn_gate.bias" in tensor_names,
            has_qk_norm="blk.0.attn_q_norm.weight" in tensor_names,
            sliding_window=self._optional_size("attention.sliding_window") or None,
            eos_token_ids=self._read_end_ids(),
            bos_token_id=metadata.integer("tokenizer.ggml.bos_token_id"),
        )

    def _read_architecture(self) -> str:
        architecture = self._metadata.string("general.architecture")
        if architecture is None:
            raise refusal(self._metadata.path, "the file does not say its architecture (key general.architecture)")
        if architecture not in FAMILY_BY_ARCHITECTURE:
            supported = ", ".join(FAMILY_BY_ARCHITECTURE)
            raise refusal(self._metadata.path, f"the architecture {architecture!r} is not supported; {supported} are")
        return architecture

    def _refuse_unsupported(self, head_dim: int) -> None:
        path = self._metadata.path
        if self._optional_size("expert_count"):
            raise refusal(path, "mixtures of experts are not supported")
        value_length = self._optional_size("attention.value_length")
        if value_length not in (None, head_dim):
            raise refusal(path, f"heads have {head_dim} key and {value_length} value numbers; they must be equal")
        rotated = self._optional_size("rope.dimension_count")
        if rotated not in (None, head_dim):
            raise refusal(path, f"only {rotated} of {head_dim} numbers of a head are rotated; all must be")

    def _read_rope(self, freq_factors: tuple[float, ...] | None) -> RopeConfig:
        metadata = self._metadata
        name = metadata.string(self._key("rope.scaling.type")) or "none"
        factor = metadata.floating(self._key("rope.scaling.factor"))
        legacy_factor = metadata.floating(self._key("rope.scale_linear"))
        if factor is None and legacy_factor is not None:
            name, factor = "linear", legacy_factor
        scalings: dict[str, RopeScaling] = {"none": "none", "linear": "linear", "yarn": "yarn"}
        if name not in scalings:
            raise refusal(metadata.path, f"rope scaling {name!r} is not supported; {', '.join(scalings)} are")
        if scalings[name] == "none":
            factor = None
        elif not factor:
            raise self._lacks("rope.scaling.factor")
        original = self._optional_size("rope.scaling.original_context_length") or self._size("context_length")
        return RopeConfig(
            theta=metadata.floating(self._key("rope.freq_base")) or 10_000.0,
            scaling=scalings[name],
            factor=factor or 1.0,
            original_max_position=original if name == "yarn" else None,
            beta_fast=metadata.floating(self._key("rope.scaling.yarn_beta_fast")) or 32.0,
            beta_slow=metadata.floating(self._key("rope.scaling.yarn_beta_slow")) or 1.0,
            attention_factor=self._yarn_attention_factor(factor) if name == "yarn" and factor else None,
            freq_factors=freq_factors,
        )

    def _yarn_attention_factor(self, factor: float) -> float | None:
        """Read the factor on cos and sin: ggml multiplies YaRN's own by the file's (``ggml_rope_yarn``)."""
        extra = self._metadata.floating(self._key("rope.scaling.attn_factor"))
        return None if extra is None else extra * (1.0 + 0.1 * math.log(factor))

    def _read_end_ids(self) -> tuple[int, ...]:
        metadata = self._metadata
        ids = {token_id for key in _END_ID_KEYS if (token_id := metadata.integer(key)) is not None}
        for token_id, text in enumerate(metadata.strings("tokenizer.ggml.tokens") or ()):
            if text in _END_TOKENS:
                ids.add(token_id)
        return tuple(sorted(ids))

    def _key(self, name: str) -> str:
        return f"{self._architecture}.{name}"

    def _size(self, name: str) -> int:
        size = self._optional_size(name)
        if size is None:
            raise self._lacks(name)
        return size

    def _optional_size(self, name: str) -> int | None:
        return self._metadata.integer(self._key(name))

    def _lacks(self, name: str) -> Exception:
        return refusal(self._metadata.path, f"the file lacks the key {self._key(name)}")
