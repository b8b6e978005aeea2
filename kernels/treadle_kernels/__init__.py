"""The tensor operations of Treadle's models: typed, checked, each with a plain PyTorch reference.

One folder an operation: ``__init__`` is the typed op and its contract, ``reference`` the oracle that states the
formula, any other module a faster implementation that must agree with it. ``dispatch`` picks one by device.
Guarantees: imports torch and numpy only. A row's result is a function of that row alone, as far as the matrix library
under it allows: no operation here chooses shapes or algorithms by what else is in the batch.
"""

from treadle_kernels.kv_write import kv_write
from treadle_kernels.paged_attention import PagedBatch, paged_attention
from treadle_kernels.rms_norm import rms_norm
from treadle_kernels.rotary import rotary_
from treadle_kernels.silu_mul import silu_mul

__all__ = ["PagedBatch", "kv_write", "paged_attention", "rms_norm", "rotary_", "silu_mul"]
