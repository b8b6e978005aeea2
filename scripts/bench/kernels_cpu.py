"""Times the CPU engine: linear layers, whole steps and prefill of a model of SmolLM2-135M's shape with random weights.

Run as ``python scripts/bench/kernels_cpu.py [--threads 2] [--isa amx] [--repeats 9]``. Each figure is the least of
some repeats, since other work on the machine can only add to it. Roofs are measured first: reading memory, and what the
integer instructions reach on weights in the second-level cache. No model file is needed.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels"))

import numpy as np
import numpy.typing as npt

from treadle_kernels import cpu
from treadle_kernels.cpu import (
    SAMPLING_DTYPE,
    ActivationFormat,
    CpuModel,
    KvCache,
    KvDtype,
    KvShape,
    LayerWeights,
    ModelShape,
    ModelWeights,
    PackedLinear,
    StepPhase,
    StepRows,
    ThreadPool,
    WeightFormat,
)

HIDDEN, WIDTH, NUM_LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 576, 1536, 30, 9, 3, 64, 49152
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 512)
BLOCK_SIZE = 32
MAX_TOKENS = 1024
_MOST_WEIGHT_BYTES = 1 << 30  # reserved; what is not written takes no memory


@dataclass(frozen=True)
class Setup:
    """What is timed."""

    model: CpuModel
    weights: ModelWeights
    pool: ThreadPool
    cache: KvCache
    repeats: int
    activations: ActivationFormat
    terms: int

    @property
    def layers(self) -> Sequence[PackedLinear]:
        """Every linear layer in order, the head aside."""
        found: list[PackedLinear] = []
        for layer in self.weights.layers:
            found += [layer.query, layer.key, layer.value, layer.output, layer.gate, layer.up, layer.down]
        return found


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", choices=cpu.available_isas(), default=cpu.current_isa())
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--format", choices=[f.name for f in WeightFormat], default="Q4_1", help="of the layers")
    parser.add_argument("--head-format", choices=[f.name for f in WeightFormat], default="Q8_0")
    parser.add_argument(
        "--activations", choices=[f.name for f in ActivationFormat], help="default: what is fastest here"
    )
    parser.add_argument("--terms", type=int, choices=(1, 2), help="of INT8 activations; default: 2")
    parser.add_argument("--kv", choices=[d.name for d in KvDtype], default="BF16")
    options = parser.parse_args()
    cpu.select_isa(options.isa)
    setup = build(options)
    memory_gb_s = measure_memory(setup)
    fork_join_us = 1e6 * best(setup, lambda: setup.pool.measure_fork_join_s(200), is_seconds=True)
    print(
        f"{options.isa}, {options.threads} threads, activations {setup.activations.name} x {setup.terms}, "
        f"layers {options.format}, head {options.head_format}, "
        f"KV {options.kv}: "
        f"memory {memory_gb_s:.1f} GB/s, fork and join {fork_join_us:.2f} µs"
    )
    print_steps(setup, memory_gb_s)
    print_prefill(setup)


def build(options: argparse.Namespace) -> Setup:
    """Make a random model; the embedding is the head, as in SmolLM2."""
    rng = np.random.default_rng(0)
    pool = ThreadPool(options.threads)
    activations = ActivationFormat[options.activations] if options.activations else cpu.fastest_activations()
    is_rotated = activations == ActivationFormat.ROTATED
    terms = options.terms or activations.most_terms

    # One piece of memory, as the worker's file of packed weights is.
    memory, taken = cpu.aligned_bytes(_MOST_WEIGHT_BYTES), 0

    def linear(n: int, k: int, weight_format: WeightFormat) -> PackedLinear:
        nonlocal taken
        out = memory[taken : taken + cpu.packed_bytes(weight_format, n, k)]
        taken += out.nbytes
        return cpu.pack_linear(weight_format, random_raw(rng, weight_format, n, k), n, k, out=out)

    of_layers = WeightFormat.ROTATED if is_rotated else WeightFormat[options.format]
    of_head = WeightFormat.ROTATED if is_rotated else WeightFormat[options.head_format]
    head = linear(VOCABULARY, HIDDEN, of_head)
    norm = np.ones(HIDDEN, dtype=np.float32)
    layers = [
        LayerWeights(
            attention_norm=norm,
            query=linear(HEADS * HEAD_DIM, HIDDEN, of_layers),
            key=linear(KV_HEADS * HEAD_DIM, HIDDEN, of_layers),
            value=linear(KV_HEADS * HEAD_DIM, HIDDEN, of_layers),
            output=linear(HIDDEN, HEADS * HEAD_DIM, of_layers),
            mlp_norm=norm,
            gate=linear(WIDTH, HIDDEN, of_layers),
            up=linear(WIDTH, HIDDEN, of_layers),
            down=linear(HIDDEN, WIDTH, of_layers),
        )
        for _ in range(NUM_LAYERS)
    ]
    angles = np.outer(np.arange(8192), 1e5 ** -(np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2)))
    weights = ModelWeights(
        head, layers, norm, head, np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    )
    shape = ModelShape(
        HIDDEN, WIDTH, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY, 1e-5, None, MAX_TOKENS, 128, activations, terms
    )
    cache = KvCache(KvShape(NUM_LAYERS, KV_HEADS, HEAD_DIM, KvDtype[options.kv], BLOCK_SIZE), 64 * 17 + 40)
    # Memory that was never written is one page of zeros for all, which no core waits for.
    cache.memory[:] = 0
    return Setup(CpuModel(shape, weights, pool), weights, pool, cache, options.repeats, activations, terms)


def random_raw(rng: np.random.Generator, weight_format: WeightFormat, n: int, k: int) -> npt.NDArray[np.uint8]:
    """Random weights as a file holds them, their scales about right for activations of unit size."""
    num_bytes = cpu.raw_bytes(weight_format, n, k)
    if weight_format.block_size == 1 or weight_format == WeightFormat.ROTATED:
        numbers = rng.standard_normal((n, k), dtype=np.float32) / np.float32(k**0.5)
        if weight_format == WeightFormat.BF16:
            return np.ascontiguousarray(numbers.view(np.uint16)[:, 1::2]).view(np.uint8)
        return numbers.astype(np.float16 if weight_format == WeightFormat.F16 else np.float32).view(np.uint8)
    raw = rng.integers(0, 256, num_bytes, dtype=np.uint8)
    blocks = raw.reshape(n * k // weight_format.block_size, -1)
    has_minimum = weight_format in (WeightFormat.Q4_1, WeightFormat.Q5_1, WeightFormat.Q4_K, WeightFormat.Q5_K)
    last = blocks.shape[1] - 2
    offsets = (last,) if weight_format == WeightFormat.Q6_K else (0, 2) if has_minimum else (0,)
    blocks[:, [o + i for o in offsets for i in (0, 1)]] = np.tile(
        np.array([0.02 / k**0.5], dtype=np.float16).view(np.uint8), len(offsets)
    )
    return raw


def best(setup: Setup, action: Callable[[], float | None], *, is_seconds: bool = False) -> float:
    """Least seconds of some runs; ``is_seconds``: the action says itself how long it took."""
    seconds = []
    for _ in range(setup.repeats):
        start = time.perf_counter()
        told = action()
        taken = time.perf_counter() - start
        seconds.append(told if is_seconds and told is not None else taken)
    return min(seconds)


def measure_memory(setup: Setup) -> float:
    """GB/s of reading weights with all threads: one token through a layer far larger than the caches of a core.

    Uses int8 weights, whose arithmetic is least for their bytes.
    """
    n, k = 65536, 1024
    raw = np.zeros(cpu.raw_bytes(WeightFormat.Q8_0, n, k), dtype=np.uint8)
    weights = cpu.pack_linear(WeightFormat.Q8_0, raw, n, k)
    x, out = np.ones((1, k), dtype=np.float32), np.empty((1, n), dtype=np.float32)
    return weights.data.nbytes / best(setup, lambda: void(cpu.linear(setup.pool, weights, x, out))) / 1e9


def void(_: object) -> None:
    """Drop a result."""


def time_linear(setup: Setup, m: int) -> float:
    """Seconds of all linear layers for m rows; the head for at most 128 of them, as in a step, one beyond 64 rows."""
    rng = np.random.default_rng(1)
    x = {k: rng.standard_normal((m, k), dtype=np.float32) for k in (HIDDEN, WIDTH)}
    out = {layer.n: np.empty((m, layer.n), dtype=np.float32) for layer in setup.layers}
    head_x = np.ascontiguousarray(x[HIDDEN][: head_rows(m)])
    logits = np.empty((len(head_x), VOCABULARY), dtype=np.float32)

    def run() -> None:
        for layer in setup.layers:
            cpu.linear(setup.pool, layer, x[layer.k], out[layer.n], activations=setup.activations)
        cpu.linear(setup.pool, setup.weights.head, head_x, logits, activations=setup.activations)

    return best(setup, run)


def head_rows(m: int) -> int:
    """Rows whose logits a step of m tokens needs: all of a decode batch, one of a prompt."""
    return m if m <= 64 else 1


def decode_arguments(m: int, context: int) -> tuple[StepRows, npt.NDArray[np.int32], npt.NDArray[np.void]]:
    """A step of m requests with one token each."""
    blocks = -(-context // BLOCK_SIZE)
    ids = np.arange(1, 1 + m * blocks, dtype=np.int32)
    rows = StepRows(
        query_starts=np.arange(m + 1, dtype=np.int32),
        context_lens=np.full(m, context, dtype=np.int32),
        block_ids=ids,
        block_starts=np.arange(0, m * blocks + 1, blocks, dtype=np.int32),
    )
    sampling = np.zeros(head_rows(m), dtype=SAMPLING_DTYPE)
    sampling["token_index"], sampling["top_p"] = np.arange(head_rows(m)), 1
    return rows, np.arange(100, 100 + m, dtype=np.int32), sampling


def print_steps(setup: Setup, memory_gb_s: float) -> None:
    """Decode steps at context 256 by batch, beside the linear layers alone and the time to read the weights."""
    weight_bytes = sum(layer.data.nbytes for layer in setup.layers) + setup.weights.head.data.nbytes
    operations = 2 * sum(layer.n * layer.k for layer in setup.layers)
    print(f"weights {weight_bytes / 1e6:.1f} MB: at least {weight_bytes / memory_gb_s / 1e6:.2f} ms a step")
    print("   M | linear ms | step ms | tok/s | weights GB/s | of memory roof | TOP/s | phases of the step, ms")
    for m in BATCHES:
        linear_s = time_linear(setup, m)
        step_s, phases = time_step(setup, *decode_arguments(m, 256 if m <= 128 else 64))
        gb_s = weight_bytes / step_s / 1e9
        top_s = (operations * m + 2 * HIDDEN * VOCABULARY * head_rows(m)) / linear_s / 1e12
        print(
            f"{m:4} | {1e3 * linear_s:9.2f} | {1e3 * step_s:7.2f} | {m / step_s:5.0f} | {gb_s:12.1f} |"
            f" {gb_s / memory_gb_s:14.0%} | {top_s:5.2f} | {phases}"
        )


def time_step(
    setup: Setup, rows: StepRows, token_ids: npt.NDArray[np.int32], sampling: npt.NDArray[np.void]
) -> tuple[float, str]:
    """Least seconds of a step, and the phases of that run."""
    best_s, best_phases = float("inf"), np.zeros(len(StepPhase))
    for _ in range(setup.repeats):
        start = time.perf_counter()
        setup.model.step(setup.cache, rows, token_ids, sampling)
        taken = time.perf_counter() - start
        if taken < best_s:
            best_s, best_phases = taken, setup.model.phase_seconds()
    return best_s, " ".join(f"{phase.name.lower()} {1e3 * best_phases[phase]:.2f}" for phase in StepPhase)


def print_prefill(setup: Setup) -> None:
    """One prompt of 1,024 tokens, whole and in chunks."""
    num_tokens = 1024
    table = np.arange(1, 1 + num_tokens // BLOCK_SIZE, dtype=np.int32)
    sampling = np.zeros(1, dtype=SAMPLING_DTYPE)
    sampling["top_p"] = 1
    for chunk in (1024, 512, 128):
        seconds, phases = 0.0, ""
        for start in range(0, num_tokens, chunk):
            blocks = (start + chunk) // BLOCK_SIZE
            rows = StepRows(
                query_starts=np.array([0, chunk], dtype=np.int32),
                context_lens=np.array([start + chunk], dtype=np.int32),
                block_ids=table[:blocks],
                block_starts=np.array([0, blocks], dtype=np.int32),
            )
            sampling["token_index"] = chunk - 1
            taken, phases = time_step(setup, rows, np.arange(chunk, dtype=np.int32), sampling)
            seconds += taken
        print(
            f"prefill 1024 in chunks of {chunk}: {1e3 * seconds:.1f} ms, {num_tokens / seconds:.0f} tok/s"
            f" (last chunk: {phases})"
        )


if __name__ == "__main__":
    main()
