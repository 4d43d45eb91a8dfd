"""What is learned of reuse, and who goes by it."""

from __future__ import annotations

from math import exp

import pytest
from msgspec.structs import replace

from kvroute.conductor.tiers.hazard import BINS, CELLS, WIDTHS_S, Hazard, HazardTable, age_bin, cell_of
from tests.conductor.tiers.blocks import block


def test_ages_double_from_bin_to_bin() -> None:
    assert [age_bin(age_s) for age_s in (-1.0, 0.0, 1.9, 2.0, 3.9, 4.0, 2048.0, 1e9)] == [
        *(0, 0, 0, 1, 1, 2),
        *(BINS - 1, BINS - 1),
    ]
    assert list(WIDTHS_S[:4]) == [2.0, 2.0, 4.0, 8.0]
    assert sum(WIDTHS_S) == 4096.0


def test_cells_tell_uses_turns_and_sizes_apart() -> None:
    classes = {
        cell_of(uses, turn, new)
        for uses in (1, 2, 3, 4, 6, 9)
        for turn in (1, 2, 3)
        for new in (0, 1024, 4096, 16_384)
    }
    assert classes == set(range(CELLS))
    assert cell_of(4, 2, 1023) == cell_of(5, 2, 1)
    assert cell_of(3, 3, 5000) == cell_of(3, 9, 16_383)


def test_a_table_worked_by_hand() -> None:
    """Two blocks of one cell: one read at 3 s, the other still waits at 5 s. No prior."""
    table = HazardTable(prior_blocks=0.0)
    table.use(block(1, at_s=0.0))
    table.use(block(2, at_s=0.0))
    table.use(block(1, at_s=3.0))
    index = table.index(5.0)
    once, twice = index[cell_of(1, 1, 0)], index[cell_of(2, 1, 0)]
    # Bin 1 (2 to 4 s): one reuse in 1 s of the first and 2 s of the second. The others saw none.
    p = 1 - exp(-(1 / 3) * 2)
    assert once[1] == pytest.approx(p / (2 * (1 - p / 2)))
    assert once[0] == pytest.approx(p / (2 + 2 * (1 - p / 2)))
    assert once[2] == twice[0] == 0.0


def test_the_pool_speaks_for_a_cell_that_has_seen_nothing() -> None:
    table = HazardTable(prior_blocks=200.0)
    for key in range(100):
        table.use(block(key, at_s=0.0))
        table.use(block(key, at_s=1.0))
    index = table.index(1.0)
    pool = 100 / 100  # reuses per second of the only bin that anything is known of
    p = 1 - exp(-pool * 2)
    assert index[cell_of(9, 3, 0)][0] == pytest.approx(p / (2 * (1 - p / 2)))


def test_a_fit_holds_until_it_is_due() -> None:
    table = HazardTable(refit_s=60.0)
    table.use(block(1, at_s=0.0))
    assert table.index(1.0)[0][0] == 0.0
    table.use(block(1, at_s=1.0))
    assert table.index(60.0)[0][0] == 0.0
    assert table.index(61.0)[0][0] > 0.0


def test_only_so_many_keys_are_remembered() -> None:
    table = HazardTable(ghost_entries=3)
    for key in range(10):
        table.use(block(key, at_s=float(key)))
    assert len(table) == 3
    assert table._ended.sum() == 7
    table.use(block(9, at_s=11.0))
    assert table.cell(block(9)) == cell_of(2, 1, 0)
    assert table.cell(block(5, reads=2)) == cell_of(3, 1, 0), "forgotten: by its own reads"


def test_until_reuse_was_seen_it_is_lru() -> None:
    policy = Hazard()
    for each in (block(1, at_s=3.0), block(2, at_s=1.0, depth=1), block(3, at_s=1.0, depth=5)):
        policy.record(each)
        policy.offer(each)
    assert [policy.victim(None, 9.0) for _ in range(4)] == [3, 2, 1, None]


def test_what_seldom_returns_goes_before_what_is_older_and_does() -> None:
    policy = Hazard()
    small, large = {"new_tokens": 500}, {"new_tokens": 20_000}
    for key in range(300):  # small prompts return after 10 s, large ones never do
        policy.record(replace(block(key, at_s=0.0), **small))
        policy.record(replace(block(1000 + key, at_s=0.0), **large))
    for key in range(300):
        policy.record(replace(block(key, at_s=10.0), **small))
    old, new = replace(block(5000, at_s=12.0), **small), replace(block(6000, at_s=15.0), **large)
    for each in (old, new):
        policy.record(each)
        policy.offer(each)
    assert policy.victim(None, 16.0) == 6000
    assert policy.victim(None, 16.0) == 5000


def test_what_is_dear_to_compute_stays() -> None:
    policy = Hazard()
    for at_s in (0.0, 5.0):
        for key in range(50):
            policy.record(block(key, at_s=at_s))
    deep, shallow = block(101, at_s=6.0, recompute_s=2.0), block(102, at_s=6.5, recompute_s=1.0)
    policy.record(replace(deep, turn=3))
    policy.offer(replace(deep, turn=3))
    policy.record(shallow)
    policy.offer(shallow)
    assert policy.victim(None, 7.0) == 102


def test_a_block_offered_again_from_another_cell_is_offered_once() -> None:
    policy = Hazard()
    for at_s in (0.0, 1.0, 2.0):
        policy.record(block(1, at_s=at_s))
        policy.offer(block(1, at_s=at_s))
    assert len(policy) == 1
    assert [policy.victim(None, 3.0), policy.victim(None, 3.0)] == [1, None]
