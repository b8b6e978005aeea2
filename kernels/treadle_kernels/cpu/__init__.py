"""The CPU engine: quantised linear layers, paged attention and whole decoder steps in one native library.

``native/treadle_cpu.h`` is the contract; the modules here put types and names on it. Guarantees: imports numpy and the
standard library only; every wrong argument is a ``ValueError`` that says what was expected; results do not depend on
the batch, on chunking or on the number of threads. Where the library could not be built or loaded, importing this
package still succeeds, and `is_available` says so.
"""

from treadle_kernels.cpu.formats import ActivationFormat, KvDtype, WeightFormat
from treadle_kernels.cpu.kv_cache import KvCache, KvShape, StepRows
from treadle_kernels.cpu.library import (
    available_isas,
    current_isa,
    fastest_activations,
    is_available,
    select_isa,
    unavailable_reason,
)
from treadle_kernels.cpu.model import CpuModel, LayerWeights, ModelShape, ModelWeights, ObservedInputs, StepPhase
from treadle_kernels.cpu.ops import attention, linear, quantize_activations, rms_norm, swiglu
from treadle_kernels.cpu.packing import (
    PackedLinear,
    advise_huge_pages,
    aligned_bytes,
    pack_linear,
    packed_bytes,
    raw_bytes,
    unpack_rows,
    unpermute_head_rows,
)
from treadle_kernels.cpu.sampling import SAMPLING_DTYPE, sample, uniform
from treadle_kernels.cpu.threads import ThreadPool

__all__ = [
    "SAMPLING_DTYPE",
    "ActivationFormat",
    "CpuModel",
    "KvCache",
    "KvDtype",
    "KvShape",
    "LayerWeights",
    "ModelShape",
    "ModelWeights",
    "ObservedInputs",
    "PackedLinear",
    "StepPhase",
    "StepRows",
    "ThreadPool",
    "WeightFormat",
    "advise_huge_pages",
    "aligned_bytes",
    "attention",
    "available_isas",
    "current_isa",
    "fastest_activations",
    "is_available",
    "linear",
    "pack_linear",
    "packed_bytes",
    "quantize_activations",
    "raw_bytes",
    "rms_norm",
    "sample",
    "select_isa",
    "swiglu",
    "unavailable_reason",
    "uniform",
    "unpack_rows",
    "unpermute_head_rows",
]
