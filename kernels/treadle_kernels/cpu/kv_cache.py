"""The memory of keys and values, and which tokens of which requests a step computes."""

import ctypes
import functools
import mmap
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from treadle_kernels.cpu.formats import KvDtype
from treadle_kernels.cpu.library import address, call
from treadle_kernels.cpu.packing import ALIGNMENT, Bytes, aligned_bytes
from treadle_kernels.cpu.structs import KvStruct, RowsStruct

Int32s = npt.NDArray[np.int32]

_MADV_POPULATE_WRITE = 23
_PAGE = mmap.PAGESIZE


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one block holds.

    Attributes:
        num_layers: Decoder layers.
        num_kv_heads: Key and value heads.
        head_dim: Width of a head; even.
        dtype: Of keys and values.
        block_size: Slots a block, a multiple of 16.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: KvDtype = KvDtype.BF16
    block_size: int = 32

    def bytes_per_block(self) -> int:
        """Bytes of one block, all layers together. Pure.

        Raises:
            ValueError: a size is out of range.
        """
        num_bytes = ctypes.c_uint64()
        struct = self.struct(None, 0, 1)
        call("treadle_kv_bytes_per_block", ctypes.byref(struct), ctypes.byref(num_bytes))
        return num_bytes.value

    def struct(self, data: int | None, num_bytes: int, num_blocks: int) -> KvStruct:
        """Describe memory of this shape to the library."""
        return KvStruct(
            data=data,
            num_bytes=num_bytes,
            dtype=self.dtype,
            num_blocks=num_blocks,
            block_size=self.block_size,
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
        )


class KvCache:
    """Blocks of keys and values.

    Args:
        shape: Of a block.
        num_blocks: The null block 0 included.
        memory: ``[num_blocks, shape.bytes_per_block()]`` uint8, aligned to 64 bytes, such as a view of a memory map;
            None takes zeroed memory of its own, which the system hands out as blocks are first written.

    Attributes:
        memory: The bytes; a block's are ``memory[block_id]`` and may be copied out and back.
    """

    def __init__(self, shape: KvShape, num_blocks: int, memory: Bytes | None = None) -> None:
        block_bytes = shape.bytes_per_block()
        if memory is None:
            memory = aligned_bytes(num_blocks * block_bytes).reshape(num_blocks, block_bytes)
        data = address(memory, "KV memory", np.uint8, num_blocks, block_bytes)
        if data is None or data % ALIGNMENT:
            raise ValueError(f"KV memory must start at a multiple of {ALIGNMENT} bytes")
        self.shape = shape
        self.num_blocks = num_blocks
        self.memory = memory
        self.struct = shape.struct(data, memory.nbytes, num_blocks)

    def touch(self, begin: int, end: int) -> bool:
        """Have the system hand out the memory of blocks ``[begin, end)`` now, and not when they are first written.

        Contents stay as they are, so it may run beside steps, on another thread.

        Returns:
            False: this system cannot (Linux before 5.14).
        """
        block_bytes = self.memory.shape[1]
        first = (self.struct.data + begin * block_bytes) // _PAGE * _PAGE
        last = -(-(self.struct.data + end * block_bytes) // _PAGE) * _PAGE
        return _madvise()(first, last - first, _MADV_POPULATE_WRITE) == 0


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    # Called this way, it leaves the interpreter to other threads.
    try:
        function = ctypes.CDLL(None).madvise
    except AttributeError:
        return lambda *_: -1
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int
    return function


@dataclass(frozen=True, slots=True)
class StepRows:
    """The tokens of a step, request by request; all arrays int32.

    Attributes:
        query_starts: ``[num_rows + 1]``: row r has the tokens ``[query_starts[r], query_starts[r + 1])``, which are the
            last of its context.
        context_lens: ``[num_rows]``: positions of each request known after the step, its new tokens included.
        block_ids: The rows' block tables, one after the other.
        block_starts: ``[num_rows + 1]``: where each table starts in ``block_ids``.
    """

    query_starts: Int32s
    context_lens: Int32s
    block_ids: Int32s
    block_starts: Int32s

    @property
    def num_rows(self) -> int:
        """Requests in the step."""
        return len(self.context_lens)

    @property
    def num_tokens(self) -> int:
        """Tokens in the step."""
        return int(self.query_starts[-1])

    def struct(self) -> RowsStruct:
        """Describe them to the library; this object must outlive every use.

        Raises:
            ValueError: an array has the wrong dtype or length.
        """
        num_rows = self.num_rows
        block_starts = address(self.block_starts, "block_starts", np.int32, num_rows + 1)
        num_block_ids = int(self.block_starts[-1])
        if len(self.block_ids) != num_block_ids:
            raise ValueError(
                f"block_ids must have {num_block_ids} entries as block_starts says, has {len(self.block_ids)}"
            )
        return RowsStruct(
            query_starts=address(self.query_starts, "query_starts", np.int32, num_rows + 1),
            context_lens=address(self.context_lens, "context_lens", np.int32, num_rows),
            block_ids=address(self.block_ids, "block_ids", np.int32, None),
            block_starts=block_starts,
            num_rows=num_rows,
            num_tokens=self.num_tokens,
        )
