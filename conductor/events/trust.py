"""How far the index of one worker may be believed, and why. Pure: no sockets, no clock of its own."""

from __future__ import annotations

from msgspec import Struct

from kvroute.types import Trust


class HolderHealth(Struct, frozen=True, kw_only=True):
    """What is known of one rank's events. Counters are since the follow; gauges are of now."""

    dp_rank: int
    trust: Trust
    reasons: tuple[str, ...] = ()
    """Why not exact: see `REASONS`; empty when exact."""
    last_seq: int = -1
    """Sequence number of the last batch applied; -1 before any."""
    lag_s: float | None = None
    """Age of the last batch when it was applied, by the engine's own clock; None before any."""
    waiting: int = 0
    """Gauge: batches that wait for a replay."""
    parked: int = 0
    """Gauge: blocks that wait for their parent."""
    held_blocks: int = 0
    """Gauge: distinct blocks in any one tier, summed over tiers."""
    counters: dict[str, int] = {}
    """By name: batches, events, gaps, restarts, replays, replay_failures, duplicates, overflows, clears,
    undecodable, bad_events, unknown_events, orphans, orphan_removals, expired_orphans, foreign_groups,
    block_size_changes, unknown_extras, reconnects."""


class WorkerHealth(Struct, frozen=True, kw_only=True):
    """What is known of a worker's events: as trustworthy as its worst rank."""

    worker_id: str
    trust: Trust
    reasons: tuple[str, ...] = ()
    holders: tuple[HolderHealth, ...] = ()
    predictions: int = 0
    """Answers whose reported `cached_tokens` were compared with the prediction."""
    mismatches: int = 0
    """Those where they differed by a block or more."""
