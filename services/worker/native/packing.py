"""From a tensor as stored to its packed form: row order, number format, layout."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from services.worker.native.quantizer import quantize_q4_1, quantize_q8_0
from services.worker.native.recipe import PackedTensor, Recipe
from services.worker.weights import StoredTensor, TensorReader
from services.worker.weights.progress import LoadProgress, ProgressCallback
from services.worker.weights.refusal import refusal
from treadle_kernels.cpu import WeightFormat, pack_linear, packed_bytes, unpack_rows, unpermute_head_rows

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]

_ROWS_AT_ONCE = 4096
"""Whole tiles of the engine."""
_QUANTIZER_BY_FORMAT: dict[WeightFormat, Callable[[Floats], Bytes]] = {
    WeightFormat.Q8_0: quantize_q8_0,
    WeightFormat.Q4_1: quantize_q4_1,
}


@dataclass(frozen=True, slots=True)
class ChannelFactors:
    """What rotated layers' weights are multiplied with, input by input, and what comes before them is divided by.

    Attributes:
        of_inputs: ``[k]`` by the name of a matrix.
        of_outputs: ``[n]`` by the name of a matrix or vector.
    """

    of_inputs: Mapping[str, Floats] = field(default_factory=dict)
    of_outputs: Mapping[str, Floats] = field(default_factory=dict)

    def applied_to(self, name: str, numbers: Floats, rows: slice) -> Floats:
        """Return some rows of a tensor with its factors. Pure."""
        if name in self.of_inputs:
            numbers = numbers * self.of_inputs[name]
        if name in self.of_outputs:
            divisors = self.of_outputs[name][rows]
            numbers = numbers / divisors.reshape(-1, *(1,) * (numbers.ndim - 1))
        return numbers


def pack_tensors(
    recipe: Recipe,
    out: Bytes,
    on_progress: ProgressCallback | None = None,
    factors: ChannelFactors = ChannelFactors(),
) -> None:
    """Read, convert and pack every tensor of a model. Modifies ``out``.

    Args:
        recipe: What goes where.
        out: ``[recipe.num_bytes]``, zeroed, aligned as the recipe's offsets.
        on_progress: Told about the bytes of the files that have been read.
        factors: Of rotated layers, and of the vectors before them.

    Raises:
        EngineError: MODEL_LOAD_FAILED, when a file cannot be read or has changed since it was opened.
    """
    progress = LoadProgress(sum(tensor.stored.num_bytes for tensor in recipe.tensors), on_progress)
    with TensorReader() as reader:
        for tensor in sorted(recipe.tensors, key=lambda tensor: tensor.stored.path):
            rows = _read_rows(reader, tensor.stored)
            place = out[tensor.offset_bytes : tensor.offset_bytes + tensor.num_bytes]
            if tensor.weight_format is None:
                numbers = _as_floats(rows, tensor.stored).reshape(-1)
                place.view(np.float32)[:] = factors.applied_to(tensor.name, numbers, slice(None))
            elif tensor.weight_format == WeightFormat.ROTATED:
                _pack_rotated(tensor, rows, factors, place)
            else:
                _pack_matrix(tensor, tensor.weight_format, rows, place)
            progress.advance(tensor.stored.num_bytes)


def _read_rows(reader: TensorReader, stored: StoredTensor) -> Bytes:
    """Read a tensor's bytes, ``[rows, bytes of a row]``, rows in order; a vector has one number a row."""
    raw = np.empty(stored.num_bytes, dtype=np.uint8)
    reader.read_into(stored, raw.data)
    rows = raw.reshape(stored.shape[0], -1)
    if stored.num_interleaved_heads:
        rows = unpermute_head_rows(rows, stored.num_interleaved_heads).view(np.uint8)
    return rows


def sum_column_squares(recipe: Recipe) -> dict[str, Float64s]:
    """Read every matrix and return the sums of squares of its columns, ``[k]`` by name; the same on every machine.

    Raises:
        EngineError: MODEL_LOAD_FAILED, as `pack_tensors`.
    """
    sums: dict[str, Float64s] = {}
    with TensorReader() as reader:
        for tensor in recipe.tensors:
            if tensor.weight_format is None:
                continue
            rows = _read_rows(reader, tensor.stored)
            sums[tensor.name] = np.zeros(tensor.stored.shape[1], dtype=np.float64)
            for start in range(0, len(rows), _ROWS_AT_ONCE):
                numbers = _as_floats(rows[start : start + _ROWS_AT_ONCE], tensor.stored).astype(np.float64)
                # Over the first axis rows are added one after the other, whatever the machine.
                sums[tensor.name] += np.square(numbers).sum(axis=0)
    return sums


def _pack_rotated(tensor: PackedTensor, rows: Bytes, factors: ChannelFactors, out: Bytes) -> None:
    n, k = tensor.stored.shape
    for start in range(0, n, _ROWS_AT_ONCE):
        part = slice(start, min(start + _ROWS_AT_ONCE, n))
        numbers = factors.applied_to(tensor.name, _as_floats(rows[part], tensor.stored), part)
        begin, end = (packed_bytes(WeightFormat.ROTATED, stop, k) if stop else 0 for stop in (part.start, part.stop))
        pack_linear(WeightFormat.ROTATED, _finite(numbers, tensor), len(numbers), k, out=out[begin:end])


def _pack_matrix(tensor: PackedTensor, weight_format: WeightFormat, rows: Bytes, out: Bytes) -> None:
    own_format = WeightFormat[tensor.stored.ggml_type.name]
    n, k = tensor.stored.shape
    if weight_format == own_format:
        pack_linear(weight_format, rows, n, k, out=out)
    elif weight_format == WeightFormat.F32:
        pack_linear(WeightFormat.F32, _as_floats(rows, tensor.stored), n, k, out=out)
    else:
        quantize = _QUANTIZER_BY_FORMAT[weight_format]
        parts = [
            quantize(_finite(_as_floats(rows[start : start + _ROWS_AT_ONCE], tensor.stored), tensor))
            for start in range(0, n, _ROWS_AT_ONCE)
        ]
        pack_linear(weight_format, np.concatenate(parts), n, k, out=out)


def _as_floats(rows: Bytes, stored: StoredTensor) -> Floats:
    """Decode rows exactly; the engine itself decodes what is quantised."""
    match stored.ggml_type.name:
        case "F32":
            return rows.view(np.float32)
        case "F16":
            return rows.view(np.float16).astype(np.float32)
        case "BF16":
            return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        case name:
            n, k = len(rows), stored.shape[-1]
            return unpack_rows(pack_linear(WeightFormat[name], rows, n, k), np.arange(n, dtype=np.int32))


def _finite(rows: Floats, tensor: PackedTensor) -> Floats:
    if not np.isfinite(rows).all():
        raise refusal(tensor.stored.path, f"{tensor.name} holds numbers that are not finite; it cannot be quantised")
    return rows
