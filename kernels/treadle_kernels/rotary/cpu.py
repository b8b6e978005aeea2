"""CPU path of `rotary_`: three passes, in place."""

import torch


def rotary_(heads: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> None:
    """Swap the halves of each head, then ``x · cos + swapped · signed_sin``."""
    num_tokens, num_heads, head_dim = heads.shape
    swapped = heads.view(num_tokens, num_heads, 2, head_dim // 2).flip(2).view(num_tokens, num_heads, head_dim)
    heads.mul_(cos[:, None]).addcmul_(swapped, signed_sin[:, None])
