"""Batches of one publisher in order. Pure: no sockets, no clock."""

from __future__ import annotations

from msgspec import Struct


class Watermark(Struct, frozen=True, gc=False):
    """How far a publisher's batches were applied, and what the last one was.

    The digest tells a later batch of the same number from it: an engine that restarted and caught up would
    be invisible otherwise.
    """

    seq: int = -1
    """Of the last batch applied; -1 is none."""
    digest: int = 0
    """xxh3_64 of its payload."""
    complete: bool = False
    """True when nothing was missed since the cache was last known to be empty."""
