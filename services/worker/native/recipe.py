"""Which tensor of a model runs in which number format on the native engine, and where it lies in the packed file.

Owns: the choice of formats and the layout. Guarantees: pure functions of the checkpoint's metadata, so that what the
weights will take is known before any is read.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from services.common.errors import EngineError, ErrorReason
from services.worker.config import Dtype, Quantization
from services.worker.weights import Checkpoint, StoredTensor
from services.worker.weights.layout import EMBEDDING, HEAD
from treadle_kernels.cpu import WeightFormat, pack_linear, packed_bytes, raw_bytes

ALIGNMENT = 64
"""Of every tensor in the packed file, as the engine wants packed weights."""

_VERSION = 2
"""Of everything here, in ``packing`` and in ``calibration`` that decides what a packed tensor holds; raise it when it
changes."""

_ROTATED_MULTIPLE = 32
"""Inputs of a layer that the engine can rotate."""

_FORMAT_BY_NAME = {weight_format.name: weight_format for weight_format in WeightFormat}
_FORMAT_BY_QUANTIZATION = {"int8": WeightFormat.Q8_0, "int4": WeightFormat.Q4_1}


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """One tensor of the packed file.

    Attributes:
        name: As in the checkpoint.
        stored: Where it comes from.
        weight_format: Format in which it runs; None: a vector (norm, bias), kept as plain float32.
        offset_bytes: From the first tensor of the packed file.
        num_bytes: There.
    """

    name: str
    stored: StoredTensor
    weight_format: WeightFormat | None
    offset_bytes: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Recipe:
    """A model's packed form.

    Attributes:
        variant: What was asked for: ``stored``, ``int8``, ``int4`` or ``float32``; of rotated layers ``rotated``, and
            with which formats they were calibrated where those are not the stored ones.
        is_rotated: Whether its linear layers are.
        fingerprint: Digest of the weights' version and of everything that decides the packed bytes.
        tensors: In the order of the file.
    """

    variant: str
    is_rotated: bool
    fingerprint: str
    tensors: tuple[PackedTensor, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors together."""
        last = self.tensors[-1]
        return last.offset_bytes + last.num_bytes

    @property
    def peak_extra_bytes(self) -> int:
        """Most bytes that packing one tensor needs besides: what the file holds of it, and its rows in float32."""
        return max(t.stored.num_bytes + 4 * math.prod(t.stored.shape) for t in self.tensors)


def unsupported_formats(checkpoint: Checkpoint) -> list[str]:
    """Names of the checkpoint's matrix formats that the engine has no code for. Pure."""
    names = {stored.ggml_type.name for stored in checkpoint.stored_tensors.values()}
    return sorted(names - _FORMAT_BY_NAME.keys())


def make_recipe(
    checkpoint: Checkpoint,
    dtype: Dtype,
    quantization: Quantization,
    *,
    is_rotated: bool = False,
) -> Recipe:
    """Choose the formats and lay the tensors out. Pure.

    Args:
        checkpoint: The model; its formats are supported.
        dtype: ``float32`` decodes every weight and computes in float32 throughout; ``bfloat16`` leaves weights as they
            are stored.
        quantization: What matrices that are stored as floating numbers become; those that are stored quantised stay.
        is_rotated: All linear layers become integers of rotated rows, whatever they are stored as.

    Raises:
        EngineError: INVALID_CONFIG: float32 is asked for together with a quantisation or with rotated layers, or rows
            are too odd to be rotated.
    """
    if dtype == "float32" and quantization != "none":
        text = f"quantization is {quantization}, but dtype float32 asks for weights without any"
        raise EngineError(ErrorReason.INVALID_CONFIG, text, field="quantization")
    variant: str = "float32" if dtype == "float32" else "stored" if quantization == "none" else quantization
    digest = hashlib.sha256(f"{_VERSION}:{checkpoint.weight_version}:{variant}".encode())
    if is_rotated:
        _check_rotatable(checkpoint, dtype)
    tensors = tuple(_lay_out((_rotated_choices if is_rotated else _choices)(checkpoint, variant)))
    for weight_format in sorted({t.weight_format for t in tensors if t.weight_format is not None}):
        digest.update(_packed_probe(weight_format))
    for tensor in tensors:
        digest.update(f"{tensor.name}:{tensor.weight_format}:{tensor.num_bytes};".encode())
    if is_rotated:
        variant = "rotated" if variant == "stored" else f"rotated-{variant}"
    return Recipe(variant, is_rotated, digest.hexdigest()[:16], tensors)


_Choice = tuple[str, StoredTensor, WeightFormat | None]


def _lay_out(choices: Iterable[_Choice]) -> Iterator[PackedTensor]:
    offset = 0
    for name, stored, weight_format in choices:
        num_bytes = packed_bytes(weight_format, *stored.shape) if weight_format is not None else 4 * stored.shape[0]
        yield PackedTensor(name, stored, weight_format, offset, num_bytes)
        offset += -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _choices(checkpoint: Checkpoint, variant: str) -> Iterator[_Choice]:
    for name, stored in checkpoint.stored_tensors.items():
        yield name, stored, _run_format(name, stored, variant)


def _rotated_choices(checkpoint: Checkpoint, variant: str) -> Iterator[_Choice]:
    """Choose for rotated layers: the embedding stays what it is; a head that is tied to it is a layer of its own."""
    stored_tensors = checkpoint.stored_tensors
    for name, stored in {**stored_tensors, HEAD: stored_tensors.get(HEAD, stored_tensors[EMBEDDING])}.items():
        if len(stored.shape) == 1 or name == EMBEDDING:
            yield name, stored, _run_format(name, stored, variant)
        else:
            yield name, stored, WeightFormat.ROTATED


def _check_rotatable(checkpoint: Checkpoint, dtype: Dtype) -> None:
    if dtype == "float32":
        text = "activation_bits is 8, but dtype float32 asks for computing without rounding"
        raise EngineError(ErrorReason.INVALID_CONFIG, text, field="activation_bits")
    for name, stored in checkpoint.stored_tensors.items():
        if len(stored.shape) > 1 and name != EMBEDDING and stored.shape[1] % _ROTATED_MULTIPLE:
            needs = f"activation_bits 8 needs widths that are multiples of {_ROTATED_MULTIPLE}"
            text = f"{needs}; {name} takes {stored.shape[1]}"
            raise EngineError(ErrorReason.INVALID_CONFIG, text, field="activation_bits")


def _run_format(name: str, stored: StoredTensor, variant: str) -> WeightFormat | None:
    if len(stored.shape) == 1:
        return None
    own_format = _FORMAT_BY_NAME[stored.ggml_type.name]
    if variant == "float32":
        return WeightFormat.F32
    wanted = _FORMAT_BY_QUANTIZATION.get(variant)
    if wanted is None or own_format.block_size > 1 or stored.shape[1] % wanted.block_size:
        return own_format
    # The logits' error is the answer's error, and the embedding is read a row at a time: eight bits cost little there.
    return WeightFormat.Q8_0 if name in (EMBEDDING, HEAD) else wanted


def _packed_probe(weight_format: WeightFormat) -> bytes:
    """Pack a small matrix of counting numbers: another layout of the engine's gives other bytes, so another file."""
    n, k = 33, 2 * weight_format.block_size * (1 if weight_format.block_size > 1 else 32)
    raw = np.arange(raw_bytes(weight_format, n, k), dtype=np.uint8)
    if weight_format == WeightFormat.ROTATED:
        raw = np.arange(n * k, dtype=np.float32).view(np.uint8)
    return pack_linear(weight_format, raw, n, k).data.tobytes()
