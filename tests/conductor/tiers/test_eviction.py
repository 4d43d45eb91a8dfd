"""Who goes first."""

from __future__ import annotations

import random

import pytest

from kvroute.conductor.tiers.base import Eviction
from kvroute.conductor.tiers.eviction import LFU, LRU, TinyLFU, ValuePerByte
from kvroute.conductor.tiers.hazard import Hazard
from kvroute.conductor.tiers.registry import EVICTIONS
from tests.conductor.tiers.blocks import block

NEWCOMER = block(99, at_s=100.0, reads=100)


def order(policy: Eviction, now_s: float = 100.0) -> list[int]:
    victims = []
    while (key := policy.victim(NEWCOMER, now_s)) is not None:
        victims.append(key)
    return victims


def test_lru_goes_by_last_access_and_deeper_first() -> None:
    policy = LRU()
    for each in (block(1, at_s=3.0), block(2, at_s=1.0, depth=1), block(3, at_s=1.0, depth=5)):
        policy.offer(each)
    policy.offer(block(4, at_s=2.0))
    policy.offer(block(4, at_s=9.0))
    assert order(policy) == [3, 2, 1, 4]


def test_lfu_goes_by_reads_and_then_by_last_access() -> None:
    policy = LFU()
    for each in (block(1, reads=5, at_s=1.0), block(2, reads=1, at_s=9.0), block(3, reads=1, at_s=2.0)):
        policy.offer(each)
    assert order(policy) == [3, 2, 1]


def test_tiny_lfu_lets_only_the_more_frequent_in() -> None:
    policy = TinyLFU()
    policy.offer(block(1))
    for _ in range(3):
        policy.record(block(1))
    for key, times in ((2, 3), (3, 4)):
        for _ in range(times):
            policy.record(block(key))
    assert policy.refuses(block(2), 0.0)
    assert policy.victim(block(2), 0.0) is None, "as frequent is not more frequent"
    assert not policy.refuses(block(3), 0.0)
    assert policy.victim(block(3), 0.0) == 1


def test_where_nobody_is_new_the_least_goes_all_the_same() -> None:
    for policy in (TinyLFU(), ValuePerByte()):
        policy.offer(block(1, at_s=1.0))
        policy.offer(block(2, at_s=2.0))
        assert policy.victim(None, 3.0) == 1


def test_value_weighs_reuse_time_saved_and_bytes() -> None:
    policy = ValuePerByte(half_life_s=10.0, prior_reuses=1.0)
    policy.offer(block(1, recompute_s=1.0))
    policy.offer(block(2, recompute_s=3.0))
    policy.offer(block(3, recompute_s=3.0, size=400))
    policy.offer(block(4, recompute_s=1.0, reads=4))
    # Ten seconds of idleness halve: 5 becomes 2.5, still more than 1 and less than 3.
    policy.offer(block(5, recompute_s=1.0, reads=4, at_s=-10.0))
    assert order(policy, 0.0) == [3, 1, 5, 2, 4]


def test_value_refuses_a_newcomer_worth_less_its_writing_counted() -> None:
    policy = ValuePerByte(write_s_per_byte=0.005, prior_reuses=1.0)
    policy.offer(block(1, recompute_s=1.0))
    assert policy.victim(block(2, recompute_s=1.4), 0.0) is None
    assert policy.victim(block(3, recompute_s=1.6), 0.0) == 1


def test_value_of_what_is_slower_to_read_than_to_compute_is_none() -> None:
    policy = ValuePerByte(read_s_per_byte=0.02)
    policy.offer(block(1, recompute_s=5.0))
    policy.offer(block(2, recompute_s=1.0, reads=1000, at_s=50.0))
    assert policy.victim(block(3, recompute_s=9.0), 50.0) == 2


@pytest.mark.parametrize("name", EVICTIONS.names)
def test_what_is_withdrawn_or_gone_is_no_victim(name: str) -> None:
    policy = EVICTIONS.make(name)
    for _ in range(3):
        policy.record(NEWCOMER)
    assert policy.victim(NEWCOMER, 0.0) is None
    policy.offer(block(1))
    policy.offer(block(2))
    policy.withdraw(1)
    policy.withdraw(7)
    assert policy.victim(NEWCOMER, 0.0) == 2
    assert policy.victim(NEWCOMER, 0.0) is None
    policy.offer(block(1))
    assert policy.victim(NEWCOMER, 0.0) == 1


@pytest.mark.parametrize("name", EVICTIONS.names)
def test_books_stay_as_small_as_what_is_offered(name: str) -> None:
    policy = EVICTIONS.make(name)
    for round in range(2000):
        for key in range(10):
            policy.offer(block(key, at_s=float(round)))
    assert len(policy) == 10
    heaps = policy._oldest.values() if isinstance(policy, Hazard) else [policy]
    assert sum(len(each._heap) for each in heaps) <= 2 * 10 + 65


def test_lru_against_a_plain_model() -> None:
    seed = 5
    rng = random.Random(seed)
    policy = LRU()
    offered: dict[int, float] = {}
    for now in range(3000):
        key = rng.randrange(40)
        choice = rng.random()
        if choice < 0.6:
            policy.offer(block(key, at_s=float(now)))
            offered[key] = float(now)
        elif choice < 0.8:
            policy.withdraw(key)
            offered.pop(key, None)
        else:
            expected = min(offered, key=offered.__getitem__, default=None)
            assert policy.victim(NEWCOMER, 0.0) == expected, f"seed {seed}, step {now}"
            offered.pop(expected, None)
