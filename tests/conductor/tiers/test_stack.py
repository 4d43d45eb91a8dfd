"""The tiers below a GPU: what goes down when, what comes back, and what a scan does to it."""

from __future__ import annotations

import random

import pytest

from kvroute.conductor.tiers.base import Link
from kvroute.conductor.tiers.registry import ADMISSIONS, EVICTIONS, WRITE_BACKS
from kvroute.conductor.tiers.stack import TierStack
from tests.conductor.tiers.blocks import SIZE, Ticks, stack, tier


def changes(target: TierStack) -> list[tuple[str, str, int]]:
    target.check_integrity()
    return [(each.medium, "stored" if each.stored else "removed", each.key) for each in target.take_changes()]


def test_write_through_writes_what_is_computed() -> None:
    target = stack([tier(4)])
    target.computed([1, 2, 3], 0, 3)
    assert changes(target) == [("CPU", "stored", 1), ("CPU", "stored", 2), ("CPU", "stored", 3)]
    target.evicted([3, 2, 1])
    assert changes(target) == []
    assert target.match([1, 2, 3, 4]) == 3
    assert target.match([4, 1]) == 0


def test_selective_writes_what_was_read_and_loses_the_rest() -> None:
    target = stack([tier(4, write="selective")])
    target.computed([1, 2, 3], 0, 3)
    assert changes(target) == []
    target.read([1, 2])
    assert changes(target) == [("CPU", "stored", 1), ("CPU", "stored", 2)]
    target.evicted([3, 2, 1])
    assert target.match([1, 2, 3]) == 2


def test_write_back_writes_what_is_evicted_leaf_first() -> None:
    target = stack([tier(4, write="back")])
    target.computed([1, 2, 3], 0, 3)
    target.read([1])
    assert changes(target) == []
    target.evicted([3, 2])
    assert changes(target) == [("CPU", "stored", 3), ("CPU", "stored", 2)]
    assert target.match([1, 2, 3]) == 0
    target.evicted([1])
    assert target.match([1, 2, 3]) == 3


def test_what_leaves_one_tier_goes_down_to_the_next() -> None:
    clock = Ticks()
    target = stack([tier(1, write="back"), tier(1, write="back", medium="DISK")], clock)
    for key in (1, 2, 3):
        clock.now_s += 1.0
        target.computed([key], 0, 1)
        target.evicted([key])
    assert changes(target) == [
        ("CPU", "stored", 1),
        ("CPU", "stored", 2),
        ("DISK", "stored", 1),
        ("CPU", "removed", 1),
        ("CPU", "stored", 3),
        ("DISK", "stored", 2),
        ("DISK", "removed", 1),
        ("CPU", "removed", 2),
    ]
    assert [target.match([key]) for key in (1, 2, 3)] == [0, 1, 1]


def test_each_block_is_loaded_from_the_uppermost_tier_that_holds_it() -> None:
    target = stack(
        [
            tier(2, "length_threshold", link=Link(100.0, 0.5)),
            tier(9, medium="DISK", link=Link(10.0, 2.0)),
        ]
    )
    target.computed([1, 2], 0, 2)
    target.computed([1, 2, 3], 2, 3)
    assert (3 in target.tiers[0], 3 in target.tiers[1]) == (False, True)
    assert target.load_s([1, 2]) == pytest.approx(0.5 + 2 * SIZE / 100.0)
    assert target.load_s([1, 2, 3]) == pytest.approx(0.5 + 2 * SIZE / 100.0 + 2.0 + SIZE / 10.0)


def test_a_chain_is_not_written_past_a_block_that_was_refused() -> None:
    target = stack([tier(2)])
    target.computed([1, 2, 3, 4], 0, 4)
    assert changes(target) == [("CPU", "stored", 1), ("CPU", "stored", 2)]
    assert target.tiers[0].counts.not_worth_a_victim == 1, "the fourth was not even tried"


def test_a_chain_asked_for_again_is_admitted_whole() -> None:
    target = stack([tier(9, "second_access")])
    target.computed([1, 2, 3], 0, 3)
    assert changes(target) == []
    target.evicted([3, 2, 1])
    target.computed([1, 2, 3, 4], 0, 4)
    assert [key for _, _, key in changes(target)] == [1, 2, 3]


