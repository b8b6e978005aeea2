"""The number formats of stored tensors: those of GGUF files, of which the types of safetensors files are three.

A ggml type packs rows into blocks of ``block_size`` numbers that share scales. Ids and sizes as in ``gguf.constants``;
the formats themselves are in ggml-org/ggml, ``src/ggml-common.h``.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GgmlType:
    """A number format.

    Attributes:
        type_id: Number in the file.
        name: Name in ggml and in ``gguf.GGMLQuantizationType``.
        block_size: Numbers in a block.
        block_bytes: Bytes of a block.
    """

    type_id: int
    name: str
    block_size: int
    block_bytes: int

    def num_bytes(self, num_values: int) -> int:
        """Bytes of so many numbers, a multiple of ``block_size``."""
        return num_values // self.block_size * self.block_bytes


GGML_TYPE_BY_ID = {
    ggml_type.type_id: ggml_type
    for ggml_type in (
        GgmlType(0, "F32", 1, 4),
        GgmlType(1, "F16", 1, 2),
        GgmlType(2, "Q4_0", 32, 18),
        GgmlType(3, "Q4_1", 32, 20),
        GgmlType(6, "Q5_0", 32, 22),
        GgmlType(7, "Q5_1", 32, 24),
        GgmlType(8, "Q8_0", 32, 34),
        GgmlType(10, "Q2_K", 256, 84),
        GgmlType(11, "Q3_K", 256, 110),
        GgmlType(12, "Q4_K", 256, 144),
        GgmlType(13, "Q5_K", 256, 176),
        GgmlType(14, "Q6_K", 256, 210),
        GgmlType(20, "IQ4_NL", 32, 18),
        GgmlType(23, "IQ4_XS", 256, 136),
        GgmlType(30, "BF16", 1, 2),
    )
}
