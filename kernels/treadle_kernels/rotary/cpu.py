"""CPU path of `rotary_`: three passes, in place."""

import torch


def rotary_(heads: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> None:
    """Swap the halves of each head, then ``x · cos + swapped · signed_sin``."""
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    heads.mul_(cos[:, None]).addcmul_(swapped, signed_sin[:, None])
