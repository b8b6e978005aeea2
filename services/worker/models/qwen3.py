"""Qwen3: the shared decoder with RMS norms on each query and key head, before the rotation."""

import torch

from services.common.errors import EngineError, ErrorReason
from services.worker.model_config import ModelConfig
from services.worker.models.decoder import Attention, Decoder, Parameters
from treadle_kernels.rms_norm import rms_norm


class Qwen3Attention(Attention):
    """Normalises heads over ``head_dim``, with one weight for all query heads and one for all key heads."""

    def __init__(self, config: ModelConfig, parameters: Parameters, name: str) -> None:
        super().__init__(config, parameters, name)
        self._eps = config.rms_norm_eps
        self._query_norm = parameters.pop(f"{name}.q_norm.weight")
        self._key_norm = parameters.pop(f"{name}.k_norm.weight")

    def normalise_heads(self, qkv: torch.Tensor) -> None:
        """Replace query and key heads by their normalised selves."""
        query, key = qkv[:, : self.num_heads], qkv[:, self.num_heads : self.num_rotated_heads]
        query.copy_(rms_norm(query, self._query_norm, self._eps))
        key.copy_(rms_norm(key, self._key_norm, self._eps))


class Qwen3(Decoder):
    """Differs from Llama by its head norms."""

    def __init__(self, config: ModelConfig, parameters: Parameters) -> None:
        if not config.has_qk_norm:
            raise EngineError(ErrorReason.MODEL_LOAD_FAILED, "a qwen3 model must have q and k norms")
        super().__init__(config, parameters)

    def build_attention(self, parameters: Parameters, name: str) -> Attention:
        """Build the attention with head norms."""
        return Qwen3Attention(self.config, parameters, name)
