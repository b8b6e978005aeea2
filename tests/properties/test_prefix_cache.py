"""A prefix index that evicts nothing finds the longest indexed prefix, as a plain dictionary of prefixes does."""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.kv_cache.core.block import Block, BlockId
from services.kv_cache.core.prefix_cache import PrefixCache
from services.kv_cache.core.prefix_hash import CacheDomain, domain_preimage, sha256

BLOCK_SIZE = 2

PROMPTS = st.lists(
    st.tuples(st.sampled_from(["a", "b"]), st.lists(st.integers(0, 1), max_size=8).map(tuple)), max_size=12
)
TEXT = st.text(max_size=4)


@settings(deadline=None)
@given(PROMPTS, PROMPTS)
def test_match_finds_exactly_the_longest_indexed_prefix(
    indexed: list[tuple[str, tuple[int, ...]]], asked: list[tuple[str, tuple[int, ...]]]
) -> None:
    cache = PrefixCache(BLOCK_SIZE, sha256)
    block_by_prefix: dict[tuple[str, tuple[int, ...]], Block] = {}
    for scope, token_ids in indexed:
        end = cache.pin_root(CacheDomain("m", "v", "", scope))
        for stop in range(BLOCK_SIZE, len(token_ids) + 1, BLOCK_SIZE):
            block = block_by_prefix.setdefault((scope, token_ids[:stop]), Block(BlockId(len(block_by_prefix) + 1)))
            content = cache.insert(end, token_ids[stop - BLOCK_SIZE : stop], block)
            assert content is not None
            cache.move_pin(end, content)
            end = content
    for scope, token_ids in asked:
        expected = []
        for stop in range(BLOCK_SIZE, len(token_ids) + 1, BLOCK_SIZE):
            if (scope, token_ids[:stop]) not in block_by_prefix:
                break
            expected.append(block_by_prefix[scope, token_ids[:stop]])
        assert cache.match(CacheDomain("m", "v", "", scope), token_ids, len(token_ids) // BLOCK_SIZE) == expected


@given(st.tuples(TEXT, TEXT, TEXT, TEXT), st.tuples(TEXT, TEXT, TEXT, TEXT))
def test_domains_have_equal_preimages_only_when_they_are_equal(
    one: tuple[str, str, str, str], other: tuple[str, str, str, str]
) -> None:
    are_equal = domain_preimage(CacheDomain(*one)) == domain_preimage(CacheDomain(*other))
    assert are_equal is (one == other)
