"""Rotation angles of the rotary embedding, with the scaling rules of long-context models.

Guarantees: angles are computed in float32 and rounded to the model's dtype once, as the models were trained.
"""

import math
from dataclasses import dataclass

import torch

from services.worker.model_config import RopeConfig


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
        self._inverse_frequencies = inverse_frequencies(config, head_dim).to(device)
        self._factor = attention_factor(config)
        self._dtype = dtype

    def tables(self, positions: torch.Tensor) -> RotaryTables:
        """Compute the factors of ``[num_tokens]`` int64 positions. Pure."""
        angles = positions.to(torch.float32)[:, None] * self._inverse_frequencies
        cos, sin = angles.cos() * self._factor, angles.sin() * self._factor
        return RotaryTables(
            torch.cat([cos, cos], dim=-1).to(self._dtype), torch.cat([-sin, sin], dim=-1).to(self._dtype)
        )


def attention_factor(config: RopeConfig) -> float:
    """Factor on cos and sin. Pure. Source: YaRN (Peng et al., 2023), section 3.4, for ``yarn``; 1 otherwise."""
    if config.scaling != "yarn":
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    return 0.1 * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0


def inverse_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Angle per position of each of the ``head_dim // 2`` pairs, in float32. Pure."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / (config.theta**exponents)
    if config.scaling == "linear":
        frequencies = frequencies / config.factor
    elif config.scaling == "llama3":
        frequencies = _stretch_llama3(frequencies, config)
    elif config.scaling == "yarn":
        frequencies = _stretch_yarn(frequencies, config, head_dim)
    if config.freq_factors is not None:
        frequencies = frequencies / torch.tensor(config.freq_factors, dtype=torch.float32)
    return frequencies


def _stretch_llama3(frequencies: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Stretch long waves by the factor, keep short ones, blend between. Source: Llama 3.1 model code (Meta)."""
    assert config.original_max_position is not None
    turns = config.original_max_position * frequencies / (2 * math.pi)  # over the trained length
    blend = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / config.factor + blend * frequencies


def _stretch_yarn(frequencies: torch.Tensor, config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Blend kept and stretched frequencies over a ramp of pairs. Source: YaRN (Peng et al., 2023), section 3.2."""
    assert config.original_max_position is not None

    def pair_that_turns(times: float) -> float:
        trained = config.original_max_position or 0
        return head_dim * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(config.theta))

    low = max(math.floor(pair_that_turns(config.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(config.beta_slow)), head_dim - 1)
    pair = torch.arange(head_dim // 2, dtype=torch.float32)
    stretched_share = ((pair - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return frequencies / config.factor * stretched_share + frequencies * (1 - stretched_share)
