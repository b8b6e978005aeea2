"""Oracle of `rms_norm`: the formula, in float32."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """State the formula; see the package's docstring."""
    exact = x.float()
    normalised = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps)
    return (normalised.to(x.dtype) * weight).to(x.dtype)
