"""Paged attention: its reference against dense attention by hand, its CPU path against the reference."""

import random

import pytest
import torch
import torch.nn.functional as F

from treadle_kernels.paged_attention import PagedBatch, cpu, paged_attention, reference
from treadle_kernels.paged_attention.gather_plan import padded_length

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def make_case(query_lens, context_lens, *, block_size=4, num_heads=6, num_kv_heads=2, head_dim=8, dtype=torch.float32):
    """Random rows over a shuffled pool; every slot outside the contexts but the null block's holds NaN."""
    generator = torch.Generator().manual_seed(1)
    num_blocks = 1 + sum(-(-context_len // block_size) for context_len in context_lens)
    free = list(range(1, num_blocks))
    random.Random(2).shuffle(free)
    cache = torch.full((num_blocks, block_size, 2, num_kv_heads, head_dim), float("nan"))
    cache[0] = 0
    tables, contexts = [], []
    for context_len in context_lens:
        table = [free.pop() for _ in range(-(-context_len // block_size))]
        context = torch.randn(context_len, 2, num_kv_heads, head_dim, generator=generator)
        for position in range(context_len):
            cache[table[position // block_size], position % block_size] = context[position]
        tables.append(table)
        contexts.append(context)
    query = torch.randn(sum(query_lens), num_heads, head_dim, generator=generator)
    return query.to(dtype), cache.to(dtype), tables, contexts


def dense_attention(query, context, *, window, scale):
    """Attention of one row without pages: scores, mask, softmax, sum."""
    num_asked, num_heads, _ = query.shape
    context_len, _, num_kv_heads, _ = context.shape
    out = torch.zeros_like(query)
    for asked in range(num_asked):
        position = context_len - num_asked + asked
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            key, value = context[first : position + 1, 0, kv_head], context[first : position + 1, 1, kv_head]
            out[asked, head] = F.softmax(key @ query[asked, head] * scale, dim=0) @ value
    return out


SHAPES = [
    ([1], [1]),
    ([1], [4]),
    ([5], [5]),
    ([3], [9]),
    ([1, 1, 1], [2, 90, 7]),
    ([1, 6, 1, 2, 1], [3, 6, 80, 11, 65]),
]


@pytest.mark.parametrize("window", [None, 1, 3, 64])
@pytest.mark.parametrize(("query_lens", "context_lens"), SHAPES)
def test_reference_equals_dense_attention_row_by_row(query_lens, context_lens, window):
    query, cache, tables, contexts = make_case(query_lens, context_lens)
    batch = PagedBatch.of(query_lens, context_lens, tables, 4, torch.float32, window)
    out = reference.paged_attention(query, cache, batch, 0.3)
    expected = [
        dense_attention(asked, context, window=window, scale=0.3)
        for asked, context in zip(query.split(query_lens), contexts, strict=True)
    ]
    torch.testing.assert_close(out, torch.cat(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 3, 64])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (3, 1), (8, 1), (6, 2)])
@pytest.mark.parametrize(("query_lens", "context_lens"), SHAPES)
def test_cpu_path_equals_the_reference(query_lens, context_lens, num_heads, num_kv_heads, window, dtype):
    query, cache, tables, _ = make_case(
        query_lens, context_lens, num_heads=num_heads, num_kv_heads=num_kv_heads, dtype=dtype
    )
    batch = PagedBatch.of(query_lens, context_lens, tables, 4, dtype, window)
    out = cpu.paged_attention(query, cache, batch, 0.3)
    expected = reference.paged_attention(query, cache, batch, 0.3)
    torch.testing.assert_close(out, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_row_is_bitwise_the_same_alone_and_among_others(dtype):
    query_lens, context_lens = [1, 1, 4, 1, 1], [70, 3, 9, 75, 300]
    query, cache, tables, _ = make_case(query_lens, context_lens, dtype=dtype)
    together = paged_attention(query, cache, PagedBatch.of(query_lens, context_lens, tables, 4, dtype), scale=0.3)
    for row, token in ((0, 0), (1, 1), (3, 6), (4, 7)):
        alone = PagedBatch.of([1], [context_lens[row]], [tables[row]], 4, dtype)
        result = paged_attention(query[token : token + 1], cache, alone, scale=0.3)
        assert torch.equal(result[0], together[token])


def test_extra_blocks_of_a_table_are_not_read():
    query, cache, tables, _ = make_case([1], [5])
    short = paged_attention(query, cache, PagedBatch.of([1], [5], tables, 4, torch.float32), scale=1.0)
    longer = paged_attention(query, cache, PagedBatch.of([1], [5], [[*tables[0], 0, 0]], 4, torch.float32), scale=1.0)
    assert torch.equal(short, longer)


@pytest.mark.parametrize(
    ("length", "padded"), [(1, 64), (64, 64), (65, 96), (96, 96), (97, 128), (129, 192), (193, 256), (1000, 1024)]
)
def test_padded_length_is_the_next_power_of_two_or_three_quarters_of_it(length, padded):
    assert padded_length(length) == padded


def test_batch_refuses_a_row_that_reads_past_its_block_table():
    with pytest.raises(ValueError, match=r"row 1 needs .* 1, 9, 2 x 4"):
        PagedBatch.of([1, 1], [4, 9], [[1], [2, 3]], 4, torch.float32)


def test_op_names_the_argument_and_what_it_expected():
    query, cache, tables, _ = make_case([2], [6])
    batch = PagedBatch.of([2], [6], tables, 4, torch.float32)
    with pytest.raises(ValueError, match=r"query must have shape \[2, \*, 8\], has \[1, 6, 8\]"):
        paged_attention(query[:1], cache, batch, scale=1.0)
    with pytest.raises(TypeError, match=r"kv_cache must be torch.float32, is torch.bfloat16"):
        paged_attention(query, cache.bfloat16(), batch, scale=1.0)
    with pytest.raises(ValueError, match="5 query heads are no multiple of 2 kv heads"):
        paged_attention(query[:, :5], cache, batch, scale=1.0)