def test_blocks_know_their_depth_reads_and_prompt() -> None:
    clock = Ticks()
    target = stack([tier(9)], clock)
    target.computed([1, 2], 0, 7)
    clock.now_s = 5.0
    target.read([1, 2])
    target.computed([1, 2], 0, 3)
    found = target.tiers[0].get(2)
    assert found is not None
    assert (found.parent, found.depth, found.prompt_blocks, found.recompute_s) == (1, 1, 7, 2.0)
    assert (found.reads, found.last_access_s) == (1, 5.0)


def test_reads_are_kept_while_any_tier_holds_the_block() -> None:
    target = stack([tier(9, write="back")])
    target.computed([1], 0, 1)
    target.read([1])
    target.evicted([1])
    target.read([1])
    target.computed([1], 0, 1)
    target.evicted([1])
    found = target.tiers[0].get(1)
    assert found is not None
    assert found.reads == 2


def test_clear_forgets_above_and_below() -> None:
    target = stack([tier(9)])
    target.computed([1, 2], 0, 2)
    target.clear()
    target.evicted([2, 1])
    assert (changes(target), target.match([1])) == ([], 0)


def after_a_scan(admission: str, eviction: str) -> list[int]:
    """Blocks left of eight system prompts of ten blocks each, after sixty one-off prompts of forty.

    Below is room for 150 blocks, above for none: what is computed is evicted at once.
    """
    clock = Ticks()
    target = stack([tier(150, admission, eviction)], clock)
    prompts = [[system * 1000 + depth for depth in range(1, 11)] for system in range(1, 9)]
    for _ in range(4):
        for keys in prompts:
            clock.now_s += 1.0
            hit = target.match(keys)
            target.read(keys[:hit])
            target.computed(keys, hit, len(keys))
            target.evicted(keys[::-1])
    for scan in range(60):
        clock.now_s += 1.0
        keys = [10**6 + scan * 1000 + depth for depth in range(40)]
        target.computed(keys, 0, len(keys))
        target.evicted(keys[::-1])
    target.check_integrity()
    return [target.match(keys) for keys in prompts]


@pytest.mark.parametrize(
    ("admission", "eviction"),
    [("always", "tiny_lfu"), ("second_access", "lru"), ("always", "lfu"), ("always", "value_per_byte")],
)
def test_hot_system_prompts_survive_a_scan_of_one_off_long_prompts(admission: str, eviction: str) -> None:
    assert after_a_scan(admission, eviction) == [10] * 8


def test_the_same_scan_washes_out_a_plain_lru() -> None:
    assert after_a_scan("always", "lru") == [0] * 8


@pytest.mark.parametrize("write", WRITE_BACKS.names)
@pytest.mark.parametrize("eviction", EVICTIONS.names)
def test_changes_tell_exactly_what_each_tier_holds(write: str, eviction: str) -> None:
    """Whoever follows the changes knows the truth, whatever the policies."""
    seed = 23
    rng = random.Random(seed)
    clock = Ticks()
    target = stack(
        [
            tier(10, rng.choice(ADMISSIONS.names), eviction, write),
            tier(20, "always", "lru", "back", medium="DISK"),
        ],
        clock,
    )
    told: dict[str, set[int]] = {"CPU": set(), "DISK": set()}
    above: list[list[int]] = []
    for step in range(400):
        clock.now_s += 1.0
        keys = [rng.randrange(1, 4)]
        while len(keys) < rng.randint(1, 6):
            keys.append(keys[-1] * 3 + rng.randrange(3) + 1)
        held = {key for other in above for key in other}
        hit = next(
            (i for i, key in enumerate(keys) if key not in held and not target.match([key])), len(keys)
        )
        target.read(keys[:hit])
        target.computed(keys, hit, len(keys))
        above.append(keys)
        if len(above) > 3:
            gone = above.pop(0)
            target.evicted([key for key in reversed(gone) if not any(key in other for other in above)])
        for each in target.take_changes():
            assert (each.key in told[each.medium]) != each.stored, f"seed {seed}, step {step}"
            told[each.medium] ^= {each.key}
        target.check_integrity()
    assert {held.medium: set(held.keys()) for held in target.tiers} == told
    assert told["CPU"]
