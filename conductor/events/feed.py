"""KV events of all workers into one index: whom to follow, how each is doing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import zmq.asyncio

from kvroute.clock import Clock, monotonic
from kvroute.conductor.events.actions import Watermark
from kvroute.conductor.events.apply import Applier
from kvroute.conductor.events.limits import DEFAULTS, FeedLimits
from kvroute.conductor.events.sources import EventSource
from kvroute.conductor.events.stream import Stream
from kvroute.conductor.events.subscriber import Subscriber
from kvroute.conductor.events.trust import Predictions, WorkerHealth, trust_of
from kvroute.conductor.index import Holder, PrefixIndex
from kvroute.conductor.keys import Namespace
from kvroute.types import Trust

MAX_SOCKETS = 8192
"""Two per rank, and one more while something is asked for again."""
SWEEP_BLOCKS = 1024
_SWEEP_PAUSE_S = 0.005

TrustObserver = Callable[[str, Trust, tuple[str, ...]], None]
"""(worker id, new trust, reasons), called in the event loop when a worker's trust changes."""


@dataclass(slots=True)
class _Followed:
    subscribers: dict[int, Subscriber]
    predictions: Predictions = field(default_factory=Predictions)
    reasons: tuple[str, ...] = ("connecting",)
    trust: Trust = Trust.APPROXIMATE


