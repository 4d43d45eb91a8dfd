"""Bounds of a feed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FeedLimits:
    """Bounds and time limits of each publisher's stream."""

    payload_bytes: int = 16 * 2**20
    """A longer payload is not decoded."""
    waiting_batches: int = 10_000
    """Live batches kept while a replay is on its way, and their bytes; beyond, they are asked for again."""
    waiting_bytes: int = 64 * 2**20
    parked_bytes: int = 4 * 2**20
    """Blocks kept whose parent is not known yet, and how long."""
    parked_s: float = 30.0
    replay_timeout_s: float = 5.0
    """Between two answers of one replay."""
    retry_s: float = 0.25
    """Before a replay that failed is asked for again, doubled each time; without anybody to ask, the time
    that batches which changed places have to arrive."""
    verify_s: float = 30.0
    """An idle publisher is asked for its last batch this often: was one missed, has it restarted?"""
    slice_s: float = 0.002
    """Work on batches at a stretch, before others get their turn."""


DEFAULTS = FeedLimits()
