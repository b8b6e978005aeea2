"""A linear layer in the form that runs quickest on its device.

On CPU, bfloat16 weights are repacked once into oneDNN's blocked layout: a plain ``F.linear`` repacks them at every
call. The packed copy replaces the original. float32, the reference, and other devices stay with ``F.linear``.
"""

import torch
import torch.nn.functional as F


class Linear:
    """``y = x Wᵀ + b``.

    Args:
        weight: ``[out_features, in_features]``.
        bias: ``[out_features]`` or None.
    """

    __slots__ = ("_bias", "_is_packed", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._is_packed = _can_pack(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self._is_packed else weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply to ``[num_tokens, in_features]``. Pure."""
        if self._is_packed:
            packed: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return packed
        return F.linear(x, self._weight, self._bias)


def _can_pack(weight: torch.Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
