"""One tier: bounded, leaf-first, counted."""

from __future__ import annotations

import random

import pytest

from kvroute.conductor.tiers.base import Link
from kvroute.conductor.tiers.registry import ADMISSIONS, EVICTIONS, WRITE_BACKS
from kvroute.conductor.tiers.tier import Tier
from tests.conductor.tiers.blocks import SIZE, block, tier


def stored(
    target: Tier, key: int, parent: int | None = None, at_s: float = 0.0, **more: int
) -> list[int] | None:
    """Store a block as a caller would; keys that went for it, None when it was refused."""
    each = block(key, parent, at_s=at_s, **more)
    target.access([each])
    done, evicted = target.store(each, at_s)
    target.check_integrity()
    return [gone.key for gone in evicted] if done else None


def test_leaves_go_first_though_the_root_is_the_oldest() -> None:
    target = tier(3)
    assert [stored(target, 1), stored(target, 2, 1, 1.0), stored(target, 3, 2, 2.0)] == [[], [], []]
    assert stored(target, 4, None, 3.0) == [3]
    assert stored(target, 5, None, 4.0) == [2]
    assert stored(target, 6, None, 5.0) == [1]
    assert list(target.keys()) == [4, 5, 6]


def test_a_block_never_makes_room_for_its_own_successor() -> None:
    target = tier(1)
    stored(target, 1)
    assert stored(target, 2, 1, 1.0) is None
    assert (1 in target, target.counts.not_worth_a_victim) == (True, 1)
    assert stored(target, 3, None, 2.0) == [1], "refused, the successor holds nothing back"


def test_a_leaf_may_arrive_before_its_parent() -> None:
    target = tier(2)
    stored(target, 2, 1)
    stored(target, 1, None, 1.0)
    assert stored(target, 3, None, 2.0) == [2]
    assert stored(target, 4, None, 3.0) == [1]


def test_an_access_moves_a_leaf_back() -> None:
    target = tier(2)
    stored(target, 1)
    stored(target, 2, None, 1.0)
    target.access([block(1, at_s=2.0, reads=1)])
    held = target.get(1)
    assert held is not None
    assert held.reads == 1
    assert stored(target, 3, None, 3.0) == [2]


def test_what_is_not_stored_is_counted_by_reason() -> None:
    target = Tier(
        "CPU",
        SIZE,
        ADMISSIONS.make("length_threshold", {"max_blocks": 2}),
        EVICTIONS.make("tiny_lfu"),
        WRITE_BACKS.make("through"),
        Link(1.0),
    )
    assert stored(target, 1, prompt_blocks=3) is None
    assert stored(target, 2, size=SIZE + 1) is None
    assert stored(target, 3) == []
    assert stored(target, 4) is None
    counts = target.counts
    assert (counts.not_admitted, counts.too_large, counts.stored, counts.not_worth_a_victim) == (1, 1, 1, 1)
    assert counts.evicted == 0


def test_a_large_block_takes_the_room_of_several() -> None:
    target = tier(3)
    for key in (1, 2, 3):
        stored(target, key, None, float(key))
    assert stored(target, 4, None, 9.0, size=SIZE * 2) == [1, 2]
    assert target.used_bytes == 3 * SIZE


def test_stored_twice_is_there_once_and_clear_forgets_all() -> None:
    target = tier(2)
    assert stored(target, 1) == stored(target, 1) == []
    assert (len(target), target.used_bytes) == (1, SIZE)
    target.clear()
    target.check_integrity()
    assert (len(target), target.used_bytes) == (0, 0)
    assert stored(target, 2) == stored(target, 3, None, 1.0) == []
    assert stored(target, 4, None, 2.0) == [2], "what was cleared is no victim"


def test_loading_takes_latency_and_bandwidth() -> None:
    slow = tier(4, link=Link(50.0, 0.25))
    assert slow.load_s([block(1), block(2)]) == pytest.approx(0.25 + 2 * SIZE / 50.0)


@pytest.mark.parametrize("eviction", EVICTIONS.names)
@pytest.mark.parametrize("admission", ADMISSIONS.names)
def test_random_chains_keep_the_books_and_the_bound(admission: str, eviction: str) -> None:
    seed = 17
    rng = random.Random(seed)
    target = tier(12, admission, eviction)
    for now in range(1500):
        key = rng.randrange(1, 60)
        parent = key // 2 or None
        each = block(key, parent, depth=key.bit_length() - 1, reads=rng.randrange(3), at_s=float(now))
        target.access([each])
        held = set(target.keys())
        _, evicted = target.store(each, float(now))
        for gone in evicted:
            left = held - {gone.key}
            assert not any(other // 2 == gone.key for other in left), f"seed {seed}: {gone.key} was no leaf"
            held = left
        if not now % 20:
            target.check_integrity()
    assert target.counts.evicted > 0
    assert len(target) == target.counts.stored - target.counts.evicted
