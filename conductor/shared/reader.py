"""Hears the others: one blocking read over the three streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from kvroute.clock import monotonic
from kvroute.conductor.shared.host import Host, HostFailures
from kvroute.conductor.shared.inbox import Inbox, Slice
from kvroute.conductor.shared.ledger import Ledger
from kvroute.conductor.shared.link import Backoff, Direction, Link
from kvroute.conductor.shared.loads import OthersLoads
from kvroute.conductor.shared.messages import (
    Decisions,
    LoadReport,
    Reader,
    RoutedBatch,
    SharedWorker,
    Unreadable,
)
from kvroute.conductor.shared.options import SharedOptions
from kvroute.conductor.shared.stats import Ignored, SharedStats
from kvroute.conductor.shared.streams import LOAD_TTL_S, WORKERS_BACK_S, Streams

COUNT = 64
"""Entries per stream and read: some megabytes at most."""
BLOCK_S = 0.5
LOOK_AGAIN_S = 5.0
"""At a key of ours that holds something else."""


class StreamReader:
    """One task. Starts where it stopped, or as far back as what is found can still matter."""

    def __init__(
        self,
        client: Redis,
        link: Link,
        options: SharedOptions,
        sender: str,
        inbox: Inbox,
        loads: OthersLoads,
        ledger: Ledger,
        host: Host,
        failures: HostFailures,
        stats: SharedStats,
    ) -> None:
        self._client = client
        self._link = link
        self._sender = sender
        self._inbox = inbox
        self._loads = loads
        self._ledger = ledger
        self._host = host
        self._failures = failures
        self._adopts = options.adopt_workers
        self._stats = stats
        streams = Streams.under(options.prefix)
        self._streams = streams
        self._back_s = {
            streams.routed: options.warm_s,
            streams.loads: LOAD_TTL_S,
            streams.workers: WORKERS_BACK_S,
        }
        self._last: dict[str, str] = {}
        """Stream -> id of the last entry that was read."""
        self._to_adopt: dict[str, SharedWorker] = {}
        self._routed = Reader(RoutedBatch)
        self._reports = Reader(LoadReport)
        self._decisions = Reader(Decisions)
        self.caught_up = asyncio.Event()
        """All that was there at the start has been read."""

    async def run(self) -> None:
        backoff = Backoff()
        while True:
            try:
                await self._follow(backoff)
            except Exception as error:
                self._link.fails(Direction.READ, error)
                await backoff.pause()

    async def _follow(self, backoff: Backoff) -> None:
        """Read on until a call fails, or it is time to look again at a stream that was none."""
        now_ms, ids = await self._positions()
        connected_s = monotonic()
        complete = len(ids) == len(self._back_s)
        behind = True
        while complete or monotonic() < connected_s + LOOK_AGAIN_S:
            block_ms = None if behind else int(BLOCK_S * 1000)
            wanted: dict[Any, Any] = dict(ids)
            reply: Any = await self._link.call(self._client.xread(wanted, COUNT, block_ms), extra_s=BLOCK_S)
            self._link.works(Direction.READ)
            backoff.reset()
            work = Slice()
            for raw_name, entries in reply:
                name = raw_name.decode()
                for raw_id, fields in entries:
                    ids[name] = self._last[name] = raw_id.decode()
                    # The clock of the server counts for what has been there a while, not for what comes now.
                    age_s = (now_ms - _ms(ids[name])) / 1000 + monotonic() - connected_s if behind else 0.0
                    await self._take(name, fields, age_s, work)
            if not any(len(entries) >= COUNT for _, entries in reply):
                behind = False
                self._adopt()
                self.caught_up.set()

    async def _positions(self) -> tuple[int, dict[str, str]]:
        """The server's time in ms, and for each stream after which entry to read.

        An id beyond the server's time is of another server, or of this one before its clock went back:
        entries that are new may have lower ones. Reading what is known already does no harm.
        """
        pipe = self._client.pipeline(transaction=False)
        pipe.time()
        for name in self._back_s:
            pipe.type(name)
        (seconds, micros), *types = await self._link.call(pipe.execute())
        now_ms = int(seconds) * 1000 + int(micros) // 1000
        ids: dict[str, str] = {}
        for (name, back_s), kind in zip(self._back_s.items(), types, strict=True):
            if kind not in (b"stream", b"none"):
                self._stats.ignored[Ignored.WRONG_TYPE] += 1
                continue
            first_ms = max(0, now_ms - int(back_s * 1000))
            last = self._last.get(name)
            ids[name] = last if last is not None and first_ms <= _ms(last) <= now_ms else f"{first_ms}-0"
        if not ids:
            raise ResponseError("none of the keys holds a stream")
        return now_ms, ids

    # --- what was heard ------------------------------------------------------------------------

    async def _take(self, name: str, fields: Mapping[bytes, bytes], age_s: float, work: Slice) -> None:
        try:
            if name == self._streams.routed:
                batch = self._routed.read(fields)
                for item in batch.items if batch.sender != self._sender else ():
                    self._inbox.take(item)
                    await work.pause()
            elif name == self._streams.loads:
                report = self._reports.read(fields)
                if report.sender != self._sender:
                    self._take_report(report, age_s)
            else:
                decisions = self._decisions.read(fields)
                if decisions.sender != self._sender:
                    self._take_decisions(decisions)
        except Unreadable as error:
            self._stats.ignored[error.reason] += 1
        await work.pause()

    def _take_report(self, report: LoadReport, age_s: float) -> None:
        changed = self._loads.report(report, age_s)
        if changed is None:
            self._stats.ignored[Ignored.TOO_MANY_REPLICAS] += 1
        else:
            self.tell_loads(changed)

    def tell_loads(self, urls: Iterable[str]) -> None:
        """Tell the host the totals of these workers, which have changed."""
        self._stats.replicas = self._loads.replicas
        for url in urls:
            self._tell(self._host.others_load, url, self._loads.of(url))

    def _take_decisions(self, decisions: Decisions) -> None:
        for worker in decisions.workers:
            merged = self._ledger.merge(worker)
            if isinstance(merged, Ignored):
                self._stats.ignored[merged] += 1
            elif merged and self._adopts:
                self._to_adopt[worker.url] = worker

    def _adopt(self) -> None:
        """Once all that was there is read: who joins late sees what holds, not how it came about."""
        for worker in self._to_adopt.values():
            self._tell(self._host.adopt, worker)
        self._to_adopt.clear()

    def _tell(self, method: Callable[..., None], *arguments: object) -> None:
        try:
            method(*arguments)
        except Exception:
            self._failures.add(method.__name__)


def _ms(entry_id: str) -> int:
    return int(entry_id.partition("-")[0])
