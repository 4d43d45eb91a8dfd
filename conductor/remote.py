"""Asks a conductor that runs in another process, within a time budget, and says why when it could not."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import count

import structlog
from msgspec import Struct

from kvroute.clock import Clock, monotonic
from kvroute.conductor import wire
from kvroute.conductor.events.sources import EventSource
from kvroute.conductor.keys import Namespace
from kvroute.conductor.link import Link
from kvroute.types import NO_MATCH, PrefixMatch, PromptKeys, Trust

log = structlog.get_logger(__name__)

MAX_KEY_BYTES = wire.MAX_FRAME_BYTES // 2


class Fallback(StrEnum):
    """Why a lookup came back without an answer."""

    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"
    """Not connected, or the connection ended before the answer."""
    OVERLOADED = "overloaded"
    """More lookups under way than `max_pending`, or the conductor does not read what is sent."""
    PROTOCOL = "protocol"
    """The answer was not one."""
    TOO_LONG = "too_long"
    """Keys of the prompt beyond what a frame holds."""


class Lookup(Struct, frozen=True, gc=False):
    """What the conductor said, parallel to the worker ids asked about."""

    matches: Sequence[PrefixMatch]
    trusts: Sequence[Trust]
    fallback: Fallback | None = None
    """Set when it said nothing: then nothing matches, and every worker is judged by its load alone."""


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """How to reach the conductor, and how long it may take."""

    address: str
    """unix:///path or tcp://host:port"""
    budget_s: float = 0.005
    max_pending: int = 4096
    """Lookups under way at most."""
    connect_s: float = 2.0
    """From the first packet to the conductor's hello."""
    stall_s: float = 1.0
    """A connection on which lookups were sent and nothing came for so long is given up."""
    reconnect_min_s: float = 0.05
    reconnect_max_s: float = 2.0


