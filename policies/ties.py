"""Choices of the least that several policies share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from kvroute.types import Fleet

Price = TypeVar("Price", int, float, tuple[float, float])


def cheapest_index(prices: list[Price], turn: int) -> int:
    """Index of the lowest price; ties go to the first at or after `turn` modulo their number."""
    lowest = min(prices)
    start = turn % len(prices)
    if start:
        try:
            return prices.index(lowest, start)
        except ValueError:
            pass
    return prices.index(lowest)


def least_loaded_index(fleet: Fleet, turn: int) -> int:
    """Index of the worker with the fewest leases; ties go to the first at or after `turn` modulo the fleet.

    A caller that counts `turn` up by one per decision spreads ties evenly and reproducibly.
    """
    loads = fleet.loads
    count = len(loads)
    start = turn % count
    best = start
    fewest = loads[start].requests
    for index in range(start + 1, start + count):
        at = index - count if index >= count else index
        requests = loads[at].requests
        if requests < fewest:
            best, fewest = at, requests
    return best


def emptiest_index(fleet: Fleet, among: Iterable[int], turn: int) -> int:
    """Index out of `among` (not empty) with the fewest leases, then fewest held blocks, then by `turn`."""
    loads, held = fleet.loads, fleet.held_blocks
    count = len(loads)
    if held:
        return min(among, key=lambda i: (loads[i].requests, held[i], (i - turn) % count))
    return min(among, key=lambda i: (loads[i].requests, (i - turn) % count))
