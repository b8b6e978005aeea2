"""Picks an operation's implementation by device, with an override for debugging.

``TREADLE_KERNELS=reference`` runs every operation through its oracle; ``TREADLE_KERNELS=paged_attention=reference``
only the named ones (comma-separated). The variable is read once, at import.
"""

import os
from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

import torch

Implementation = TypeVar("Implementation")

OVERRIDE_VARIABLE = "TREADLE_KERNELS"


class Backend(Enum):
    """Ways to run an operation, slowest first; each operation has the reference and any of the others."""

    REFERENCE = "reference"
    CPU = "cpu"
    TRITON = "triton"


_BACKEND_BY_DEVICE = {"cpu": Backend.CPU, "cuda": Backend.TRITON}


def parse_overrides(text: str) -> dict[str, Backend]:
    """Read the override variable.

    Args:
        text: Comma-separated ``op=backend``, or a bare backend for all operations (key ``*``).

    Raises:
        ValueError: a backend is unknown.
    """
    overrides: dict[str, Backend] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        op, _, backend = item.rpartition("=")
        try:
            overrides[op or "*"] = Backend(backend)
        except ValueError:
            names = ", ".join(member.value for member in Backend)
            raise ValueError(f"{OVERRIDE_VARIABLE}: {backend!r} in {item!r} is none of {names}") from None
    return overrides


_OVERRIDES = parse_overrides(os.environ.get(OVERRIDE_VARIABLE, ""))


def choose(op: str, device: torch.device, available: Mapping[Backend, Implementation]) -> Implementation:
    """Return the implementation to run: the override, else the device's own, else the reference.

    Raises:
        ValueError: the override names a backend that this operation lacks.
    """
    if _OVERRIDES:
        override = _OVERRIDES.get(op, _OVERRIDES.get("*"))
        if override is not None:
            if override not in available:
                raise ValueError(f"{OVERRIDE_VARIABLE}: {op} has no {override.value} implementation")
            return available[override]
    backend = _BACKEND_BY_DEVICE.get(device.type, Backend.REFERENCE)
    return available.get(backend, available[Backend.REFERENCE])
