"""A whole decoder of the Llama family: one native call a step.

Owns: the library's model handle and its scratch memory. The weights stay the caller's, usually views of a memory map;
`CpuModel` keeps them alive. Guarantees: a step's results for a request do not depend on what else is in the step.
"""

import contextlib
import ctypes
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from treadle_kernels.cpu.formats import ActivationFormat
from treadle_kernels.cpu.kv_cache import Int32s, KvCache, StepRows
from treadle_kernels.cpu.library import address, call, load
from treadle_kernels.cpu.packing import PackedLinear
from treadle_kernels.cpu.sampling import SAMPLING_DTYPE
from treadle_kernels.cpu.structs import NUM_PHASES, LayerStruct, ModelStruct
from treadle_kernels.cpu.threads import ThreadPool

Floats = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]


class StepPhase(IntEnum):
    """Parts of a step, by their place in `CpuModel.phase_seconds`."""

    EMBED = 0
    NORM = 1
    QKV = 2
    ROTATE = 3
    ATTENTION = 4
    OUTPUT = 5
    GATE_UP = 6
    DOWN = 7
    HEAD = 8
    SAMPLE = 9


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder and of its steps.

    Attributes:
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the gated MLP.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Width of a head.
        vocab_size: Rows of embedding and logits.
        rms_norm_eps: Added to the mean square before the root.
        sliding_window: Positions that a token sees, its own included; None sees all.
        max_num_tokens: Most tokens of a step; sizes the scratch memory.
        max_num_sampled: Most tokens chosen in a step; likewise.
        activations: What quantised weights are multiplied with; see `fastest_activations`.
        activation_terms: How many numbers make up an activation, each of about 8 bits: 1 or 2 with INT8, 2 with SPLIT,
            1 with ROTATED and BF16.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    sliding_window: int | None
    max_num_tokens: int
    max_num_sampled: int
    activations: ActivationFormat = ActivationFormat.INT8
    activation_terms: int = 2


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; norms are ``[hidden_size]`` float32, head norms ``[head_dim]`` or None."""

    attention_norm: Floats
    query: PackedLinear
    key: PackedLinear
    value: PackedLinear
    output: PackedLinear
    mlp_norm: Floats
    gate: PackedLinear
    up: PackedLinear
    down: PackedLinear
    query_norm: Floats | None = None
    key_norm: Floats | None = None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights of a decoder.

    Attributes:
        embedding: ``[vocab_size, hidden_size]``.
        layers: In order.
        final_norm: ``[hidden_size]`` float32.
        head: ``[vocab_size, hidden_size]``; the embedding itself where they are tied.
        rope_cos: ``[max_positions, head_dim / 2]`` float32, any attention factor multiplied in.
        rope_sin: Likewise.
    """

    embedding: PackedLinear
    layers: Sequence[LayerWeights]
    final_norm: Floats
    head: PackedLinear
    rope_cos: Floats
    rope_sin: Floats


@dataclass(frozen=True, slots=True)
class ObservedInputs:
    """Sums of squares of what linear layers took in the last step, by input; the same on every machine.

    Attributes:
        layers: Of each decoder layer, those of the projections to queries, keys and values ``[hidden_size]``, of the
            output projection ``[num_heads * head_dim]``, of gate and up ``[hidden_size]``, of down
            ``[intermediate_size]``. Views of the engine's memory.
        head: ``[hidden_size]``, of the tokens that were sampled after.
    """

    layers: tuple[tuple[Float64s, ...], ...]
    head: Float64s


