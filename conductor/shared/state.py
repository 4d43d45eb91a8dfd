"""Several gateways, one knowledge: what each routed, what each carries, what its operator decided."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time

import structlog

from kvroute.clock import monotonic
from kvroute.conductor.shared.host import Host, HostFailures, OthersLoad
from kvroute.conductor.shared.inbox import Inbox
from kvroute.conductor.shared.ledger import Ledger
from kvroute.conductor.shared.link import Link, connect
from kvroute.conductor.shared.loads import OthersLoads
from kvroute.conductor.shared.messages import SharedWorker
from kvroute.conductor.shared.options import SharedOptions
from kvroute.conductor.shared.reader import StreamReader
from kvroute.conductor.shared.snapshots import Snapshot, Snapshots
from kvroute.conductor.shared.stats import SharedStats
from kvroute.conductor.shared.streams import LOAD_TTL_S
from kvroute.conductor.shared.writer import StreamWriter
from kvroute.types import PromptKeys

log = structlog.get_logger(__name__)

TICK_S = 0.1


class SharedState:
    """One replica's share in what all replicas know, kept in Redis (or Valkey, which speaks the same).

    The request path only calls `routed` and `others_load`, which touch memory alone. Whatever Redis does,
    nothing here raises or waits for it: without it the replica stands on what it knows itself, says so once
    in the log and in `stats.connected`, and heals as soon as Redis answers. The load of a replica that
    fell silent counts for `LOAD_TTL_S` at most.

    One Redis server (or a pair behind one address) is meant, not a cluster. Who can write to it can steer
    requests and add workers: guard it as the admin API is guarded.

    Not thread safe: one event loop owns it.
    """

    def __init__(self, options: SharedOptions, replica_id: str, host: Host) -> None:
        """`replica_id` names this gateway in logs and decisions; two with one name do no harm."""
        if not 1 <= len(replica_id) <= 128 or not replica_id.isascii() or not replica_id.isprintable():
            raise ValueError(f"replica_id: {replica_id!r}; accepted: 1 to 128 printable ASCII characters")
        self.stats = SharedStats()
        self._timeout_s = options.timeout_s
        sender = f"{replica_id}/{secrets.token_hex(8)}"
        self._client = connect(options)
        self._link = Link(options, self.stats)
        self._ledger = Ledger(sender, lambda: time.time_ns() // 1_000_000)
        self._loads = OthersLoads(LOAD_TTL_S, monotonic)
        failures = HostFailures(self.stats, monotonic)
        self._inbox = Inbox(host, failures, self.stats, monotonic)
        self._writer = StreamWriter(
            self._client, self._link, options, sender, self._ledger, host, failures, self.stats
        )
        self._reader = StreamReader(
            self._client,
            self._link,
            options,
            sender,
            self._inbox,
            self._loads,
            self._ledger,
            host,
            failures,
            self.stats,
        )
        self._snapshots = Snapshots(self._client, self._link, options.prefix, self.stats)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, within_s: float = 2.0) -> bool:
        """Begin, and read what others have routed; True when that was done in time, else it goes on.

        Call it once the configured workers are registered and before requests come: a replica that knows
        nothing scatters the prefixes that the others have gathered.
        """
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(run, name=f"kvroute-shared-{name}")
            for name, run in (
                ("write", self._writer.run()),
                ("read", self._reader.run()),
                ("tick", self._tick()),
            )
        ]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._reader.caught_up.wait()
                await self._link.up.wait()
        return self._reader.caught_up.is_set()

    async def stop(self) -> None:
        """Tell the others that nothing is in flight here, if that can be done in time, and close."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self._writer.outbox.close()
        try:
            await self._writer.say_goodbye()
        except Exception as error:
            log.warning("the others could not be told of the stop", error=str(error)[:300])
        self._link.closed()
        with contextlib.suppress(Exception):
            async with asyncio.timeout(self._timeout_s):
                await self._client.aclose()

    # --- the request path ----------------------------------------------------------------------

    def routed(self, url: str, started_at: float | None, keys: PromptKeys) -> None:
        """A prompt was sent to the engine behind `url`, which says it started at `started_at`."""
        self._writer.outbox.add(url, started_at, keys)

    def others_load(self, url: str) -> OthersLoad:
        """What all other replicas have on this worker now."""
        return self._loads.of(url)

    # --- the operator --------------------------------------------------------------------------

    def decided(self, worker: SharedWorker) -> None:
        """An operator added, drained or removed this worker here, at run time; `version` is set here.

        Not for workers of the configuration or found by discovery, which each replica has by itself, nor for
        one with an API key of its own, since secrets are not shared.
        """
        decision = self._ledger.decide(worker)
        if decision is not None:
            self._writer.tell(decision)

    # --- snapshots -----------------------------------------------------------------------------

    async def store_snapshot(self, name: str, data: bytes | bytearray, version: int) -> bool:
        """Keep `data` for an hour, in place of what was stored under `name`; False when it failed."""
        return await self._snapshots.store(name, data, version)

    async def fetch_snapshot(self, name: str) -> Snapshot | None:
        """What some replica stored last under `name`; None when there is none or it cannot be had."""
        return await self._snapshots.fetch(name)

    # -------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        """What goes on while Redis hangs: the load of a silent replica ages, predictions stop waiting."""
        while True:
            await asyncio.sleep(TICK_S)
            self._reader.tell_loads(self._loads.expire())
            await self._inbox.retry()

    def __repr__(self) -> str:
        stats = self.stats
        return (
            f"<SharedState {'connected' if stats.connected else 'local'} replicas={stats.replicas} "
            f"told={stats.told} heard={stats.heard}>"
        )
