"""Checks of tensor arguments whose messages name the operation, the argument, what was expected and what came.

They cost a few comparisons of Python integers and never look at tensor contents, so they stay on in production.
"""

import torch


def check_shape(op: str, name: str, tensor: torch.Tensor, *expected: int | None) -> None:
    """Require a shape; None matches any size.

    Raises:
        ValueError: rank or a size differs.
    """
    shape = tensor.shape
    if len(shape) != len(expected) or any(want not in (None, have) for want, have in zip(expected, shape, strict=True)):
        wanted = ", ".join("*" if size is None else str(size) for size in expected)
        raise ValueError(f"{op}: {name} must have shape [{wanted}], has {list(shape)}")


def check_dtype(op: str, name: str, tensor: torch.Tensor, *allowed: torch.dtype) -> None:
    """Require one of some dtypes.

    Raises:
        TypeError: the dtype is none of them.
    """
    if tensor.dtype not in allowed:
        raise TypeError(f"{op}: {name} must be {' or '.join(map(str, allowed))}, is {tensor.dtype}")


def check_contiguous(op: str, name: str, tensor: torch.Tensor) -> None:
    """Require row-major memory without gaps.

    Raises:
        ValueError: the tensor is a strided view.
    """
    if not tensor.is_contiguous():
        raise ValueError(f"{op}: {name} must be contiguous, has strides {tensor.stride()} for {list(tensor.shape)}")