class CpuModel:
    """A decoder that is ready to run. One caller at a time, the pool's other users included.

    Args:
        shape: Sizes.
        weights: Kept alive, not copied.
        pool: Threads to use.

    Raises:
        ValueError: a weight does not fit the shape.
    """

    def __init__(self, shape: ModelShape, weights: ModelWeights, pool: ThreadPool) -> None:
        self.shape = shape
        self._weights = weights
        self._pool = pool
        layers = (LayerStruct * len(weights.layers))(*(_layer_struct(layer, shape) for layer in weights.layers))
        half, max_positions = shape.head_dim // 2, weights.rope_cos.shape[0]
        description = ModelStruct(
            layers=layers,
            final_norm=address(weights.final_norm, "final_norm", np.float32, shape.hidden_size),
            rope_cos=address(weights.rope_cos, "rope_cos", np.float32, max_positions, half),
            rope_sin=address(weights.rope_sin, "rope_sin", np.float32, max_positions, half),
            embedding=weights.embedding.struct(),
            head=weights.head.struct(),
            num_layers=len(weights.layers),
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            vocab_size=shape.vocab_size,
            max_positions=max_positions,
            sliding_window=shape.sliding_window or 0,
            rms_norm_eps=shape.rms_norm_eps,
            max_num_tokens=shape.max_num_tokens,
            max_num_sampled=shape.max_num_sampled,
            activations=shape.activations,
            activation_terms=shape.activation_terms,
        )
        handle = ctypes.c_void_p()
        call("treadle_model_create", ctypes.byref(description), pool.handle, ctypes.byref(handle))
        self._handle = handle
        # The pool is an argument so that it outlives the model.
        self._finalizer = weakref.finalize(self, _destroy, handle, pool)

    @property
    def scratch_bytes(self) -> int:
        """Memory that the model holds besides the weights."""
        return int(load().treadle_model_scratch_bytes(self._handle))

    def phase_seconds(self) -> npt.NDArray[np.float64]:
        """Return where the last step's time went, by `StepPhase`."""
        seconds = np.zeros(NUM_PHASES, dtype=np.float64)
        load().treadle_model_phase_seconds(self._handle, seconds.ctypes.data)
        return seconds

    @contextlib.contextmanager
    def observed(self) -> Iterator["ObservedInputs"]:
        """Have steps write down how large the inputs of linear layers are, while the context lasts."""
        shape = self.shape
        widths = (shape.hidden_size, shape.num_heads * shape.head_dim, shape.hidden_size, shape.intermediate_size)
        squares = np.zeros(len(self._weights.layers) * sum(widths) + shape.hidden_size, dtype=np.float64)
        call("treadle_model_observe", self._handle, squares.ctypes.data, len(squares))
        try:
            *layers, head = np.split(squares, np.cumsum(widths * len(self._weights.layers)))
            starts = range(0, len(layers), len(widths))
            yield ObservedInputs(tuple(tuple(layers[start : start + len(widths)]) for start in starts), head)
        finally:
            call("treadle_model_observe", self._handle, None, 0)

    def step(
        self,
        cache: KvCache,
        rows: StepRows,
        token_ids: Int32s,
        sampling: npt.NDArray[np.void],
        logits: Floats | None = None,
    ) -> Int32s:
        """Run one step: write keys and values, choose tokens. Modifies ``cache`` and ``logits``.

        Args:
            cache: Keys and values of the requests.
            rows: The step's tokens.
            token_ids: ``[num_tokens]``.
            sampling: ``[num_sampled]`` of `SAMPLING_DTYPE`, which tokens to choose and how.
            logits: ``[num_sampled, vocab_size]`` to fill, or None.

        Returns:
            ``[num_sampled]`` token ids, `treadle_kernels.cpu.sampling.NOT_FINITE` where the logits are not finite.

        Raises:
            ValueError: an argument is out of range; nothing was changed.
        """
        num_sampled = len(sampling)
        sampled = np.empty(num_sampled, dtype=np.int32)
        rows_struct = rows.struct()
        call(
            "treadle_model_step",
            self._handle,
            ctypes.byref(cache.struct),
            ctypes.byref(rows_struct),
            address(token_ids, "token_ids", np.int32, rows.num_tokens),
            address(sampling, "sampling", SAMPLING_DTYPE, num_sampled),
            num_sampled,
            sampled.ctypes.data,
            address(logits, "logits", np.float32, num_sampled, self.shape.vocab_size),
        )
        return sampled


def _layer_struct(layer: LayerWeights, shape: ModelShape) -> LayerStruct:
    return LayerStruct(
        attention_norm=address(layer.attention_norm, "attention_norm", np.float32, shape.hidden_size),
        mlp_norm=address(layer.mlp_norm, "mlp_norm", np.float32, shape.hidden_size),
        query_norm=address(layer.query_norm, "query_norm", np.float32, shape.head_dim),
        key_norm=address(layer.key_norm, "key_norm", np.float32, shape.head_dim),
        query=layer.query.struct(),
        key=layer.key.struct(),
        value=layer.value.struct(),
        output=layer.output.struct(),
        gate=layer.gate.struct(),
        up=layer.up.struct(),
        down=layer.down.struct(),
    )


def _destroy(handle: ctypes.c_void_p, pool: ThreadPool) -> None:
    load().treadle_model_destroy(handle)
    del pool
