"""Blocks for the tests of tiers."""

from __future__ import annotations

from collections.abc import Sequence

from kvroute.conductor.tiers.base import BlockInfo, Link
from kvroute.conductor.tiers.registry import ADMISSIONS, EVICTIONS, WRITE_BACKS
from kvroute.conductor.tiers.stack import BlockModel, TierStack
from kvroute.conductor.tiers.tier import Tier

SIZE = 100


def block(
    key: int,
    parent: int | None = None,
    *,
    size: int = SIZE,
    depth: int = 0,
    prompt_blocks: int = 1,
    recompute_s: float = 1.0,
    reads: int = 0,
    at_s: float = 0.0,
) -> BlockInfo:
    return BlockInfo(key, parent, size, depth, prompt_blocks, recompute_s, reads, at_s)


def tier(
    blocks: int,
    admission: str = "always",
    eviction: str = "lru",
    write: str = "through",
    medium: str = "CPU",
    link: Link | None = None,
) -> Tier:
    return Tier(
        medium,
        blocks * SIZE,
        ADMISSIONS.make(admission),
        EVICTIONS.make(eviction),
        WRITE_BACKS.make(write),
        link or Link(1000.0),
    )


class Ticks:
    """A clock that a test turns."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def stack(tiers: Sequence[Tier], clock: Ticks | None = None) -> TierStack:
    return TierStack(tiers, BlockModel(SIZE, lambda depth: 1.0 + depth), clock or Ticks())
