"""Rotary position embedding in the half-rotated layout."""

import torch

from treadle_kernels.checks import check_shape
from treadle_kernels.dispatch import Backend, choose
from treadle_kernels.rotary import cpu, reference

__all__ = ["rotary_"]

_IMPLEMENTATIONS = {Backend.REFERENCE: reference.rotary_, Backend.CPU: cpu.rotary_}


def rotary_(heads: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> None:
    """Rotate each pair ``(x[i], x[i + head_dim / 2])`` of each head by its token's angle. Modifies ``heads``.

    With ``a`` the angle of pair ``i``::

        y[i]                = x[i] · cos a - x[i + head_dim/2] · sin a
        y[i + head_dim/2]   = x[i + head_dim/2] · cos a + x[i] · sin a

    Args:
        heads: ``[num_tokens, num_heads, head_dim]``, float32 or bfloat16; may be a strided view.
        cos: ``[num_tokens, head_dim]``, dtype of ``heads``; both halves hold ``cos a``.
        signed_sin: ``[num_tokens, head_dim]``; the first half holds ``-sin a``, the second ``sin a``. The sign in the
            table turns the rotation into two multiplications and a swap of halves.

    Implementations agree to 1e-6 in float32 and three roundings in bfloat16.

    Raises:
        ValueError: shapes do not fit.

    Source: Su et al., RoFormer, 2021, equation 34, in the layout of GPT-NeoX.
    """
    num_tokens, _, head_dim = heads.shape
    check_shape("rotary_", "cos", cos, num_tokens, head_dim)
    check_shape("rotary_", "signed_sin", signed_sin, num_tokens, head_dim)
    choose("rotary_", heads.device, _IMPLEMENTATIONS)(heads, cos, signed_sin)
