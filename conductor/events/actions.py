"""What a stream of batches wants done, and how far it has come."""

from __future__ import annotations

from msgspec import Struct

from kvroute.conductor.events.batches import Batch


class Watermark(Struct, frozen=True, gc=False):
    """How far a publisher's batches were applied, and what the last one was."""

    seq: int = -1
    """Of the last batch applied; -1 is none."""
    digest: int = 0
    """xxh3_64 of its payload."""
    complete: bool = False
    """True when nothing was missed since the cache was last known to be empty."""


class Apply(Struct, frozen=True, gc=False):
    """Bring this batch into the index."""

    batch: Batch


class Clear(Struct, frozen=True, gc=False):
    """Forget what the holder has; the reason is restart, missing, undecodable or given_up."""

    reason: str


class AskReplay(Struct, frozen=True, gc=False):
    """Ask for all batches from this number on, in place of any replay on its way."""

    first_seq: int
    attempt: int = 0
    """0, or how many have failed in a row: wait longer each time."""


Action = Apply | Clear | AskReplay
