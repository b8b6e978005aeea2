"""The gate of a SwiGLU MLP."""

import torch

from treadle_kernels.dispatch import Backend, choose
from treadle_kernels.silu_mul import cpu, reference

__all__ = ["silu_mul"]

_IMPLEMENTATIONS = {Backend.REFERENCE: reference.silu_mul, Backend.CPU: cpu.silu_mul}


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return ``silu(gate) · up`` where ``silu(g) = g · sigmoid(g)``. Pure.

    Args:
        gate_up: ``[..., 2 · width]``, float32 or bfloat16: the gate half, then the up half.

    Returns:
        ``[..., width]`` in the same dtype. Implementations agree to 1e-6 relative in float32 and
        two roundings in bfloat16.

    Raises:
        ValueError: the last dimension is odd.

    Source: Shazeer, GLU Variants Improve Transformer, 2020, section 2.
    """
    if gate_up.shape[-1] % 2:
        raise ValueError(f"silu_mul: gate_up must have an even last dimension, has {list(gate_up.shape)}")
    return choose("silu_mul", gate_up.device, _IMPLEMENTATIONS)(gate_up)
