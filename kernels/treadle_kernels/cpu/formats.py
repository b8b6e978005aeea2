"""Number formats of weights and of cached keys and values, by the numbers that ``native/treadle_cpu.h`` gives them."""

from enum import IntEnum


class WeightFormat(IntEnum):
    """Formats of linear layers and embeddings; the numbers are those of ``ggml_type`` in a GGUF file.

    The last is the engine's own, which no file has: packed from float32 rows, for ROTATED activations.
    """

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    BF16 = 30
    ROTATED = 1008

    @property
    def block_size(self) -> int:
        """Numbers that share scales in a file; divides the inputs of a layer."""
        if self in (WeightFormat.F32, WeightFormat.F16, WeightFormat.BF16):
            return 1
        return 256 if self in (WeightFormat.Q4_K, WeightFormat.Q5_K, WeightFormat.Q6_K) else 32


class ActivationFormat(IntEnum):
    """How activations meet quantised weights; see ``native/treadle_cpu.h``."""

    INT8 = 0
    SPLIT = 1
    ROTATED = 2
    BF16 = 3

    @property
    def most_terms(self) -> int:
        """Numbers that make up an activation, at most; only INT8 may have fewer."""
        return 2 if self in (ActivationFormat.INT8, ActivationFormat.SPLIT) else 1


class KvDtype(IntEnum):
    """Formats of the KV cache; int8 carries a float32 scale for each token and head."""

    F32 = 0
    BF16 = 1
    INT8 = 2
