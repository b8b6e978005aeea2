"""Loads the native library and turns its error codes into exceptions.

Owns: the one handle of the process. Guarantees: loading happens at the first use and never raises out of
`is_available`; a failing call is a ``ValueError`` with the library's own words.
"""

import ctypes
import functools
import os
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from treadle_kernels.cpu.formats import ActivationFormat
from treadle_kernels.cpu.structs import ABI, KvStruct, LinearStruct, ModelStruct, RowsStruct

# TREADLE_CPU_LIBRARY names another build, such as one with sanitizers.
LIBRARY_PATH: Final = Path(os.environ.get("TREADLE_CPU_LIBRARY") or Path(__file__).with_name("libtreadle_cpu.so"))

_POINTER = ctypes.c_void_p
_I32, _I64, _U64, _FLOAT = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64, ctypes.c_float
_LINEAR, _KV, _ROWS = ctypes.POINTER(LinearStruct), ctypes.POINTER(KvStruct), ctypes.POINTER(RowsStruct)

# Functions that return 0 or set an error.
_ARGUMENTS_BY_CHECKED: Final[dict[str, tuple[Any, ...]]] = {
    "treadle_cpu_select_isa": (ctypes.c_char_p,),
    "treadle_pool_create": (_I32, _I32, ctypes.POINTER(_POINTER)),
    "treadle_pool_measure": (_POINTER, _I32, ctypes.POINTER(ctypes.c_double)),
    "treadle_raw_bytes": (_I32, _I64, _I64, ctypes.POINTER(_U64)),
    "treadle_packed_bytes": (_I32, _I64, _I64, ctypes.POINTER(_U64)),
    "treadle_pack": (_I32, _POINTER, _U64, _I64, _I64, _POINTER, _U64),
    "treadle_unpack_rows": (_LINEAR, _POINTER, _I64, _POINTER),
    "treadle_linear_forward": (_POINTER, _LINEAR, _POINTER, _I64, _I32, _POINTER),
    "treadle_quantize": (_POINTER, _I64, _I64, _POINTER, _POINTER),
    "treadle_rms_norm": (_POINTER, _POINTER, _I64, _I64, _FLOAT, _POINTER),
    "treadle_swiglu": (_POINTER, _POINTER, _I64, _I64, _POINTER),
    "treadle_kv_bytes_per_block": (_KV, ctypes.POINTER(_U64)),
    "treadle_attention": (_POINTER, _KV, _I32, _ROWS, _POINTER, _I32, _I32, _FLOAT, _I32, _POINTER),
    "treadle_sample": (_POINTER, _POINTER, _I64, _I64, _POINTER, _POINTER),
    "treadle_model_create": (ctypes.POINTER(ModelStruct), _POINTER, ctypes.POINTER(_POINTER)),
    "treadle_model_observe": (_POINTER, _POINTER, _I64),
    "treadle_model_step": (_POINTER, _KV, _ROWS, _POINTER, _POINTER, _I32, _POINTER, _POINTER),
}
_SIGNATURE_BY_PLAIN: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "treadle_cpu_abi": (_I32, ()),
    "treadle_cpu_last_error": (ctypes.c_char_p, ()),
    "treadle_cpu_available_isas": (ctypes.c_char_p, ()),
    "treadle_cpu_isa": (ctypes.c_char_p, ()),
    "treadle_pool_destroy": (None, (_POINTER,)),
    "treadle_uniform": (ctypes.c_double, (_U64, ctypes.c_uint32, _U64)),
    "treadle_model_destroy": (None, (_POINTER,)),
    "treadle_model_scratch_bytes": (_U64, (_POINTER,)),
    "treadle_model_phase_seconds": (None, (_POINTER, _POINTER)),
}


class LibraryUnavailableError(RuntimeError):
    """The native library is not there; the text says why and what to do."""


def is_available() -> bool:
    """Whether the native library can be used in this process."""
    return unavailable_reason() is None


def unavailable_reason() -> str | None:
    """Say why the library cannot be used; None if it can."""
    try:
        load()
    except LibraryUnavailableError as error:
        return str(error)
    return None


def available_isas() -> tuple[str, ...]:
    """Instruction sets of this machine that the library has code for, slowest first."""
    return tuple(load().treadle_cpu_available_isas().decode().split(","))


def current_isa() -> str:
    """Instruction set in use: the choice of `select_isa`, else of ``TREADLE_CPU_ISA``, else the fastest."""
    return str(load().treadle_cpu_isa().decode())


def fastest_activations() -> ActivationFormat:
    """Return the activations that the instruction set in use is fastest with, on weights as files have them."""
    return ActivationFormat.BF16 if current_isa() == "amx" else ActivationFormat.INT8


def select_isa(name: str) -> None:
    """Use another instruction set from now on. Not while another thread is inside the library.

    Raises:
        ValueError: the machine or the library does not have it.
    """
    call("treadle_cpu_select_isa", name.encode())


def call(function: str, *arguments: object) -> None:
    """Call a function that returns 0 or sets an error.

    Raises:
        ValueError: the library refused, in its words.
        LibraryUnavailableError: there is no library.
    """
    library = load()
    if getattr(library, function)(*arguments):
        raise ValueError(library.treadle_cpu_last_error().decode())


@functools.cache
def load() -> ctypes.CDLL:
    """Load the library once.

    Raises:
        LibraryUnavailableError: it was not built, or this machine cannot load it.
    """
    if not LIBRARY_PATH.exists():
        raise LibraryUnavailableError(
            "the native CPU library was not built, since no C++17 compiler was found at installation; "
            "install g++ or clang++ and run pip install again"
        )
    try:
        library = ctypes.CDLL(str(LIBRARY_PATH))
        for name, arguments in _ARGUMENTS_BY_CHECKED.items():
            function = getattr(library, name)
            function.restype, function.argtypes = ctypes.c_int, arguments
        for name, (result, arguments) in _SIGNATURE_BY_PLAIN.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise LibraryUnavailableError(f"the native CPU library cannot be loaded: {error}") from error
    if (abi := library.treadle_cpu_abi()) != ABI:
        raise LibraryUnavailableError(
            f"the native CPU library has interface {abi}, this code needs {ABI}; run pip install again"
        )
    return library


def address(array: npt.NDArray[np.generic] | None, name: str, dtype: npt.DTypeLike, *shape: int | None) -> int | None:
    """Check an array and return where its data lies; None stays None.

    Args:
        array: To be passed to the library.
        name: For the error text.
        dtype: That it must have.
        shape: That it must have; None matches any size.

    Raises:
        ValueError: dtype or shape differ, or the array has gaps.
    """
    if array is None:
        return None
    if array.dtype != np.dtype(dtype):
        raise ValueError(f"{name} must be of dtype {np.dtype(dtype)}, is {array.dtype}")
    if array.ndim != len(shape) or any(want not in (None, have) for want, have in zip(shape, array.shape, strict=True)):
        wanted = ", ".join("*" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must have shape [{wanted}], has {list(array.shape)}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name} must be contiguous, has strides {array.strides}")
    return int(array.ctypes.data)
