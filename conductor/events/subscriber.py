"""The sockets of one publisher: a SUB for what happens, a DEALER for what was missed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import structlog
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from kvroute.clock import Clock
from kvroute.conductor.events.actions import Action, Apply, AskReplay, Clear, Watermark
from kvroute.conductor.events.apply import Applier
from kvroute.conductor.events.batches import Batch
from kvroute.conductor.events.decode import decode, ends_replay
from kvroute.conductor.events.limits import FeedLimits
from kvroute.conductor.events.sources import EventSource
from kvroute.conductor.events.stream import Stream
from kvroute.conductor.events.trust import HolderHealth, trust_of

log = structlog.get_logger(__name__)

RECEIVE_BATCHES = 4096
"""Kept by ZMQ when this process is busy; the publisher drops what is beyond, which shows as a gap."""
REPLAY_BATCHES = 20_000
_HANDSHAKE_S = 1.0
"""A subscription takes a moment to arrive after the connection stands: what fell in between is asked for."""
_ATTACH_AGAIN_S = 1.0


class Subscriber:
    """Of one rank. Owns its sockets and tasks from `start` to `close`; calls `changed` after each step."""

    def __init__(
        self,
        source: EventSource,
        applier: Applier,
        stream: Stream,
        context: zmq.asyncio.Context,
        limits: FeedLimits,
        clock: Clock,
        wall_s: Callable[[], float],
        changed: Callable[[], None],
        cleared: Callable[[str], None],
    ) -> None:
        self.source = source
        self.applier = applier
        self.stream = stream
        self.applied = stream.watermark
        """How far the index is; the stream may be ahead of it."""
        self.lag_s: float | None = None
        self.connections = 0
        self.slow_slices = 0
        self.settled = asyncio.Event()
        self._log = log.bind(
            worker=applier.holder.worker_id, dp_rank=source.dp_rank, endpoint=source.endpoint
        )
        self._connected = False
        self._limits = limits
        self._clock = clock
        self._wall_s = wall_s
        self._changed = changed
        self._cleared = cleared
        self._context = context
        self._todo: deque[Action] = deque()
        self._running = asyncio.Event()
        self._running.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._replay_task: asyncio.Task[None] | None = None
        self._sockets: list[zmq.asyncio.Socket] = []
        self._check: asyncio.TimerHandle | None = None
        self._heard = False
        self._slice_end_s = 0.0

    def __repr__(self) -> str:
        return f"<Subscriber {self.source.endpoint} rank {self.source.dp_rank}: {self.stream!r}>"

    # Life

    def start(self) -> None:
        """Open the sockets and begin; needs a running loop."""
        self._spawn(self._live())

    def close(self) -> list[asyncio.Task[None]]:
        """Close sockets and cancel tasks, at once; returns what is left to await. Idempotent."""
        if self._check is not None:
            self._check.cancel()
        self._todo.clear()
        for task in self._tasks:
            task.cancel()
        sockets, self._sockets = self._sockets, []
        for socket in sockets:
            with suppress(zmq.ZMQError):
                # It tells its monitor that this is the end, and waits for ever when that is closed already.
                socket.disable_monitor()
        for socket in sockets:
            socket.close(linger=0)
        return list(self._tasks)

    def pause(self) -> None:
        """Apply nothing until `resume`."""
        self._running.clear()

    def resume(self) -> None:
        """Go on; idempotent."""
        self._running.set()

    @property
    def watermark(self) -> Watermark:
        """What the index holds at this moment, for a stream that goes on from there.

        From grouped pages none can, nor from what is known to have flaws: they would be forgotten.
        """
        return Watermark() if self.applier.grouped or self.applier.flaws else self.applied

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the holder's index is not exact, see `trust.REASONS`."""
        stream = self.stream
        states = (
            ("restored", not stream.verified),
            ("connecting", stream.verified and not self.connections),
            ("disconnected", bool(self.connections) and not self._connected),
            ("replaying", bool(self.connections) and (stream.behind or bool(self._todo))),
            ("incomplete", not stream.complete and not stream.replaying),
            ("unchecked", not stream.checked),
        )
        return (*(reason for reason, true in states if true), *self.applier.reasons)

    def health(self) -> HolderHealth:
        """Everything known of it."""
        reasons = self.reasons
        more = {
            "connections": self.connections,
            "slow_slices": self.slow_slices,
            "expired_orphans": self.applier.orphans.expired,
        }
        return HolderHealth(
            dp_rank=self.source.dp_rank,
            trust=trust_of(reasons),
            reasons=reasons,
            last_seq=self.applied.seq,
            lag_s=self.lag_s,
            waiting=self.stream.waiting + len(self._todo),
            parked=len(self.applier.orphans),
            held_blocks=self.applier.held_blocks,
            counters={**self.stream.counts, **self.applier.counts, **more},
        )

    # Live

    async def _live(self) -> None:
        socket = self._socket(zmq.SUB, RECEIVE_BATCHES)
        socket.subscribe(self.source.topic)
        events = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED
        monitor = socket.get_monitor_socket(events)
        self._sockets.append(monitor)
        self._spawn(self._watch(monitor))
        await self._attach(socket)
        ready: zmq.Socket[bytes] = zmq.Socket.shadow(socket.underlying)
        while True:
            await socket.poll()
            self._begin_slice()
            with suppress(zmq.Again):
                while True:
                    self._on_live(ready.recv_multipart(zmq.NOBLOCK))
                    await self._work()
                    await self._let_others()
            self._step()

    async def _attach(self, socket: zmq.asyncio.Socket) -> None:
        attach = socket.bind if self.source.bind else socket.connect
        while True:
            try:
                attach(self.source.endpoint)
                return
            except zmq.ZMQError as error:
                self._log.warning("event socket not opened, trying again", error=str(error))
                await asyncio.sleep(_ATTACH_AGAIN_S)

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        """Whoever connects may be another process, and something may have been missed."""
        while True:
            message = parse_monitor_message(await monitor.recv_multipart())
            self._connected = message["event"] == zmq.Event.HANDSHAKE_SUCCEEDED
            if self._connected:
                self.connections += 1
                self._todo.extend(self.stream.connected())
                self._spawn(self._catch_up())  # not here: ZMQ waits for whoever does not read its monitor
                self._schedule_check(min(_HANDSHAKE_S, self._limits.verify_s))
            self._step()

    def _on_live(self, frames: list[bytes]) -> None:
        self._heard = True
        message = decode(frames, self._limits.payload_bytes)
        if isinstance(message, Batch):
            self._todo.extend(self.stream.live(message))
        else:
            self._todo.extend(self.stream.undecodable(message))
            count = self.stream.counts["undecodable"]
            if not count & (count - 1):
                self._log.warning("event messages not read", messages=count, reason=message.reason)

    def _schedule_check(self, after_s: float) -> None:
        if self._check is not None:
            self._check.cancel()
        self._check = asyncio.get_running_loop().call_later(after_s, self._on_check)

    def _on_check(self) -> None:
        quiet = not self._heard and self._running.is_set()
        if quiet and self._connected and self.source.replay_endpoint is not None:
            self._todo.extend(self.stream.verify())
            self._spawn(self._catch_up())
        self._heard = False
        self._schedule_check(self._limits.verify_s)

    # What the stream wants done

    def _begin_slice(self) -> None:
        self._slice_end_s = self._clock() + self._limits.slice_s

    async def _work(self) -> None:
        """Do what there is to do, in slices."""
        while self._todo:
            await self._running.wait()
            await self._let_others()
            if self._todo:
                self._perform(self._todo.popleft())

    async def _catch_up(self) -> None:
        self._begin_slice()
        await self._work()
        self._step()

    async def _let_others(self) -> None:
        if self._clock() >= self._slice_end_s:
            self.slow_slices += 1
            self._step()
            await asyncio.sleep(0)
            self._begin_slice()

    def _perform(self, action: Action) -> None:
        if isinstance(action, Apply):
            batch = action.batch
            try:
                self.applier.apply(batch, self._clock())
            except Exception:
                self._log.exception("event batch not applied", seq=batch.seq)
                self.applier.counts["failed_batches"] += 1
                self.applier.flaws.add("bad_events")
            self.applied = Watermark(batch.seq, batch.digest, self.stream.complete)
            self.lag_s = max(0.0, self._wall_s() - batch.ts_s) if batch.ts_s else None
        elif isinstance(action, Clear):
            self._log.warning("what events told is forgotten", reason=action.reason)
            self.applier.clear()
            self.applied = Watermark()
            self._cleared(action.reason)
        elif not any(isinstance(later, AskReplay) for later in self._todo):
            self._ask(action)

    def _step(self) -> None:
        if self.stream.replaying or self._todo or not self.connections:
            self.settled.clear()
        else:
            self.settled.set()
        self._changed()

    # Replay

    def _ask(self, action: AskReplay) -> None:
        if self._replay_task not in (None, asyncio.current_task()):
            self._replay_task.cancel()
        self._replay_task = self._spawn(self._replay(action))

    async def _replay(self, action: AskReplay) -> None:
        number = self.stream.asked
        if action.attempt or self.source.replay_endpoint is None:
            await asyncio.sleep(self._limits.retry_s * 2**action.attempt)
        ended = await self._exchange(action.first_seq, number)
        if self.stream.asked == number:
            nobody = self.source.replay_endpoint is None
            self._todo.extend(self.stream.replay_ended() if ended else self.stream.replay_failed(nobody))
            await self._catch_up()

    async def _exchange(self, first_seq: int, number: int) -> bool:
        """Ask, and bring the answers in while no other replay is wanted; False when they end too early."""
        if self.source.replay_endpoint is None:
            return False
        timeout_ms = int(self._limits.replay_timeout_s * 1000)
        socket = self._socket(zmq.DEALER, REPLAY_BATCHES)
        ready: zmq.Socket[bytes] = zmq.Socket.shadow(socket.underlying)
        try:
            socket.connect(self.source.replay_endpoint)
            await socket.send_multipart((b"", first_seq.to_bytes(8, "big")))
            while self.stream.asked == number and await socket.poll(timeout_ms):
                self._begin_slice()
                with suppress(zmq.Again):
                    while self.stream.asked == number:
                        frames = ready.recv_multipart(zmq.NOBLOCK)
                        if ends_replay(frames):
                            return True
                        self._on_replayed(frames)
                        await self._work()
                        await self._let_others()
            return False
        finally:
            if socket in self._sockets:
                self._sockets.remove(socket)
                socket.close(linger=0)

    def _on_replayed(self, frames: list[bytes]) -> None:
        message = decode(frames, self._limits.payload_bytes)
        if isinstance(message, Batch):
            self._todo.extend(self.stream.replayed(message))
        else:
            self._todo.extend(self.stream.replayed_undecodable(message))

    # Sockets and tasks

    def _socket(self, kind: int, receive: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.rcvhwm = receive
        socket.ipv6 = "[" in (self.source.replay_endpoint or "") + self.source.endpoint
        socket.maxmsgsize = self._limits.payload_bytes + 2**20
        socket.reconnect_ivl, socket.reconnect_ivl_max = 100, 5000
        socket.heartbeat_ivl, socket.heartbeat_timeout = 5000, 20_000
        self._sockets.append(socket)
        return socket

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._log.error("events are no longer followed", exc_info=task.exception())
