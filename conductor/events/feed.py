"""KV events of all workers into one index: whom to follow, how each is doing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvroute.clock import Clock, monotonic
from kvroute.conductor.events.sources import EventSource
from kvroute.conductor.events.stream import Watermark
from kvroute.conductor.events.trust import WorkerHealth
from kvroute.conductor.keys import Namespace
from kvroute.types import Trust

if TYPE_CHECKING:
    from kvroute.conductor.index import PrefixIndex


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
    verify_s: float = 30.0
    """An idle publisher is asked for its last batch this often: was one missed, has it restarted?"""
    slice_s: float = 0.002
    """Work on batches at a stretch, before others get their turn."""


TrustObserver = Callable[[str, Trust, tuple[str, ...]], None]
"""(worker id, new trust, reasons), called in the event loop when a worker's trust changes."""


class EventFeed:
    """Follows the publishers of workers and brings their events into `index`.

    All methods are for the event loop's thread; none but `settled` and `close` waits. `follow` needs a
    running loop.
    """

    def __init__(
        self,
        index: PrefixIndex,
        *,
        clock: Clock = monotonic,
        wall_s: Callable[[], float] = time.time,
        limits: FeedLimits = FeedLimits(),
        on_trust: TrustObserver | None = None,
    ) -> None:
        raise NotImplementedError

    def follow(
        self,
        worker_id: str,
        sources: Sequence[EventSource],
        namespace: Namespace,
        *,
        block_tokens: int | None = None,
        min_block_tokens: int = 16,
        silent_tier_blocks: int = 0,
        restored: Mapping[int, Watermark] | None = None,
    ) -> None:
        """Begin to follow a worker; one source per rank.

        `namespace` is that of the base model; adapter and salt come from the events. `block_tokens` is what
        the engine says of itself; None: the first event says it (the holder enters the index then). Smaller
        blocks than `min_block_tokens` are grouped: the index then has blocks of their smallest multiple that
        is not below. `restored`, by rank: what the index already holds of it (its holders were added), and
        up to which batch; it is load only until the publisher has confirmed that batch.
        Raises ValueError when the worker is followed already, a rank comes twice or there is no source.
        """
        raise NotImplementedError

    def unfollow(self, worker_id: str) -> None:
        """Close its sockets and take it out of the index; unknown workers are ignored."""
        raise NotImplementedError

    @property
    def followed(self) -> tuple[str, ...]:
        """Ids of the workers followed, in order of their start."""
        raise NotImplementedError

    def health(self, worker_id: str) -> WorkerHealth | None:
        """How its index is doing; None when it is not followed."""
        raise NotImplementedError

    def trust(self, worker_id: str) -> Trust:
        """Constant time, for every request; APPROXIMATE when it is not followed."""
        raise NotImplementedError

    def observe(
        self, worker_id: str, predicted_tokens: int, reported_cached_tokens: int, prompt_tokens: int
    ) -> None:
        """What the index promised and what the engine then reported, for one answered prompt."""
        raise NotImplementedError

    def watermarks(self, worker_id: str) -> dict[int, Watermark]:
        """By rank, how far it was applied: for snapshots, together with the index at the same moment."""
        raise NotImplementedError

    def pause(self, worker_id: str) -> None:
        """Apply nothing of this worker until `resume`: batches wait in their sockets, within their bounds.

        For a snapshot, which reads a holder in slices and together with its watermark. Unknown is ignored.
        """
        raise NotImplementedError

    def resume(self, worker_id: str) -> None:
        """Go on after `pause`; idempotent, unknown is ignored."""
        raise NotImplementedError

    async def settled(self, worker_id: str) -> None:
        """Return when no rank has a replay outstanding or a batch waiting; KeyError when not followed."""
        raise NotImplementedError

    async def close(self) -> None:
        """Unfollow none, but close every socket and task; idempotent."""
        raise NotImplementedError
