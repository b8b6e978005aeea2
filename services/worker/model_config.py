"""The shape of a model: what the loaders read from a model's files and the model modules are built from.

Owns: the metadata types that loaders (``services.worker.weights``) and models (``services.worker.models``) meet on.
Guarantees: dependency-free, immutable, and validated at construction, so that a model module may trust every field.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from services.common.errors import EngineError, ErrorReason

RopeScaling = Literal["none", "linear", "llama3", "yarn"]
ModelFamily = Literal["llama", "mistral", "qwen2", "qwen3"]

MODEL_FAMILIES: tuple[ModelFamily, ...] = get_args(ModelFamily)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions turn into rotation angles.

    Attributes:
        theta: Base of the geometric series of frequencies.
        scaling: Rule that stretches the angles beyond the trained length.
        factor: Stretch of ``linear``, ``llama3`` and ``yarn``.
        low_freq_factor: ``llama3``: wavelengths longer than ``original_max_position / low_freq_factor`` are stretched.
        high_freq_factor: ``llama3``: wavelengths shorter than ``original_max_position / high_freq_factor`` are kept.
        original_max_position: Trained length in tokens; needed by ``llama3`` and ``yarn``.
        beta_fast: ``yarn``: rotations over the trained length above which a frequency is kept.
        beta_slow: ``yarn``: rotations over the trained length below which a frequency is stretched.
        attention_factor: ``yarn``: factor on cos and sin; None computes ``0.1 ln(factor) + 1``.
        freq_factors: Divides each of the ``head_dim // 2`` frequencies (GGUF ``rope_freqs.weight``); applied last.
    """

    theta: float
    scaling: RopeScaling = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    freq_factors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        """Refuses a rule whose parameters are missing or out of range."""
        if self.theta <= 0:
            raise _refusal("rope.theta", f"must be positive, is {self.theta}")
        if self.scaling not in get_args(RopeScaling):
            raise _refusal("rope.scaling", f"must be one of {', '.join(get_args(RopeScaling))}, is {self.scaling!r}")
        if self.factor <= 0:
            raise _refusal("rope.factor", f"must be positive, is {self.factor}")
        if self.scaling in ("llama3", "yarn") and not self.original_max_position:
            raise _refusal("rope.original_max_position", f"is needed by rope scaling {self.scaling!r}")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything that determines a decoder's tensors and arithmetic, besides the weights.

    Attributes:
        family: Which module of ``services.worker.models`` runs it.
        vocab_size: Rows of the embedding and of the logits.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the gated MLP.
        num_layers: Decoder layers.
        num_attention_heads: Query heads.
        num_kv_heads: Key and value heads; divides ``num_attention_heads``.
        head_dim: Width of a head; even; need not be ``hidden_size / num_attention_heads``.
        rms_norm_eps: Added to the mean square before the root.
        rope: Rotary embedding.
        max_model_len: Longest prompt plus output, in tokens.
        tie_word_embeddings: Whether the logits use the embedding matrix; there is no ``lm_head.weight`` then.
        has_qkv_bias: Whether q, k and v projections carry a bias.
        has_output_bias: Whether the attention's output projection carries a bias.
        has_mlp_bias: Whether the three MLP projections carry a bias.
        has_qk_norm: Whether q and k heads are RMS-normalised before the rotation.
        sliding_window: A token sees at most this many positions, its own included; None sees all.
        eos_token_ids: Ids that end a generation.
        bos_token_id: Id that begins a text, where the model has one.
    """

    family: ModelFamily
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_model_len: int
    tie_word_embeddings: bool
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    sliding_window: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        """Refuses shapes that no decoder can have."""
        if self.family not in MODEL_FAMILIES:
            raise _refusal("family", f"must be one of {', '.join(MODEL_FAMILIES)}, is {self.family!r}")
        sizes = {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_layers": self.num_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_model_len": self.max_model_len,
        }
        for name, size in sizes.items():
            if size < 1:
                raise _refusal(name, f"must be at least 1, is {size}")
        if self.num_attention_heads % self.num_kv_heads:
            raise _refusal("num_kv_heads", f"{self.num_kv_heads} must divide {self.num_attention_heads} query heads")
        if self.head_dim % 2:
            raise _refusal("head_dim", f"must be even for the rotary embedding, is {self.head_dim}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise _refusal("sliding_window", f"must be at least 1 or absent, is {self.sliding_window}")
        if self.rope.freq_factors is not None and len(self.rope.freq_factors) != self.head_dim // 2:
            raise _refusal(
                "rope.freq_factors", f"must hold {self.head_dim // 2} factors, holds {len(self.rope.freq_factors)}"
            )

    @property
    def num_queries_per_kv(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_attention_heads // self.num_kv_heads


def _refusal(field: str, problem: str) -> EngineError:
    return EngineError(ErrorReason.MODEL_LOAD_FAILED, f"model config: {field} {problem}", field=field)
