"""The block cache of the mock engine: sharing, eviction order, books that add up."""

from __future__ import annotations

import random

import pytest

from kvroute.loadtests.mock_engine.block_cache import BlockCache, CacheCorruption


def published(cache: BlockCache, keys: list[int]) -> None:
    """Allocate and publish a chain the caller then references."""
    assert cache.allocate(len(keys))
    for index, key in enumerate(keys):
        cache.publish(key, keys[index - 1] if index else None)


def test_match_is_the_leading_run_and_changes_nothing() -> None:
    cache = BlockCache(8)
    published(cache, [1, 2, 3])
    before = repr(cache)
    assert cache.match([1, 2, 9, 3]) == 2
    assert cache.match([9]) == 0
    assert cache.match([1, 2, 3]) == 3
    assert repr(cache) == before


def test_leaves_go_first_and_the_oldest_chain_before_the_newer() -> None:
    cache = BlockCache(4)
    published(cache, [1, 2])
    cache.release([1, 2], 0)
    published(cache, [3, 4])
    cache.release([3, 4], 0)
    assert cache.allocate(3)
    assert cache.take_removed() == [2, 1, 4]
    assert cache.take_removed() == []
    assert 3 in cache
    cache.check_integrity(private_blocks=3)


def test_a_shared_root_outlives_its_branches() -> None:
    cache = BlockCache(3)
    published(cache, [1, 2])
    cache.release([1, 2], 0)
    cache.acquire([1])
    assert cache.allocate(1)
    cache.publish(3, 1)
    cache.release([1, 3], 0)
    assert cache.allocate(1)
    assert cache.take_removed() == [2]
    assert cache.allocate(1)
    assert cache.take_removed() == [3]


def test_referenced_blocks_are_never_evicted() -> None:
    cache = BlockCache(3)
    published(cache, [1, 2])
    assert not cache.allocate(2)
    assert cache.allocate(1)
    assert cache.take_removed() == []
    assert cache.used_ratio == 1.0


def test_a_block_published_twice_is_shared_and_one_is_given_back() -> None:
    cache = BlockCache(4)
    published(cache, [1])
    assert cache.allocate(1)
    assert not cache.publish(1, None)
    assert cache.free_blocks == 3
    cache.release([1], 0)
    assert cache.idle_blocks == 0
    cache.release([1], 0)
    assert cache.idle_blocks == 1


def test_clear_waits_for_the_last_reference() -> None:
    cache = BlockCache(4)
    published(cache, [1, 2])
    assert not cache.clear()
    cache.release([1, 2], 0)
    assert cache.allocate(1)
    assert not cache.clear(), "a block that is not full yet is in use too"
    cache.release([], 1)
    assert cache.clear()
    assert (cache.free_blocks, cache.resident_blocks) == (4, 0)


def test_check_integrity_names_the_fault() -> None:
    cache = BlockCache(4)
    published(cache, [1, 2])
    with pytest.raises(CacheCorruption, match="accounted for"):
        cache.check_integrity(private_blocks=1)
    cache.release([1], 0)
    with pytest.raises(CacheCorruption, match="its parent is not"):
        cache.check_integrity()


def test_random_chains_keep_the_books_straight() -> None:
    rng = random.Random(7)
    cache = BlockCache(40)
    held: list[list[int]] = []
    for _ in range(3000):
        if held and rng.random() < 0.5:
            cache.release(held.pop(rng.randrange(len(held))), 0)
        else:
            keys = [rng.randrange(4)]
            while len(keys) < rng.randint(1, 8):
                keys.append(keys[-1] * 4 + rng.randrange(4) + 4)
            hits = cache.match(keys)
            cache.acquire(keys[:hits])
            if not cache.allocate(len(keys) - hits):
                cache.release(keys[:hits], 0)
                continue
            for index in range(hits, len(keys)):
                cache.publish(keys[index], keys[index - 1] if index else None)
            held.append(keys)
        cache.check_integrity()
    assert cache.take_removed()
