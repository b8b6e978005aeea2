"""Reads the header of a safetensors file.

The format (huggingface/safetensors, README): eight bytes with the header's length, the header as a JSON object from
names to type, shape and place, then the tensors without gaps. A few lines here serve without torch or the format's own
library, whose numpy form does not know bfloat16.
"""

import json
import math
import struct
from pathlib import Path
from typing import cast

from services.worker.weights.ggml_types import GGML_TYPE_BY_ID, GgmlType
from services.worker.weights.refusal import refusal
from services.worker.weights.stored_tensor import StoredTensor

_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000
_METADATA = "__metadata__"
_TYPE_BY_NAME: dict[str, GgmlType] = {
    ggml_type.name: ggml_type for ggml_type in GGML_TYPE_BY_ID.values() if ggml_type.name in ("F32", "F16", "BF16")
}


class SafetensorsFile:
    """What a safetensors file holds.

    Attributes:
        path: The file.
        header_bytes: Bytes before the first tensor.
        stored_tensors: By the file's own names.

    Raises:
        EngineError: MODEL_LOAD_FAILED: the file is damaged, or holds a type that is not read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            file_bytes = path.stat().st_size
            self.header_bytes, header = _read_header(path, file_bytes)
            self.stored_tensors = {
                name: self._stored_tensor(name, cast(dict[str, object], entry))
                for name, entry in header.items()
                if name != _METADATA
            }
        except (OSError, ValueError, TypeError, KeyError, AttributeError, struct.error) as error:
            raise self._damaged(f"{type(error).__name__}: {error}") from error
        end = max((stored.offset_bytes + stored.num_bytes for stored in self.stored_tensors.values()), default=0)
        if end != file_bytes:
            raise self._damaged(f"its tensors end at byte {end:,}, the file at {file_bytes:,}")

    def _stored_tensor(self, name: str, entry: dict[str, object]) -> StoredTensor:
        type_name, shape = str(entry["dtype"]), tuple(_size(size) for size in cast(list[object], entry["shape"]))
        if type_name not in _TYPE_BY_NAME:
            supported = ", ".join(_TYPE_BY_NAME)
            raise refusal(self.path, f"tensor {name} has the type {type_name}; {supported} are supported")
        start, end = (_size(offset) for offset in cast(list[object], entry["data_offsets"]))
        stored = StoredTensor(self.path, self.header_bytes + start, shape, _TYPE_BY_NAME[type_name])
        if end - start != stored.num_bytes or not math.prod(shape):
            raise ValueError(f"{name} has {end - start} bytes for the shape {list(shape)}")
        return stored

    def _damaged(self, why: str) -> Exception:
        return refusal(self.path, f"is not a whole safetensors file ({why})")


def _read_header(path: Path, file_bytes: int) -> tuple[int, dict[str, object]]:
    with path.open("rb") as file:
        (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
        if length > min(file_bytes - _LENGTH.size, _MAX_HEADER_BYTES):
            raise ValueError(f"the header should have {length:,} bytes")
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise TypeError("the header is no object")
    return _LENGTH.size + length, header


def _size(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no size")
    return value
