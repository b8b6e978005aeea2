"""Oracle of `rotary_`: the formula, in float32."""

import torch


def rotary_(heads: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> None:
    """State the formula; see the package's docstring."""
    half = heads.shape[-1] // 2
    cosine = cos[:, None, :half].float()
    sine = signed_sin[:, None, half:].float()
    first, second = heads[..., :half].float(), heads[..., half:].float()
    heads.copy_(torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1))
