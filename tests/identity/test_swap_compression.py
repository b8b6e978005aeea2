"""What int8 in the host tier does to the default model: the error of keys and values, and of predictions after them."""

from collections.abc import Iterator

import numpy as np
import pytest

from services.gateway.tokenizer import load_tokenizer
from services.worker.host_codec import Int8Codec
from tests.kernels.cpu_models import Request, disjoint_tables, load_native, logits_of, make_cache
from tests.kernels.public_domain_text import TEXTS
from tests.kernels.test_cpu_smollm2 import NUM_LAYERS, surprise
from treadle_kernels import cpu
from treadle_kernels.cpu import KvCache, KvDtype, ThreadPool

pytestmark = [
    pytest.mark.skipif(not cpu.is_available(), reason=str(cpu.unavailable_reason())),
    pytest.mark.model,
    pytest.mark.slow,
]

NUM_TOKENS = 480
NUM_SWAPPED_TOKENS = 240
"""The beginning is swapped out and in; the surprise at what follows is compared."""


@pytest.fixture(scope="module")
def native(model_path):
    return load_native(model_path, ThreadPool(1))


@pytest.fixture(scope="module")
def texts(model_path):
    tokenizer = load_tokenizer(model_path)
    return [tokenizer.encode(text, add_special_tokens=False)[:NUM_TOKENS] for text in TEXTS]


def swap(cache: KvCache) -> float:
    """Write all blocks as int8 and read them back; return the largest error of a number."""
    codec = Int8Codec(cache.shape.bytes_per_block(), cache.shape.head_dim, "bfloat16")
    returned = codec.decode(codec.encode(cache.memory))
    error = np.nanmax(np.abs(to_floats(returned) - to_floats(cache.memory)))  # blocks never written hold NaN
    cache.memory[:] = returned
    return float(error)


def to_floats(memory: np.ndarray) -> np.ndarray:
    return (memory.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def test_perplexity_after_a_compressed_swap_is_within_two_percent(native, texts):
    largest_error = 0.0
    found: dict[bool, list[np.ndarray]] = {False: [], True: []}
    for token_ids in texts:
        request = Request(token_ids, disjoint_tables(np.random.default_rng(1), [len(token_ids)])[0])
        for is_swapped in found:
            cache = make_cache(native, NUM_LAYERS, dtype=KvDtype.BF16)

            def steps(cache: KvCache, num_tokens: int, *, is_swapped: bool) -> Iterator[list[tuple[int, int]]]:
                nonlocal largest_error
                yield [(0, NUM_SWAPPED_TOKENS)]
                if is_swapped:
                    largest_error = max(largest_error, swap(cache))
                yield [(0, num_tokens - NUM_SWAPPED_TOKENS)]

            plan = steps(cache, len(token_ids), is_swapped=is_swapped)
            (logits,) = logits_of(native, cache, [request], plan)
            found[is_swapped].append(surprise(logits, token_ids)[NUM_SWAPPED_TOKENS:])
    plain, compressed = (np.concatenate(found[is_swapped]) for is_swapped in (False, True))
    change = compressed - plain
    relative, error = float(np.expm1(change.mean())), float(change.std() / len(change) ** 0.5)
    print(
        f"perplexity over {len(change)} tokens: {relative:+.3%} ± {error:.3%} of {np.exp(plain.mean()):.3f}; "
        f"largest error of a number: {largest_error:.3f}"
    )
    assert len(change) > 100
    assert 0 < largest_error < 1
    # Any change of a number moves single tokens by 8 % either way, through the 8 bits of activations: mostly noise.
    assert abs(relative) < 0.02