class EventFeed:
    """Follows the publishers of workers and brings their events into `index`.

    All methods are for the event loop's thread; none but `settled` and `close` waits. `follow` needs a
    running loop. The feed tells the index whether a worker's events are to be believed, and sweeps it.
    """

    def __init__(
        self,
        index: PrefixIndex,
        *,
        clock: Clock = monotonic,
        wall_s: Callable[[], float] = time.time,
        limits: FeedLimits = DEFAULTS,
        on_trust: TrustObserver | None = None,
    ) -> None:
        self._index = index
        self._clock = clock
        self._wall_s = wall_s
        self._limits = limits
        self._on_trust = on_trust
        self._context = zmq.asyncio.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._workers: dict[str, _Followed] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"<EventFeed of {len(self._workers)} workers>"

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
        is not below. `restored`, by rank: up to which batch the index already holds it (its holder was
        added); it is load only until the publisher has confirmed that batch. What the
        index has of ranks that are not restored is cleared. A source may as well be the master of a Mooncake
        store: its objects are then known by what the engines followed here call them.
        Raises ValueError, and follows nothing, when the worker is followed already, a rank comes twice, there
        is no source, one has a wildcard where the engine's host is needed, or blocks have no tokens.
        """
        ranks = [source.dp_rank for source in sources]
        if self._closed or worker_id in self._workers:
            raise ValueError(f"worker {worker_id!r} is followed already, or the feed is closed")
        if not ranks or len(set(ranks)) < len(ranks):
            raise ValueError(f"sources must be one per rank and at least one, got ranks {ranks}")
        for source in sources:
            if source.unreachable is not None:
                raise ValueError(f"{source.unreachable!r} names no host: say where the engine is")
        for name, tokens in (("block_tokens", block_tokens), ("min_block_tokens", min_block_tokens)):
            if tokens is not None and tokens < 1:
                raise ValueError(f"{name} must be at least 1, got {tokens}")
        followed = self._workers[worker_id] = _Followed({})
        for source in sources:
            holder = Holder(worker_id, source.dp_rank)
            mark = (restored or {}).get(source.dp_rank)
            held_block_tokens = self._index.block_tokens(holder)
            if mark is None or mark.seq < 0 or held_block_tokens is None:
                mark, held_block_tokens = None, block_tokens
                self._index.clear(holder)
            applier = Applier(
                self._index,
                holder,
                namespace,
                block_tokens=held_block_tokens,
                min_block_tokens=min_block_tokens,
                silent_tier_blocks=silent_tier_blocks,
                limits=self._limits,
                resolve=self._resolve,
            )
            followed.subscribers[source.dp_rank] = Subscriber(
                source,
                applier,
                Stream(self._limits.waiting_batches, self._limits.waiting_bytes, mark),
                self._context,
                self._limits,
                self._clock,
                self._wall_s,
                changed=lambda: self._changed(worker_id),
                cleared=lambda reason: self._cleared(worker_id, reason),
            )
        self._changed(worker_id)  # what is restored is not to be believed for a moment
        for subscriber in followed.subscribers.values():
            subscriber.start()

    def unfollow(self, worker_id: str) -> None:
        """Close its sockets, take it out of the index for good, and give its memory back bit by bit.

        Followed or not: one that is known by predictions alone goes the same way. What was queued of its
        events is dropped, and later news of it is ignored by the index. Idempotent; needs a running loop.
        """
        followed = self._workers.pop(worker_id, None)
        if followed is not None:
            self._end(followed)
        self._index.remove_worker(worker_id)
        self._sweep()

    @property
    def followed(self) -> tuple[str, ...]:
        """Ids of the workers followed, in order of their start."""
        return tuple(self._workers)

    def health(self, worker_id: str) -> WorkerHealth | None:
        """How its index is doing; None when it is not followed."""
        followed = self._workers.get(worker_id)
        if followed is None:
            return None
        self._changed(worker_id)
        return WorkerHealth(
            worker_id=worker_id,
            trust=followed.trust,
            reasons=followed.reasons,
            holders=tuple(subscriber.health() for subscriber in followed.subscribers.values()),
            observed=followed.predictions.observed,
            overpredicted=followed.predictions.over,
            underpredicted=followed.predictions.under,
        )

    def trust(self, worker_id: str) -> Trust:
        """Constant time, for every request; APPROXIMATE when it is not followed."""
        followed = self._workers.get(worker_id)
        return Trust.APPROXIMATE if followed is None else followed.trust

    def observe(
        self, worker_id: str, predicted_tokens: int, reported_cached_tokens: int, prompt_tokens: int
    ) -> None:
        """What the index promised and what the engine then reported, for one answered prompt."""
        followed = self._workers.get(worker_id)
        if followed is None:
            return
        sizes = [s.applier.block_tokens for s in followed.subscribers.values() if s.applier.block_tokens]
        if sizes:
            followed.predictions.observe(predicted_tokens, reported_cached_tokens, sizes[0], prompt_tokens)
            self._changed(worker_id)

    def watermarks(self, worker_id: str) -> dict[int, Watermark]:
        """By rank, how far it was applied: for snapshots, together with the index at the same moment.

        A seq of -1 is a rank that cannot be restored: nothing came yet, or its pages are grouped.
        """
        followed = self._workers.get(worker_id)
        if followed is None:
            return {}
        return {rank: subscriber.watermark for rank, subscriber in followed.subscribers.items()}

    def pause(self, worker_id: str) -> None:
        """Apply nothing of this worker until `resume`: batches wait in their sockets, within their bounds.

        For a snapshot, which reads a holder in slices and together with its watermark. Unknown is ignored.
        """
        for subscriber in self._subscribers(worker_id):
            subscriber.pause()

    def resume(self, worker_id: str) -> None:
        """Go on after `pause`; idempotent, unknown is ignored."""
        for subscriber in self._subscribers(worker_id):
            subscriber.resume()

    async def settled(self, worker_id: str) -> None:
        """Return when no rank has a replay outstanding or a batch waiting; KeyError when not followed."""
        for subscriber in list(self._workers[worker_id].subscribers.values()):
            await subscriber.settled.wait()

    async def close(self) -> None:
        """Close every socket and task, and leave the index as it is; idempotent."""
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for followed in self._workers.values():
            self._end(followed)
        self._workers.clear()
        if self._ending:
            await asyncio.wait(self._ending)
        self._context.destroy(linger=0)

    def _subscribers(self, worker_id: str) -> list[Subscriber]:
        followed = self._workers.get(worker_id)
        return [] if followed is None else list(followed.subscribers.values())

    def _end(self, followed: _Followed) -> None:
        for subscriber in followed.subscribers.values():
            for task in subscriber.close():
                self._ending.add(task)
                task.add_done_callback(self._ending.discard)

    def _changed(self, worker_id: str) -> None:
        """A step was done for a worker: how far is it to be believed now?"""
        followed = self._workers.get(worker_id)
        if followed is None:
            return
        found = dict.fromkeys(
            reason for subscriber in followed.subscribers.values() for reason in subscriber.reasons
        )
        if followed.predictions.agree:
            found.pop("incomplete", None)
        reasons = (*found, *followed.predictions.reasons)
        trust = trust_of(reasons)
        changed = trust is not followed.trust
        followed.reasons, followed.trust = reasons, trust
        self._index.believe_events(worker_id, trust is Trust.EXACT)
        if changed and self._on_trust is not None:
            self._on_trust(worker_id, trust, reasons)
        self._sweep()

    def _cleared(self, worker_id: str, reason: str) -> None:
        followed = self._workers.get(worker_id)
        if followed is not None and reason == "restart":
            followed.predictions.forget()

    def _sweep(self) -> None:
        """Give memory back a little at a time."""
        if self._sweeper is None and not self._closed:
            loop = asyncio.get_running_loop()
            self._sweeper = loop.call_later(_SWEEP_PAUSE_S, self._sweep_some)

    def _sweep_some(self) -> None:
        self._sweeper = None
        if self._index.sweep(SWEEP_BLOCKS):
            self._sweep()

    def _resolve(self, block_hash: int) -> tuple[int, int] | None:
        for followed in self._workers.values():
            for subscriber in followed.subscribers.values():
                found = subscriber.applier.key_of(block_hash)
                if found is not None:
                    return found
        return None
