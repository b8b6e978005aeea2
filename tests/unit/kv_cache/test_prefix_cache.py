import hashlib
import struct

import pytest

from services.kv_cache.core.block import Block, BlockId
from services.kv_cache.core.prefix_cache import PrefixCache
from services.kv_cache.core.prefix_hash import CacheDomain, domain_preimage, pack_token_ids, sha256

DOMAIN = CacheDomain(model="m", weight_version="v", adapter="", cache_scope="s")


def make_cache(hash_bytes: int = 32) -> PrefixCache:
    return PrefixCache(2, lambda preimage: sha256(preimage)[:hash_bytes])


def insert_chain(cache: PrefixCache, token_ids: list[int], first_id: int, domain: CacheDomain = DOMAIN) -> list[Block]:
    blocks = [Block(BlockId(first_id + index)) for index in range(len(token_ids) // 2)]
    end = cache.pin_root(domain)
    for index, block in enumerate(blocks):
        content = cache.insert(end, token_ids[2 * index : 2 * index + 2], block)
        assert content is not None
        cache.move_pin(end, content)
        end = content
    cache.unpin(end)
    return blocks


def match_ids(cache: PrefixCache, token_ids: list[int], domain: CacheDomain = DOMAIN, max_blocks: int = 9) -> list[int]:
    return [block.block_id for block in cache.match(domain, token_ids, min(max_blocks, len(token_ids) // 2))]


def test_match_finds_the_longest_run_of_equal_leading_blocks() -> None:
    cache = make_cache()
    insert_chain(cache, [1, 2, 3, 4, 5, 6], first_id=1)
    assert match_ids(cache, [1, 2, 3, 4, 5, 6]) == [1, 2, 3]
    assert match_ids(cache, [1, 2, 3, 4, 9, 9]) == [1, 2]
    assert match_ids(cache, [9, 9, 3, 4]) == []
    assert match_ids(cache, [1, 2, 3, 4, 5, 6], max_blocks=2) == [1, 2]


def test_match_needs_the_same_prefix_before_equal_tokens() -> None:
    cache = make_cache()
    insert_chain(cache, [1, 2, 3, 4], first_id=1)
    assert match_ids(cache, [3, 4]) == []
    assert match_ids(cache, [1, 2, 1, 2]) == [1]


@pytest.mark.parametrize("field", ["model", "weight_version", "adapter", "cache_scope"])
def test_match_never_crosses_domains(field: str) -> None:
    cache = make_cache()
    insert_chain(cache, [1, 2], first_id=1)
    values = {"model": "m", "weight_version": "v", "adapter": "", "cache_scope": "s", field: "other"}
    assert match_ids(cache, [1, 2], CacheDomain(**values)) == []


def test_first_block_wins_when_two_hold_the_same_tokens() -> None:
    cache = make_cache()
    insert_chain(cache, [1, 2], first_id=1)
    second = insert_chain(cache, [1, 2], first_id=2)
    assert match_ids(cache, [1, 2]) == [1]
    assert second[0].content is None


def test_content_below_an_evicted_one_is_found_again_after_its_parent_is_computed_again() -> None:
    cache = make_cache()
    blocks = insert_chain(cache, [1, 2, 3, 4], first_id=1)
    cache.evict(blocks[0])
    assert match_ids(cache, [1, 2, 3, 4]) == []
    insert_chain(cache, [1, 2], first_id=7)
    assert match_ids(cache, [1, 2, 3, 4]) == [7, 2]


def test_index_is_empty_when_the_last_block_of_a_chain_is_evicted() -> None:
    cache = make_cache()
    blocks = insert_chain(cache, [1, 2, 3, 4], first_id=1)
    cache.evict(blocks[0])
    assert (len(cache.contents), len(cache.roots)) == (2, 1)
    cache.evict(blocks[1])
    assert (len(cache.contents), len(cache.roots)) == (0, 0)


def test_colliding_content_is_not_indexed_and_never_matched_when_the_hash_is_one_byte() -> None:
    cache = make_cache(hash_bytes=1)
    root = cache.pin_root(DOMAIN)
    first = cache.insert(root, [0, 0], Block(BlockId(1)))
    assert first is not None
    colliding = next(
        [0, token_id]
        for token_id in range(1, 10_000)
        if sha256(root.block_hash + pack_token_ids([0, token_id]))[:1] == first.block_hash
    )
    assert match_ids(cache, colliding) == []
    assert cache.insert(root, colliding, Block(BlockId(2))) is None
    assert match_ids(cache, [0, 0]) == [1]


def test_domain_preimages_differ_when_only_the_border_between_fields_moves() -> None:
    one = domain_preimage(CacheDomain("ab", "c", "", ""))
    other = domain_preimage(CacheDomain("a", "bc", "", ""))
    assert one != other
    prefix = b"treadle.prefix.v1model" + struct.pack("<Q", 2) + b"abweight_version"
    assert one.startswith(prefix)


def test_hash_is_chained_sha256_over_little_endian_token_ids() -> None:
    cache = make_cache()
    root = cache.pin_root(DOMAIN)
    content = cache.insert(root, [1, 65536], Block(BlockId(1)))
    assert content is not None
    assert root.block_hash == hashlib.sha256(domain_preimage(DOMAIN)).digest()
    assert content.block_hash == hashlib.sha256(root.block_hash + b"\x01\0\0\0\0\0\x01\0").digest()
