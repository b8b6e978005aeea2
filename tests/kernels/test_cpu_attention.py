"""Attention of the CPU engine: against numpy, and against itself over chunks, batches, threads and instruction sets."""

import numpy as np
import pytest

from tests.kernels.cpu_references import ISAS, attention_reference, make_rows, random_floats, step_rows, sum_of_terms
from tests.pairs import pairs
from treadle_kernels import cpu
from treadle_kernels.cpu import KvCache, KvDtype, KvShape, ThreadPool

pytestmark = pytest.mark.skipif(not cpu.is_available(), reason=str(cpu.unavailable_reason()))

# Keys and values lose bits on their way into the cache: 8 of 24 for bfloat16, 1 in 127 of the largest for int8.
TOLERANCE = {KvDtype.F32: 2e-6, KvDtype.BF16: 2e-2, KvDtype.INT8: 4e-2}
# Of a cache, and terms of queries and weights over it: what these lose as one or two bfloat16 terms, of 8 and 17 bits,
# or as whole numbers of 15 bits over int8 codes.
TOLERANCE_OF_PRODUCTS = {(KvDtype.BF16, 1): 2e-2, (KvDtype.BF16, 2): 5e-5, (KvDtype.INT8, 0): 5e-4}
# These, and float32.
ARITHMETICS = [(KvDtype.F32, 0), (KvDtype.BF16, 0), *TOLERANCE_OF_PRODUCTS]
arithmetics = pytest.mark.parametrize(("dtype", "terms"), ARITHMETICS, ids=str)


def as_cached(x, dtype):
    """What a cache holds of keys or values."""
    if dtype == KvDtype.BF16:
        return sum_of_terms(x, 1)
    largest = np.abs(x).max(axis=-1, keepdims=True)
    return np.rint(x * (np.float32(127) / largest)) * (largest / np.float32(127)).astype(np.float64)


class Request:
    """Keys, values and queries of one request, and its blocks."""

    def __init__(self, rng, length, heads, kv_heads, head_dim, table):
        self.qkv = random_floats(rng, length, (heads + 2 * kv_heads) * head_dim)
        self.table = table
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim

    def expected(self, window=None, *, cached_as=None):
        rows = self.qkv.astype(np.float64).reshape(len(self.qkv), -1, self.head_dim)
        query, keys, values = np.split(rows, [self.heads, self.heads + self.kv_heads], axis=1)
        if cached_as is not None:
            keys, values = (as_cached(x.astype(np.float32), cached_as) for x in (keys, values))
        return np.stack(
            [
                attention_reference(query[p], keys, values, position=p, window=window).reshape(-1)
                for p in range(len(rows))
            ]
        )


