"""Frequencies of the rotary embedding, with the scaling rules of long-context models.

Guarantees: everything is computed in float32, as the models were trained; no torch, so that every backend shares it.
"""

import math

import numpy as np
import numpy.typing as npt

from services.worker.model_config import RopeConfig

Floats = npt.NDArray[np.float32]


def attention_factor(config: RopeConfig) -> float:
    """Factor on cos and sin. Pure. Source: YaRN (Peng et al., 2023), section 3.4, for ``yarn``; 1 otherwise."""
    if config.scaling != "yarn":
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    return 0.1 * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Floats:
    """Angle per position of each of the ``head_dim // 2`` pairs. Pure."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies: Floats = np.reciprocal(np.power(np.full_like(exponents, config.theta), exponents))
    if config.scaling == "linear":
        frequencies = np.divide(frequencies, np.float32(config.factor))
    elif config.scaling == "llama3":
        frequencies = _stretch_llama3(frequencies, config)
    elif config.scaling == "yarn":
        frequencies = _stretch_yarn(frequencies, config, head_dim)
    if config.freq_factors is not None:
        frequencies = np.divide(frequencies, np.array(config.freq_factors, dtype=np.float32))
    return frequencies


def _stretch_llama3(frequencies: Floats, config: RopeConfig) -> Floats:
    """Stretch long waves by the factor, keep short ones, blend between. Source: Llama 3.1 model code (Meta)."""
    assert config.original_max_position is not None
    turns = np.float32(config.original_max_position / (2 * math.pi)) * frequencies  # over the trained length
    blend = (turns - np.float32(config.low_freq_factor)) / np.float32(config.high_freq_factor - config.low_freq_factor)
    blend = blend.clip(0.0, 1.0)
    stretched: Floats = (1 - blend) * frequencies / np.float32(config.factor) + blend * frequencies
    return stretched


def _stretch_yarn(frequencies: Floats, config: RopeConfig, head_dim: int) -> Floats:
    """Blend kept and stretched frequencies over a ramp of pairs. Source: YaRN (Peng et al., 2023), section 3.2."""
    assert config.original_max_position is not None

    def pair_that_turns(times: float) -> float:
        trained = config.original_max_position or 0
        return head_dim * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(config.theta))

    low = max(math.floor(pair_that_turns(config.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(config.beta_slow)), head_dim - 1)
    pair = np.arange(head_dim // 2, dtype=np.float32)
    stretched_share = ((pair - np.float32(low)) / np.float32(max(high - low, 0.001))).clip(0.0, 1.0)
    stretched: Floats = frequencies / np.float32(config.factor) * stretched_share + frequencies * (1 - stretched_share)
    return stretched
