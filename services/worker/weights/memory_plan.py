"""Says what a model will take in memory, before it takes it."""

import math
from dataclasses import dataclass
from typing import Protocol

from services.common.errors import EngineError, ErrorReason
from services.worker.model_config import ModelConfig
from services.worker.weights.layout import expected_tensors, layer_tensors

_SCRATCH_BYTES = 16 << 20
_MIB = 1 << 20


class NumberType(Protocol):
    """A type of numbers; ``torch.dtype`` and ``numpy.dtype`` are such."""

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""
        ...


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The cost of one model in one dtype.

    Attributes:
        weights_bytes: Held for as long as the model is loaded.
        peak_extra_bytes: Needed on top while loading: the parts of a layer lie beside the fused matrices built from
            them, or a copy of the embedding beside itself, plus the reader's buffers.
        kv_values_per_token: Numbers that the KV cache stores for a position, over all layers.
    """

    weights_bytes: int
    peak_extra_bytes: int
    kv_values_per_token: int

    def kv_bytes_per_block(self, block_size: int, dtype: NumberType) -> int:
        """Bytes of one KV block of ``block_size`` positions, over all layers, keys and values together."""
        return self.kv_values_per_token * block_size * dtype.itemsize

    def check(self, available_bytes: int, *, kv_cache_bytes: int = 0) -> None:
        """Refuse the model when it does not fit.

        Args:
            available_bytes: What the device may still give out.
            kv_cache_bytes: What the KV cache will take besides the weights.

        Raises:
            EngineError: MODEL_LOAD_FAILED, saying how much is needed, available and missing.
        """
        # Loading is over before the cache is allocated, so the larger of the two extras decides.
        needed_bytes = self.weights_bytes + max(self.peak_extra_bytes, kv_cache_bytes)
        missing_bytes = needed_bytes - available_bytes
        if missing_bytes <= 0:
            return
        raise EngineError(
            ErrorReason.MODEL_LOAD_FAILED,
            f"the model does not fit: it needs {_mib(needed_bytes)} ({_mib(self.weights_bytes)} of weights and "
            f"{_mib(needed_bytes - self.weights_bytes)} beside them), {_mib(available_bytes)} are available, "
            f"{_mib(missing_bytes)} are missing; free memory, or choose a smaller model, dtype or KV cache",
            needed_bytes=str(needed_bytes),
            available_bytes=str(available_bytes),
            missing_bytes=str(missing_bytes),
        )


def plan_memory(config: ModelConfig, dtype: NumberType) -> MemoryPlan:
    """Work out the memory plan of a model from its configuration alone."""
    num_values = sum(math.prod(shape) for shape in expected_tensors(config).values())
    layer_values = sum(math.prod(shape) for _, shape in layer_tensors(config))
    embedding_values = config.vocab_size * config.hidden_size
    return MemoryPlan(
        weights_bytes=num_values * dtype.itemsize,
        peak_extra_bytes=max(layer_values, embedding_values) * dtype.itemsize + _SCRATCH_BYTES,
        kv_values_per_token=2 * config.num_layers * config.num_kv_heads * config.head_dim,
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:,.0f} MiB"
