"""Tells the others: what was routed, what is in flight, what an operator decided."""

from __future__ import annotations

import asyncio
import contextlib
import math

from msgspec import Struct
from redis.asyncio import Redis

from kvroute.clock import monotonic
from kvroute.conductor.shared.host import Host, HostFailures
from kvroute.conductor.shared.ledger import Ledger
from kvroute.conductor.shared.link import Backoff, Direction, Link, is_of_the_key, why_lost
from kvroute.conductor.shared.messages import (
    ENTRY_BYTES,
    MAX_WORKERS,
    VERSION,
    Decisions,
    LoadReport,
    SharedWorker,
    WorkerShare,
    encode,
    split,
)
from kvroute.conductor.shared.options import SharedOptions
from kvroute.conductor.shared.outbox import Outbox
from kvroute.conductor.shared.stats import Dropped, SharedStats
from kvroute.conductor.shared.streams import (
    DECISIONS_KEPT,
    FLUSH_S,
    HEARTBEAT_S,
    LOAD_TTL_S,
    LOADS_S,
    REPEAT_S,
    REPORTS_KEPT,
    WORKERS_BACK_S,
    Streams,
)

QUEUE_BYTES = 16 * 2**20
FLUSH_BYTES = 4 * ENTRY_BYTES
"""Packed in one go, below a millisecond of the loop; the rest follows at once."""
MIN_ENTRIES, MAX_ENTRIES = 64, 1_000_000


class _Write(Struct, frozen=True, gc=False):
    stream: str
    payload: bytes
    keep: int
    """Entries the stream may have, about."""
    ttl_s: float
    prompts: int = 0


class StreamWriter:
    """One task, one call at a time, each with all that has gathered since the last.

    A call that fails is not repeated: predictions are dropped and counted, load and decisions are told anew
    as soon as Redis answers again.
    """

    def __init__(
        self,
        client: Redis,
        link: Link,
        options: SharedOptions,
        sender: str,
        ledger: Ledger,
        host: Host,
        failures: HostFailures,
        stats: SharedStats,
    ) -> None:
        self._client = client
        self._link = link
        self._streams = Streams.under(options.prefix)
        self._stream_bytes = options.stream_bytes
        self._routed_ttl_s = options.warm_s + REPEAT_S
        self._sender = sender
        self._ledger = ledger
        self._host = host
        self._failures = failures
        self._stats = stats
        self._wake = asyncio.Event()
        self.outbox = Outbox(sender, QUEUE_BYTES, stats, self._wake.set)
        self._decided: list[SharedWorker] = []
        self._mean_entry_bytes = 1024.0
        self._works = False
        self._losses = 0
        self._told_loads: list[WorkerShare] = []
        self._told_at_s = -math.inf
        self._repeated_at_s = -math.inf

    def tell(self, worker: SharedWorker) -> None:
        """A decision taken here; the ledger has it, so it is repeated if this is lost."""
        if self._works:
            self._decided.append(worker)
            self._wake.set()

    async def run(self) -> None:
        backoff = Backoff()
        while True:
            try:
                await self._gather()
                await self._flush()
            except Exception as error:
                self._lose(error)
                await backoff.pause()
            else:
                backoff.reset()

    async def say_goodbye(self) -> None:
        """Tell that nothing is in flight here any more; for a stop that is none of a crash."""
        if self._works:
            payload = encode(LoadReport(self._sender, []))
            await self._send([_Write(self._streams.loads, payload, REPORTS_KEPT, 2 * LOAD_TTL_S)])

    async def _gather(self) -> None:
        """Until something is routed or decided, or it is time to look at the loads."""
        if not self._works:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOADS_S):
                await self._wake.wait()
        if self._wake.is_set():
            await asyncio.sleep(FLUSH_S)
        self._wake.clear()

    async def _flush(self) -> None:
        now_s = monotonic()
        if self._losses != self._link.losses:
            # A server that was restarted quickly is noticed by the reader alone, whose call is always open.
            self._losses = self._link.losses
            self._told_at_s = self._repeated_at_s = -math.inf
        writes = [*self._routed(), *self._loads(now_s), *self._decisions(now_s)]
        if not writes:
            return
        await self._send(writes)
        if not self._works:
            self._works = True
            self._link.works(Direction.WRITE)
            self.outbox.open()
        if len(self.outbox):
            self._wake.set()

    def _lose(self, error: Exception) -> None:
        self._works = False
        self._link.fails(Direction.WRITE, error)
        self.outbox.close()
        self._decided.clear()

    async def _send(self, writes: list[_Write]) -> None:
        """One round trip. Raises when the server refuses all of it; what is refused in part is counted."""
        pipe = self._client.pipeline(transaction=False)
        for write in writes:
            pipe.xadd(write.stream, {VERSION: write.payload}, maxlen=write.keep, approximate=True)
        for stream, ttl_s in {write.stream: write.ttl_s for write in writes}.items():
            pipe.pexpire(stream, int(ttl_s * 1000))
        prompts = sum(write.prompts for write in writes)
        try:
            results = await self._link.call(pipe.execute(raise_on_error=False))
        except BaseException:
            if prompts:
                self._stats.dropped[Dropped.UNSURE] += prompts
            raise
        errors: list[Exception] = []
        for write, result in zip(writes, results, strict=False):
            if isinstance(result, Exception):
                errors.append(result)
                if write.prompts:
                    self._stats.dropped[Dropped.REFUSED] += write.prompts
            else:
                self._stats.told += write.prompts
        if len(errors) == len(writes) and not any(map(is_of_the_key, errors)):
            raise errors[0]
        self._stats.lost.update(map(why_lost, errors))

    # --- what there is to tell -----------------------------------------------------------------

    def _routed(self) -> list[_Write]:
        writes: list[_Write] = []
        for entry in self.outbox.take(FLUSH_BYTES):
            self._mean_entry_bytes += 0.05 * (len(entry.payload) - self._mean_entry_bytes)
            keep = min(MAX_ENTRIES, max(MIN_ENTRIES, int(self._stream_bytes / self._mean_entry_bytes)))
            writes.append(
                _Write(self._streams.routed, entry.payload, keep, self._routed_ttl_s, entry.prompts)
            )
        return writes

    def _loads(self, now_s: float) -> list[_Write]:
        """A report when the loads have changed, at most every `LOADS_S`, and a heartbeat when not.

        A heartbeat is also what tries a server that was lost, so there is one whatever the host does.
        """
        age_s = now_s - self._told_at_s
        if age_s < LOADS_S:
            return []
        try:
            shares = [WorkerShare(*load) for load in self._host.local_loads() if load[1] or load[2]]
        except Exception:
            self._failures.add("local_loads")
            shares = self._told_loads
        if shares == self._told_loads and age_s < HEARTBEAT_S:
            return []
        self._told_loads = shares
        self._told_at_s = now_s
        payload = encode(LoadReport(self._sender, shares[:MAX_WORKERS]))
        return [_Write(self._streams.loads, payload, REPORTS_KEPT, 2 * LOAD_TTL_S)]

    def _decisions(self, now_s: float) -> list[_Write]:
        """What was just decided, and from time to time all that is known."""
        if now_s - self._repeated_at_s >= REPEAT_S:
            self._repeated_at_s = now_s
            payloads = split(self._sender, self._ledger.all())
        else:
            payloads = [encode(Decisions(self._sender, [worker])) for worker in self._decided]
        self._decided.clear()
        return [_Write(self._streams.workers, data, DECISIONS_KEPT, WORKERS_BACK_S) for data in payloads]