class RemoteConductor:
    """One connection to a conductor, kept up by itself.

    `start` and `close` once each, in a running loop; everything else is called in that loop. Lookups made
    in one turn of the loop leave as one batch. Nothing waits longer than `budget_s`, queues are bounded, and
    what is lost is counted: lookups in `fallbacks`, news to the conductor in `dropped`.
    """

    def __init__(self, options: RemoteOptions, clock: Clock = monotonic) -> None:
        self._options = options
        self._address = wire.SocketAddress.parse(options.address)
        self._clock = clock
        self._ids = count(1)
        self._pending: dict[int, tuple[asyncio.Future[Lookup], int]] = {}
        self._queue: list[wire.Message] = []
        self._queued_bytes = 0
        self._queued_lookups: list[int] = []
        self._workers: dict[str, wire.Follow] = {}
        self._connection: Link | None = None
        """Set while lookups may be sent: from the conductor's hello until the connection ends."""
        self._silent_since_s: float | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._random = random.Random()
        self.fallbacks: Counter[Fallback] = Counter()
        self.dropped: Counter[str] = Counter()
        """Predictions and observations not sent, by reason."""
        self.lookups = 0
        self.frames_sent = 0
        self.late_answers = 0
        self.connects = 0
        self.follow_errors: dict[str, str] = {}
        """Worker id -> why the conductor does not follow it."""

    @property
    def connected(self) -> bool:
        return self._connection is not None

    def start(self) -> None:
        """Connect, and again whenever the connection ends, with growing pauses."""
        self._loop = asyncio.get_running_loop()
        self._keeper = self._loop.create_task(self._keep_connected())

    async def close(self) -> None:
        """End it; lookups under way come back as unavailable. Idempotent."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)

    async def match(self, keys: Sequence[PromptKeys], worker_ids: Sequence[str]) -> Lookup:
        """What each worker holds of a prompt. `keys` has one set per block size among the workers."""
        self.lookups += 1
        connection = self._connection
        key_bytes = sum(len(part.keys) for part in keys) * wire.KEY_BYTES
        if connection is None:
            return self._without(Fallback.UNAVAILABLE, len(worker_ids))
        if key_bytes > MAX_KEY_BYTES or len(keys) > wire.MAX_KEY_SETS:
            return self._without(Fallback.TOO_LONG, len(worker_ids))
        if connection.paused or len(self._pending) >= self._options.max_pending:
            return self._without(Fallback.OVERLOADED, len(worker_ids))
        number = self._next_id()
        answer: asyncio.Future[Lookup] = self._loop.create_future()
        self._pending[number] = (answer, len(worker_ids))
        self._queued_lookups.append(number)
        self._send(wire.Match(number, [wire.Keys.pack(part) for part in keys], list(worker_ids)), key_bytes)
        return await answer

    def predict(self, worker_id: str, keys: PromptKeys) -> None:
        """A prompt was just routed to this worker."""
        key_bytes = len(keys.keys) * wire.KEY_BYTES
        if key_bytes > MAX_KEY_BYTES:
            self.dropped[Fallback.TOO_LONG] += 1
        elif self._may_tell():
            self._send(wire.Predict(worker_id, wire.Keys.pack(keys)), key_bytes)

    def observe(self, worker_id: str, predicted_tokens: int, cached_tokens: int, prompt_tokens: int) -> None:
        """What an engine reported of a prompt, beside what `match` had said of it."""
        if self._may_tell():
            self._send(wire.Observe(worker_id, predicted_tokens, cached_tokens, prompt_tokens))

    def follow(
        self,
        worker_id: str,
        url: str,
        namespace: Namespace,
        sources: Sequence[EventSource] = (),
        *,
        block_tokens: int | None = None,
        min_block_tokens: int = 16,
        silent_tier_blocks: int = 0,
    ) -> None:
        """A worker has come; arguments as `EventFeed.follow` takes them. Without sources it is known by its
        url, and by predictions alone. The conductor is told now, and again after every reconnect.
        """
        packed = [wire.Source.pack(source) for source in sources]
        message = wire.Follow(
            self._next_id(),
            worker_id,
            url,
            namespace,
            packed,
            block_tokens,
            min_block_tokens,
            silent_tier_blocks,
        )
        try:
            wire.check(message)
        except wire.WireError as error:  # what an engine says of itself must not cost the others theirs
            self.follow_errors[worker_id] = str(error)
            log.warning("worker not followed", worker=worker_id, error=str(error))
            return
        self._workers[worker_id] = message
        if self._connection is not None:
            self._send(message)

    def unfollow(self, worker_id: str) -> None:
        """A worker has left for good."""
        if self._workers.pop(worker_id, None) is not None and self._connection is not None:
            self._send(wire.Unfollow(worker_id))
        self.follow_errors.pop(worker_id, None)

    def _next_id(self) -> int:
        return next(self._ids) & 0xFFFFFFFF

    def _may_tell(self) -> bool:
        connection = self._connection
        if connection is not None and not connection.paused and self._queued_bytes < MAX_KEY_BYTES * 4:
            return True
        self.dropped[Fallback.UNAVAILABLE if connection is None else Fallback.OVERLOADED] += 1
        return False

    def _send(self, message: wire.Message, key_bytes: int = 0) -> None:
        if not self._queue:
            self._loop.call_soon(self._flush)
        self._queue.append(message)
        self._queued_bytes += key_bytes

    def _flush(self) -> None:
        """Send what this turn of the loop has gathered."""
        messages, self._queue, self._queued_bytes = self._queue, [], 0
        lookups, self._queued_lookups = self._queued_lookups, []
        connection = self._connection
        if connection is None:  # it ended within this turn, and took the lookups with it
            return
        if lookups:  # before anything is sent: whatever becomes of that, they come back
            if self._silent_since_s is None:
                self._silent_since_s = self._clock()
            deadline_s = self._clock() + self._options.budget_s
            self._loop.call_later(self._options.budget_s, self._check_budget, lookups, deadline_s)
        frames, left_out = connection.send(messages)
        self.frames_sent += frames
        if left_out:
            self.dropped[Fallback.TOO_LONG] += left_out

    def _check_budget(self, lookups: Sequence[int], deadline_s: float) -> None:
        # The loop's own time may be that of the turn's beginning: what this turn did is no fault of theirs.
        left_s = deadline_s - self._clock()
        if left_s > 0:
            self._loop.call_later(left_s, self._look_once_more, lookups)
        else:
            self._look_once_more(lookups)

    def _look_once_more(self, lookups: Sequence[int]) -> None:
        # An answer may have come while the loop was busy. What a timer calls soon, uvloop does before it
        # reads its sockets again; what that calls soon, after.
        self._loop.call_soon(self._loop.call_soon, self._expire, lookups)

    def _expire(self, lookups: Sequence[int]) -> None:
        late = [self._pending.pop(number) for number in lookups if number in self._pending]
        self._resolve(late, Fallback.TIMEOUT)
        since_s = self._silent_since_s
        if late and since_s is not None and self._clock() - since_s > self._options.stall_s:
            assert self._connection is not None
            self._connection.abort(wire.WireError("stalled", f"no answer for {self._options.stall_s} s"))

    def _without(self, reason: Fallback, workers: int) -> Lookup:
        self.fallbacks[reason] += 1
        return Lookup([NO_MATCH] * workers, [Trust.LOAD_ONLY] * workers, reason)

    def _resolve(self, lookups: Sequence[tuple[asyncio.Future[Lookup], int]], reason: Fallback) -> None:
        for answer, workers in lookups:
            if not answer.done():
                answer.set_result(self._without(reason, workers))

    def answered(self, answers: Sequence[wire.Answer]) -> None:
        """Of the connection; raises `WireError` for an answer to something else."""
        self._silent_since_s = None
        for message in answers:
            if isinstance(message, wire.Matched):
                self._matched(message)
            elif isinstance(message, wire.Followed):
                self._followed(message)
            else:
                raise wire.WireError("protocol", "a second hello")

    def _matched(self, message: wire.Matched) -> None:
        asked = self._pending.get(message.id)
        if asked is None:
            self.late_answers += 1
            return
        answer, workers = asked
        if len(message.rows) != workers:
            raise wire.WireError("protocol", f"{len(message.rows)} rows for {workers} workers")
        del self._pending[message.id]
        if not answer.done():
            answer.set_result(
                Lookup([row.match() for row in message.rows], [row.trust for row in message.rows])
            )

    def _followed(self, message: wire.Followed) -> None:
        for worker_id, follow in self._workers.items():
            if follow.id == message.id:
                if message.error is None:
                    self.follow_errors.pop(worker_id, None)
                else:
                    self.follow_errors[worker_id] = message.error
                    log.warning("conductor cannot follow a worker", worker=worker_id, error=message.error)

    async def _keep_connected(self) -> None:
        options = self._options
        pause_s = options.reconnect_min_s
        complained = False
        while True:
            connection = Link(self.answered)
            failure: Exception | None
            try:
                async with asyncio.timeout(options.connect_s):  # unlike wait_for, it loses no cancellation
                    await self._open(connection)
                pause_s, complained = options.reconnect_min_s, False
                failure = await connection.closed
            except (OSError, TimeoutError, wire.WireError) as error:
                failure = error
            finally:
                connection.abort()
                self._lost(connection)
            if not complained:
                log.warning(
                    "conductor unavailable", address=options.address, error=str(failure) or repr(failure)
                )
                complained = True
            await asyncio.sleep(pause_s * self._random.uniform(0.5, 1.0))
            pause_s = min(pause_s * 2, options.reconnect_max_s)

    async def _open(self, connection: Link) -> None:
        address = self._address
        if address.unix_path is not None:
            await self._loop.create_unix_connection(lambda: connection, address.unix_path)
        else:
            await self._loop.create_connection(lambda: connection, address.host, address.port)
        await connection.greeted
        self._connection = connection
        self.connects += 1
        log.info("conductor connected", address=self._options.address, workers=len(self._workers))
        for message in self._workers.values():
            self._send(message)

    def _lost(self, connection: Link) -> None:
        self._connection = None
        self._silent_since_s = None
        self._queue.clear()
        self._queued_bytes = 0
        self._queued_lookups.clear()
        lookups, self._pending = list(self._pending.values()), {}
        self._resolve(lookups, Fallback.PROTOCOL if connection.misbehaved else Fallback.UNAVAILABLE)
