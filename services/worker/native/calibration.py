"""How rotated layers and their activations share what rounding both to eight bits costs.

A product stays what it is if an input is divided by a factor and the weights it meets are multiplied with it. Rounding
makes errors in proportion to the size of a whole row, of inputs and of weights, and the error of a product is about the
product of the two sizes; over all factors that is least where a factor is the square root of the input's size over its
weights' (by Cauchy and Schwarz; the idea of moving size between the two is that of Xiao et al., SmoothQuant, 2023).
Dividing costs nothing when the model runs: before a layer comes a norm, whose weights are divided, or before `down` the
rows of `up`. What attention gives is left alone.

How large inputs are is seen by computing a step of the model with two terms, which every machine does with the same
bits. Its tokens are spread over the vocabulary: which inputs are large is a matter of the model, much less of the text.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.worker.native.packing import ChannelFactors, pack_tensors, sum_column_squares
from services.worker.native.recipe import Recipe
from services.worker.native.weights import EXACT_ARITHMETIC, model_shape, model_weights
from services.worker.weights import Checkpoint
from services.worker.weights.layout import EMBEDDING, FINAL_NORM, HEAD
from treadle_kernels.cpu import (
    SAMPLING_DTYPE,
    CpuModel,
    KvCache,
    KvDtype,
    KvShape,
    ObservedInputs,
    StepRows,
    ThreadPool,
    aligned_bytes,
)

Floats = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]

_NUM_TOKENS = 256
_BLOCK_SIZE = 16
_SPREAD = 2654435761  # Knuth's multiplier for hashing, The Art of Computer Programming, 6.4


def calibrate(checkpoint: Checkpoint, base: Recipe, num_threads: int) -> ChannelFactors:
    """Choose the factors of a model's rotated layers; the same on every machine.

    Args:
        checkpoint: The model.
        base: Of the same model with layers that are not rotated.
        num_threads: To compute with.

    Raises:
        EngineError: MODEL_LOAD_FAILED, when a file cannot be read.
    """
    weights = sum_column_squares(base)
    observed = _observe(checkpoint, base, num_threads)
    of_inputs: dict[str, Floats] = {}
    of_outputs: dict[str, Floats] = {}
    for place in _places(checkpoint.config.num_layers, observed):
        # The head of a model whose embedding is tied has the embedding's weights.
        squares = [weights[name] if name in weights else weights[EMBEDDING] for name in place.matrices]
        factors = balance(place.squares, np.sum(squares, axis=0))
        of_inputs |= dict.fromkeys(place.matrices, factors)
        of_outputs |= dict.fromkeys(place.divided, factors)
    return ChannelFactors(of_inputs, of_outputs)


def balance(inputs: Float64s, weights: Float64s) -> Floats:
    """Return the factors of inputs, from sums of squares ``[k]``. Pure.

    They have four significant bits, so that weights of few bits lose little when they are multiplied.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = np.sqrt(np.sqrt(inputs / weights))
    mantissas, exponents = np.frexp(np.where(np.isfinite(factors) & (factors > 0), factors, 1.0))
    rounded: Float64s = np.ldexp(np.rint(mantissas * 16) / 16, exponents)
    return rounded.astype(np.float32)


@dataclass(frozen=True, slots=True)
class _Place:
    """Matrices that take the same inputs, of those sums of squares; and what is divided before."""

    matrices: Sequence[str]
    divided: Sequence[str]
    squares: Float64s


def _places(num_layers: int, observed: ObservedInputs) -> Iterator[_Place]:
    for index in range(num_layers):
        attention, mlp = f"layers.{index}.self_attn", f"layers.{index}.mlp"
        of_attention, _, of_mlp, of_down = observed.layers[index]
        projections = [f"{attention}.{name}_proj.weight" for name in "qkv"]
        yield _Place(projections, [f"layers.{index}.input_layernorm.weight"], of_attention)
        gated = [f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"]
        yield _Place(gated, [f"layers.{index}.post_attention_layernorm.weight"], of_mlp)
        yield _Place([f"{mlp}.down_proj.weight"], [f"{mlp}.up_proj.weight", f"{mlp}.up_proj.bias"], of_down)
    yield _Place([HEAD], [FINAL_NORM], observed.head)


def _observe(checkpoint: Checkpoint, base: Recipe, num_threads: int) -> ObservedInputs:
    """Compute a step of one request."""
    packed = aligned_bytes(base.num_bytes)
    pack_tensors(base, packed)
    config = checkpoint.config
    num_tokens = min(_NUM_TOKENS, config.max_model_len)
    shape = model_shape(config, max_num_tokens=num_tokens, arithmetic=EXACT_ARITHMETIC)
    weights = model_weights(config, base, packed, max_positions=num_tokens)
    model = CpuModel(shape, weights, ThreadPool(num_threads))
    num_blocks = -(-num_tokens // _BLOCK_SIZE)
    kv_shape = KvShape(config.num_layers, config.num_kv_heads, config.head_dim, KvDtype.F32, _BLOCK_SIZE)
    rows = StepRows(
        query_starts=np.array([0, num_tokens], dtype=np.int32),
        context_lens=np.array([num_tokens], dtype=np.int32),
        block_ids=np.arange(1, num_blocks + 1, dtype=np.int32),
        block_starts=np.array([0, num_blocks], dtype=np.int32),
    )
    token_ids = (np.arange(num_tokens) * _SPREAD % 2**32 % config.vocab_size).astype(np.int32)
    sampling = np.zeros(num_tokens, dtype=SAMPLING_DTYPE)
    sampling["token_index"], sampling["top_p"] = np.arange(num_tokens), 1
    with model.observed() as observed:
        model.step(KvCache(kv_shape, num_blocks + 1), rows, token_ids, sampling)
    return observed
