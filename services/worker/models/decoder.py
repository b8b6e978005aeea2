"""The decoder that all families share, to be read top-down: model, layer, attention, MLP.

A family (``llama``, ``qwen2``, ``qwen3``) is this decoder and what it does differently. Shapes: ``T`` tokens of a step,
``H`` hidden size. Guarantees: nothing here knows about requests or batches; a token meets others only in attention.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from services.worker.attention import AttentionMetadata, write_and_attend
from services.worker.model_config import ModelConfig
from services.worker.models.linear import Linear
from services.worker.models.rope import RotaryEmbedding, RotaryTables
from treadle_kernels.rms_norm import rms_norm
from treadle_kernels.rotary import rotary_
from treadle_kernels.silu_mul import silu_mul

Parameters = dict[str, torch.Tensor]


class Decoder:
    """A decoder-only language model over a paged KV cache.

    Args:
        config: Shape of the model.
        parameters: Fused parameters by name (see ``models.parameters``). Emptied, so that packed copies replace them.
    """

    def __init__(self, config: ModelConfig, parameters: Parameters) -> None:
        self.config = config
        self._embedding = parameters.pop("embed_tokens.weight")
        self._layers = [
            DecoderLayer(
                config, parameters, f"layers.{index}", self.build_attention(parameters, f"layers.{index}.self_attn")
            )
            for index in range(config.num_layers)
        ]
        self._norm = parameters.pop("norm.weight")
        self._head = Linear(self._embedding if config.tie_word_embeddings else parameters.pop("lm_head.weight"))
        self._rotary = RotaryEmbedding(config.rope, config.head_dim, self.dtype, self.device)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, activations and KV."""
        return self._embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights live."""
        return self._embedding.device

    def build_attention(self, parameters: Parameters, name: str) -> "Attention":
        """Build a layer's attention; a family with its own overrides this."""
        return Attention(self.config, parameters, name)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_layers: Sequence[torch.Tensor],
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Run a step's tokens through all layers. Modifies ``kv_layers``.

        Args:
            token_ids: ``[T]`` int64.
            positions: ``[T]`` int64, of each token in its request.
            kv_layers: One cache a layer, see `KVStorage.layers`.
            metadata: The tokens' slots and rows.

        Returns:
            ``[T, H]``, normalised; `compute_logits` takes the rows that are to be sampled.
        """
        hidden = F.embedding(token_ids, self._embedding)
        rotation = self._rotary.tables(positions)
        for layer, kv_cache in zip(self._layers, kv_layers, strict=True):
            hidden = layer(hidden, rotation, kv_cache, metadata)
        return rms_norm(hidden, self._norm, self.config.rms_norm_eps)

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Score every token of the vocabulary: ``[rows, H]`` to float32 ``[rows, vocab_size]``. Pure."""
        return self._head(hidden).float()


class DecoderLayer:
    """Attention, then the MLP, each on the normalised stream and added back to it."""

    def __init__(self, config: ModelConfig, parameters: Parameters, name: str, attention: "Attention") -> None:
        self._eps = config.rms_norm_eps
        self._attention_norm = parameters.pop(f"{name}.input_layernorm.weight")
        self._attention = attention
        self._mlp_norm = parameters.pop(f"{name}.post_attention_layernorm.weight")
        self._mlp = Mlp(parameters, f"{name}.mlp")

    def __call__(
        self, hidden: torch.Tensor, rotation: RotaryTables, kv_cache: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """Map ``[T, H]`` to ``[T, H]``. Modifies ``kv_cache``, and ``hidden``, which it returns."""
        hidden += self._attention(rms_norm(hidden, self._attention_norm, self._eps), rotation, kv_cache, metadata)
        hidden += self._mlp(rms_norm(hidden, self._mlp_norm, self._eps))
        return hidden


class Attention:
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: ModelConfig, parameters: Parameters, name: str) -> None:
        self.num_heads = config.num_attention_heads
        self.num_rotated_heads = config.num_attention_heads + config.num_kv_heads  # queries and keys, not values
        self._head_dim = config.head_dim
        self._qkv = _pop_linear(parameters, f"{name}.qkv_proj")
        self._output = _pop_linear(parameters, f"{name}.o_proj")

    def __call__(
        self, x: torch.Tensor, rotation: RotaryTables, kv_cache: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """Map ``[T, H]`` to ``[T, H]``. Modifies ``kv_cache``."""
        qkv = self._qkv(x).view(x.shape[0], -1, self._head_dim)
        self.normalise_heads(qkv)
        rotary_(qkv[:, : self.num_rotated_heads], rotation.cos, rotation.signed_sin)
        return self._output(write_and_attend(qkv, self.num_heads, kv_cache, metadata))

    def normalise_heads(self, qkv: torch.Tensor) -> None:
        """Hook between projection and rotation on ``[T, query + key + value heads, head_dim]``; here nothing."""


class Mlp:
    """SwiGLU."""

    def __init__(self, parameters: Parameters, name: str) -> None:
        self._gate_up = _pop_linear(parameters, f"{name}.gate_up_proj")
        self._down = _pop_linear(parameters, f"{name}.down_proj")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[T, H]`` to ``[T, H]``. Pure."""
        return self._down(silu_mul(self._gate_up(x)))


def _pop_linear(parameters: Parameters, name: str) -> Linear:
    return Linear(parameters.pop(f"{name}.weight"), parameters.pop(f"{name}.bias", None))
