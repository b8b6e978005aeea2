"""Rotation angles of the rotary embedding; its frequencies are ``services.worker.rope_frequencies``'.

Guarantees: angles are computed in float32 and rounded to the model's dtype once, as the models were trained.
"""

from dataclasses import dataclass

import torch

from services.worker.model_config import RopeConfig
from services.worker.rope_frequencies import attention_factor, inverse_frequencies


@dataclass(frozen=True, slots=True)
class RotaryTables:
    """A step's factors for ``treadle_kernels.rotary_``, each ``[num_tokens, head_dim]``."""

    cos: torch.Tensor
    signed_sin: torch.Tensor


class RotaryEmbedding:
    """Turns positions into rotation factors.

    Args:
        config: Frequencies and their scaling.
        head_dim: Width of a head.
        dtype: Of the factors.
        device: Where they live.
    """

    def __init__(self, config: RopeConfig, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._inverse_frequencies = torch.from_numpy(inverse_frequencies(config, head_dim)).to(device)
        self._factor = attention_factor(config)
        self._dtype = dtype

    def tables(self, positions: torch.Tensor) -> RotaryTables:
        """Compute the factors of ``[num_tokens]`` int64 positions. Pure."""
        angles = positions.to(torch.float32)[:, None] * self._inverse_frequencies
        cos, sin = angles.cos() * self._factor, angles.sin() * self._factor
        return RotaryTables(
            torch.cat([cos, cos], dim=-1).to(self._dtype), torch.cat([-sin, sin], dim=-1).to(self._dtype)
        )