def make_requests(rng, lengths, *, heads=6, kv_heads=2, head_dim=32, block_size=32, num_blocks=128):
    free = list(rng.permutation(np.arange(1, num_blocks)))
    return [
        Request(rng, n, heads, kv_heads, head_dim, [free.pop() for _ in range(-(-n // block_size))]) for n in lengths
    ]


def make_cache(*, kv_heads=2, head_dim=32, dtype=KvDtype.F32, block_size=32, num_blocks=128):
    """A cache full of NaN, as bytes 0xff are in every format that has one."""
    cache = KvCache(KvShape(3, kv_heads, head_dim, dtype, block_size), num_blocks)
    cache.memory[:] = 0xFF
    return cache


def run(requests, cache, plan, *, threads=2, window=None, terms=0):
    """Run a list of steps, each a list of (request, new tokens); return each request's outputs."""
    pool = ThreadPool(threads)
    computed = [0] * len(requests)
    outputs = [[] for _ in requests]
    for step in plan:
        rows, tables, qkv = [], [], []
        for index, count in step:
            request, start = requests[index], computed[index]
            computed[index] += count
            rows.append((count, start + count))
            tables.append(request.table[: -(-(start + count) // cache.shape.block_size)])
            qkv.append(request.qkv[start : start + count])
        heads = requests[0].heads
        out = cpu.attention(
            pool,
            cache,
            1,
            make_rows(rows, tables),
            np.concatenate(qkv),
            num_heads=heads,
            sliding_window=window,
            num_terms=terms,
        )
        for (index, count), end in zip(step, np.cumsum([count for _, count in step]), strict=True):
            outputs[index].append(out[end - count : end])
    return [np.concatenate(parts) for parts in outputs]


@pytest.mark.parametrize(("isa", "dtype", "window"), pairs(ISAS, list(KvDtype), [None, 1, 20, 150]), indirect=["isa"])
def test_a_prompt_attends_as_numpy_does(isa, dtype, window):
    rng = np.random.default_rng(1)
    requests = make_requests(rng, [300])
    (out,) = run(requests, make_cache(dtype=dtype), [[(0, 300)]], window=window)
    np.testing.assert_allclose(out, requests[0].expected(window), atol=TOLERANCE[dtype] * 4, rtol=0)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 80), (7, 1, 16), (2, 1, 10), (128, 1, 16), (5, 5, 256)]
)
def test_every_head_shape_attends_as_numpy_does(isa, heads, kv_heads, head_dim):
    rng = np.random.default_rng(2)
    requests = make_requests(rng, [150, 17], heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    cache = make_cache(kv_heads=kv_heads, head_dim=head_dim)
    outputs = run(requests, cache, [[(0, 140), (1, 16)], [(1, 1), (0, 9)], [(0, 1)]])
    for request, out in zip(requests, outputs, strict=True):
        np.testing.assert_allclose(out, request.expected(), atol=1e-5, rtol=0)


# Every shape with every window and number of terms is compared between instruction sets below.
@pytest.mark.parametrize(
    ("isa", "shape", "window", "arithmetic"),
    pairs(
        ISAS,
        [(6, 2, 32), (9, 3, 64), (8, 1, 80), (2, 1, 10), (128, 1, 16), (1, 1, 256)],
        [None, 20],
        list(TOLERANCE_OF_PRODUCTS),
    ),
    indirect=["isa"],
    ids=str,
)
def test_attention_is_as_numpy_computes_it_over_what_the_cache_holds(isa, shape, window, arithmetic):
    heads, kv_heads, head_dim = shape
    dtype, terms = arithmetic
    rng = np.random.default_rng(1)
    requests = make_requests(rng, [200, 19], heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    cache = make_cache(kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    outputs = run(requests, cache, [[(0, 199), (1, 18)], [(0, 1), (1, 1)]], window=window, terms=terms)
    for request, out in zip(requests, outputs, strict=True):
        expected = request.expected(window, cached_as=dtype)
        np.testing.assert_allclose(out, expected, atol=TOLERANCE_OF_PRODUCTS[arithmetic], rtol=0)


@pytest.mark.parametrize(
    ("isa", "arithmetic", "window"), pairs(ISAS, ARITHMETICS, [None, 40]), indirect=["isa"], ids=str
)
def test_outputs_have_the_same_bits_for_every_chunking_batch_and_number_of_threads(isa, arithmetic, window):
    dtype, terms = arithmetic
    rng = np.random.default_rng(3)
    requests = make_requests(rng, [290, 45, 130])
    plan = [[(0, 290)], [(1, 45)], [(2, 130)]]
    whole = run(requests, make_cache(dtype=dtype), plan, threads=1, window=window, terms=terms)
    plans = [
        [[(0, 290), (1, 45), (2, 130)]],
        [[(0, 1), (1, 45)], [(0, 16), (2, 2)], [(0, 111), (2, 128)], [(0, 162)]],
        [[(2, 130), (0, 250)], *([[(0, 1), (1, 1)]] * 40), [(1, 5)]],
    ]
    for number, plan in enumerate(plans):
        outputs = run(requests, make_cache(dtype=dtype), plan, threads=number + 1, window=window, terms=terms)
        for out, expected in zip(outputs, whole, strict=True):
            np.testing.assert_array_equal(out, expected)


def outputs_by_isa(requests, plan, *, dtype, window=None, terms=0, block_size=32):
    """Outputs of every instruction set with fused products."""
    before = cpu.current_isa()
    results = {}
    for name in ISAS:
        cpu.select_isa(name)
        if name != "plain":
            request = requests[0]
            cache = make_cache(dtype=dtype, kv_heads=request.kv_heads, head_dim=request.head_dim, block_size=block_size)
            results[name] = run(requests, cache, plan, window=window, terms=terms)
    cpu.select_isa(before)
    return results


def assert_all_the_same(results):
    first, *others = results.values()
    for other in others:
        for out, expected in zip(other, first, strict=True):
            np.testing.assert_array_equal(out, expected)


@arithmetics
def test_instruction_sets_with_fused_products_give_the_same_bits(dtype, terms):
    requests = make_requests(np.random.default_rng(4), [200], head_dim=24)
    assert_all_the_same(outputs_by_isa(requests, [[(0, 100)], *([[(0, 1)]] * 100)], dtype=dtype, terms=terms))


@pytest.mark.parametrize(("dtype", "terms"), TOLERANCE_OF_PRODUCTS, ids=str)
@pytest.mark.parametrize("window", [None, 1, 33, 150])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(3, 3, 32), (9, 3, 64), (8, 1, 80), (3, 1, 96), (8, 1, 128), (20, 2, 64), (2, 2, 2), (5, 5, 258), (100, 1, 16)],
)
def test_every_instruction_set_gives_the_same_bits_for_every_head_shape(
    heads, kv_heads, head_dim, window, dtype, terms
):
    rng = np.random.default_rng(10)
    requests = make_requests(rng, [279, 14], heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    plan = [[(0, 131)], [(0, 17), (1, 11)], *([[(0, 1), (1, 1)]] * 3), [(0, 128)]]
    assert_all_the_same(outputs_by_isa(requests, plan, dtype=dtype, window=window, terms=terms))


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("terms", [1, 2])
def test_every_instruction_set_gives_the_same_bits_for_long_prompts_in_blocks_of_any_size(terms, window):
    # Most steps see whole partitions, several of which follow each other.
    plan = [[(0, 437)], [(0, 230)], [(0, 33)]]
    results = {}
    for block_size in (16, 32, 48, 128):
        shape = {"heads": 9, "kv_heads": 3, "head_dim": 64, "block_size": block_size}
        requests = make_requests(np.random.default_rng(14), [700], **shape)
        requests[0].qkv = random_floats(np.random.default_rng(15), *requests[0].qkv.shape)
        by_isa = outputs_by_isa(requests, plan, dtype=KvDtype.BF16, window=window, terms=terms, block_size=block_size)
        results |= {(isa, block_size): outputs for isa, outputs in by_isa.items()}
    assert_all_the_same(results)


@pytest.mark.parametrize(("dtype", "terms"), TOLERANCE_OF_PRODUCTS, ids=str)
def test_numbers_near_nothing_have_the_same_bits_on_every_instruction_set(dtype, terms):
    # Tile products take denormal numbers for zero, which vector instructions do not: none may ever come up.
    rng = np.random.default_rng(11)
    requests = make_requests(rng, [70], head_dim=64)
    magnitudes = 2.0 ** rng.integers(-140, 8, requests[0].qkv.shape)
    requests[0].qkv = (requests[0].qkv * magnitudes).astype(np.float32)
    results = outputs_by_isa(requests, [[(0, 60)], [(0, 10)]], dtype=dtype, terms=terms)
    assert_all_the_same(results)
    assert np.isfinite(next(iter(results.values()))[0]).all()


@pytest.mark.parametrize("block_size", [16, 32])
@arithmetics
def test_positions_behind_the_window_and_after_the_context_may_hold_anything(isa, dtype, terms, block_size):
    window = 40
    requests = make_requests(np.random.default_rng(12), [210], block_size=block_size)
    table = requests[0].table
    caches = [make_cache(dtype=dtype, block_size=block_size) for _ in range(2)]
    for cache in caches:
        run(requests, cache, [[(0, 205)]], window=window, terms=terms)
    # The first of the five new tokens, at 205, sees nothing before 166.
    caches[1].memory[table[: 166 // block_size]] = 0xFF
    rows = make_rows([(5, 210)], [table])
    first, second = (
        cpu.attention(
            ThreadPool(1), cache, 1, rows, requests[0].qkv[205:], num_heads=6, sliding_window=window, num_terms=terms
        )
        for cache in caches
    )
    np.testing.assert_array_equal(second, first)
    assert np.isfinite(first).all()


@arithmetics
def test_what_is_not_a_number_shows_and_reaches_nobody_who_does_not_see_it(isa, dtype, terms):
    requests = make_requests(np.random.default_rng(13), [60, 40], head_dim=64)
    requests[0].qkv[30, -5] = np.nan  # a value
    requests[0].qkv[40, -2 * 64 - 5] = np.inf  # a key
    cache = make_cache(dtype=dtype, head_dim=64)
    outputs = run(requests, cache, [[(0, 30), (1, 20)], *([[(0, 1), (1, 1)]] * 20), [(0, 10)]], terms=terms)
    assert np.isfinite(outputs[0][:30]).all()
    assert np.isnan(outputs[0][30:]).any(axis=1).all()
    assert np.isfinite(outputs[1]).all()


@pytest.mark.parametrize("terms", [1, 2])
def test_a_key_alone_that_is_not_a_number_shows_in_all_that_see_it(isa, terms):
    requests = make_requests(np.random.default_rng(16), [60], head_dim=64)
    requests[0].qkv[30, -4 * 64 : -3 * 64] = np.nan  # of one key head; the value is in order
    cache = make_cache(dtype=KvDtype.BF16, head_dim=64)
    (out,) = run(requests, cache, [[(0, 30)], *([[(0, 1)]] * 30)], terms=terms)
    assert np.isfinite(out[:30]).all()
    assert np.isnan(out[30:, : 3 * 64]).all()
    assert np.isfinite(out[:, 3 * 64 :]).all()


@pytest.mark.parametrize("terms", [1, 2])
def test_a_query_that_is_not_a_number_shows(isa, terms):
    requests = make_requests(np.random.default_rng(17), [60], head_dim=64)
    requests[0].qkv[30, 5] = np.nan
    (out,) = run(requests, make_cache(dtype=KvDtype.BF16, head_dim=64), [[(0, 60)]], terms=terms)
    assert np.isnan(out[30, :64]).all()
    assert np.isfinite(np.delete(out, 30, axis=0)).all()


@arithmetics
def test_blocks_of_every_size_give_the_same_bits(isa, dtype, terms):
    outputs = []
    for block_size in (16, 32, 48, 64):
        requests = make_requests(np.random.default_rng(5), [90], block_size=block_size)
        requests[0].qkv = random_floats(np.random.default_rng(6), *requests[0].qkv.shape)
        cache = make_cache(dtype=dtype, block_size=block_size)
        outputs += run(requests, cache, [[(0, 50)], [(0, 40)]], terms=terms)
    for other in outputs[1:]:
        np.testing.assert_array_equal(other, outputs[0])


def test_a_block_may_be_moved_with_its_bytes(isa):
    requests = make_requests(np.random.default_rng(7), [64], block_size=16)
    cache, moved = (make_cache(dtype=KvDtype.INT8, block_size=16) for _ in range(2))
    (expected,) = run(requests, cache, [[(0, 60)], [(0, 4)]])
    run(requests, moved, [[(0, 60)]])
    places = [101, 57, 99, 3]
    saved = moved.memory[requests[0].table].copy()
    moved.memory[requests[0].table] = 0xFF
    moved.memory[places] = saved
    qkv = requests[0].qkv[60:]
    out = cpu.attention(ThreadPool(1), moved, 1, make_rows([(4, 64)], [places]), qkv, num_heads=6)
    np.testing.assert_array_equal(out, expected[60:])


def test_rows_without_tokens_are_passed_over(isa):
    rng = np.random.default_rng(8)
    requests = make_requests(rng, [40])
    expected = run(requests, make_cache(), [[(0, 40)]])[0]
    rows = make_rows([(0, 0), (40, 40), (0, 0)], [[], requests[0].table, []])
    out = cpu.attention(ThreadPool(2), make_cache(), 1, rows, requests[0].qkv, num_heads=6)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": [(17, 65)], "tables": [[1, 2]]}, "row 0: 2 blocks of 32 slots do not hold a context of 65"),
        ({"rows": [(17, 16)], "tables": [[1, 2]]}, "row 0: 17 tokens exceed the context of 16"),
        ({"rows": [(17, 32)], "tables": [[1, 128]]}, "row 0: block id 128 is outside the pool of 128"),
        ({"rows": [(17, 32)], "tables": [[1, -1]]}, "row 0: block id -1 is outside"),
        ({"layer": 3}, "layer must be from 0 to 2, is 3"),
        ({"num_terms": 3}, "num_terms must be from 0 to 2, is 3"),
        ({"num_heads": 5}, "num_heads must be a multiple of num_kv_heads 2, is 5|qkv must have shape"),
    ],
)
def test_a_wrong_step_is_refused_in_words(change, message):
    arguments = {"rows": [(17, 32)], "tables": [[1, 2]], "layer": 0, "num_heads": 6, "num_terms": 1} | change
    num_heads, num_terms = arguments["num_heads"], arguments["num_terms"]
    qkv = np.zeros((17, (num_heads + 4) * 32), dtype=np.float32)
    rows = make_rows(arguments["rows"], arguments["tables"])
    with pytest.raises(ValueError, match=message):
        cpu.attention(
            ThreadPool(1), make_cache(), arguments["layer"], rows, qkv, num_heads=num_heads, num_terms=num_terms
        )


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (KvShape(1, 1, 16, KvDtype.F32, 4), "block_size must be a multiple of 16, is 4"),
        (KvShape(1, 1, 15), "head_dim must be even"),
        (KvShape(0, 1, 16), "KV num_layers must be from 1"),
    ],
)
def test_a_wrong_cache_shape_is_refused_in_words(shape, message):
    with pytest.raises(ValueError, match=message):
        shape.bytes_per_block()


def test_random_rows_of_the_builder_share_no_block():
    rows = step_rows(np.random.default_rng(9), [(3, 40), (1, 17)])
    assert len(set(rows.block_ids)) == len(rows.block_ids) == 5
