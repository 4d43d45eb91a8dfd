"""Predictions of other replicas on their way into the local index."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from enum import Enum

from msgspec import Struct

from kvroute.clock import Clock
from kvroute.conductor.shared.host import Host, HostFailures
from kvroute.conductor.shared.messages import Routed
from kvroute.conductor.shared.stats import Ignored, SharedStats

WAIT_S = 5.0
"""A worker that another replica has just found is found here within a probe or two."""
MAX_WAITING_BYTES = 16 * 2**20
ITEM_BYTES = 600
SLICE_S = 0.002


class Slice:
    """Work of background tasks gives way to requests every `SLICE_S`."""

    def __init__(self) -> None:
        self._ends_s = time.monotonic() + SLICE_S

    async def pause(self) -> None:
        """Let others run if this slice is over."""
        if time.monotonic() >= self._ends_s:
            await asyncio.sleep(0)
            self._ends_s = time.monotonic() + SLICE_S


class _Verdict(Enum):
    WAIT_FOR_WORKER = 1
    WAIT_FOR_START_TIME = 2
    WAIT_FOR_RESTART = 3
    OLD = 4


class _Waiting(Struct, gc=False):
    item: Routed
    until_s: float

    @property
    def bytes(self) -> int:
        return ITEM_BYTES + len(self.item.keys)


class Inbox:
    """Gives each prediction to the incarnation that it is about.

    A URL is not enough: an engine that was restarted holds nothing of what its predecessor was sent. Where
    both replicas know the engine's start time it decides; where this one does not know it yet, or not the
    worker, the prediction waits, bounded in time and bytes, oldest out first.
    """

    def __init__(self, host: Host, failures: HostFailures, stats: SharedStats, clock: Clock) -> None:
        self._host = host
        self._failures = failures
        self._stats = stats
        self._clock = clock
        self._waiting: deque[_Waiting] = deque()

    def take(self, item: Routed) -> None:
        if not self._deliver(item, last_chance=False):
            self._wait(_Waiting(item, self._clock() + WAIT_S))

    async def retry(self) -> None:
        """Look again at what waits; call it now and then."""
        work = Slice()
        verdicts: dict[tuple[str, float | None], bool] = {}
        for _ in range(len(self._waiting)):
            if not self._waiting:  # overflow has dropped some during a pause
                break
            waiting = self._waiting.popleft()
            self._stats.waiting_bytes -= waiting.bytes
            late = waiting.until_s <= self._clock()
            name = (waiting.item.url, waiting.item.started_at)
            if late or verdicts.get(name, True):
                verdicts[name] = self._deliver(waiting.item, last_chance=late)
            if not late and not verdicts[name]:
                self._wait(waiting)
            await work.pause()

    def _wait(self, waiting: _Waiting) -> None:
        self._waiting.append(waiting)
        self._stats.waiting_bytes += waiting.bytes
        while self._stats.waiting_bytes > MAX_WAITING_BYTES:
            self._stats.waiting_bytes -= self._waiting.popleft().bytes
            self._stats.ignored[Ignored.WAITING_FULL] += 1

    def _deliver(self, item: Routed, *, last_chance: bool) -> bool:
        """True when the item is done with, one way or the other."""
        try:
            verdict = self._judge(item, last_chance=last_chance)
            if isinstance(verdict, str):
                self._host.predict(verdict, item.prompt_keys())
                self._stats.heard += 1
                return True
        except Exception:
            self._failures.add("predict")
            return True
        if verdict is not _Verdict.OLD and not last_chance:
            return False
        unknown = verdict is _Verdict.WAIT_FOR_WORKER
        self._stats.ignored[Ignored.UNKNOWN_WORKER if unknown else Ignored.OTHER_INCARNATION] += 1
        return True

    def _judge(self, item: Routed, *, last_chance: bool) -> str | _Verdict:
        """The id of the worker that the item is about, or what stands in the way."""
        worker = self._host.find_worker(item.url)
        if worker is None:
            return _Verdict.WAIT_FOR_WORKER
        if item.started_at is None or item.started_at == worker.started_at:
            return worker.worker_id
        if worker.started_at is None:  # an engine that does not say here what it said there: most likely it
            return worker.worker_id if last_chance else _Verdict.WAIT_FOR_START_TIME
        return _Verdict.WAIT_FOR_RESTART if item.started_at > worker.started_at else _Verdict.OLD
