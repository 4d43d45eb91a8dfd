"""The gateway's index across restarts: in a file of its own, and in Redis for replicas that start anew."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from prometheus_client.core import CounterMetricFamily

from kvroute.conductor.core import Engine
from kvroute.conductor.events import Watermark
from kvroute.conductor.shared import SharedState
from kvroute.conductor.snapshot import Snapshot, save
from kvroute.conductor.snapshot_format import SnapshotRefused
from kvroute.router.knowledge import Knowledge
from kvroute.router.metrics import Metrics

if TYPE_CHECKING:
    from prometheus_client.core import Metric

log = structlog.get_logger(__name__)

NAME = "index"
FORMAT = 1


class IndexSnapshots:
    """Opens the last snapshot at the start, gives each worker its part as it comes, saves now and then.

    The file is taken where there is one, else what some replica left in Redis. Nothing here fails a start.
    """

    def __init__(
        self,
        path: Path | None,
        shared: SharedState | None,
        interval_s: float,
        knowledge: Knowledge,
        metrics: Metrics,
    ) -> None:
        """Without a `path` of its own, a file in the system's temporary directory is on the way to Redis."""
        self._given = path
        self._shared = shared
        self._interval_s = interval_s
        self._knowledge = knowledge
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._snapshot: Snapshot | None = None
        self._keeper: asyncio.Task[None] | None = None
        self.counts: Counter[str] = Counter()
        """By result: saved, failed, restored, refused_REASON; skipped_REASON of workers not in the file."""
        metrics.add_source(self)

    async def start(self) -> None:
        """Open what there is; to be awaited before workers are followed."""
        try:
            path = self._path()
            await self._fetch(path)
            self._snapshot = await Snapshot.open(path)
        except SnapshotRefused as refused:
            self._refused(refused)
        except OSError as error:
            self._failed(error)
        self._keeper = asyncio.get_running_loop().create_task(self._keep())

    async def stop(self) -> None:
        """Save a last one and close; idempotent."""
        keeper, self._keeper = self._keeper, None
        if keeper is None:
            return
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        await self._save()
        if self._snapshot is not None:
            self._snapshot.close()
        if self._scratch is not None:
            self._scratch.cleanup()

    def _path(self) -> Path:
        """Where the file is; OSError when there is no place for it."""
        if self._given is not None:
            if not self._given.parent.is_dir():
                raise FileNotFoundError(f"conductor.snapshot_file: {self._given.parent} is no directory")
            return self._given
        if self._scratch is None:
            self._scratch = tempfile.TemporaryDirectory(prefix="kvroute-")
        return Path(self._scratch.name) / "index"

    async def _fetch(self, path: Path) -> None:
        if self._shared is None or await asyncio.to_thread(path.exists):
            return
        found = await self._shared.fetch_snapshot(NAME)
        if found is None:
            return
        if found.version != FORMAT:
            raise SnapshotRefused("version", f"Redis has a snapshot of format {found.version}, not {FORMAT}")
        await asyncio.to_thread(path.write_bytes, found.data)

    async def restore(self, engine: Engine, worker_id: str) -> dict[int, Watermark] | None:
        """Bring what the snapshot has of an engine into the index under this id, and how far it goes."""
        if self._snapshot is None or engine not in self._snapshot.sections:
            return None
        try:
            watermarks = await self._snapshot.load(engine, self._knowledge.index, worker_id)
        except SnapshotRefused as refused:
            self._refused(refused)
            return None
        self.counts["restored"] += 1
        return watermarks

    def _refused(self, refused: SnapshotRefused) -> None:
        self.counts[f"refused_{refused.reason}"] += 1
        if refused.reason != "missing":
            log.warning("snapshot refused", reason=refused.reason, error=str(refused))

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self._save()

    async def _save(self) -> None:
        knowledge = self._knowledge
        try:
            path = self._path()
            saved = await save(path, knowledge.index, knowledge.following.feed, knowledge.following.engines())
            stored = True
            if self._shared is not None and saved.workers:
                data = await asyncio.to_thread(path.read_bytes)
                stored = await self._shared.store_snapshot(NAME, data, FORMAT)
        except OSError as error:
            self._failed(error)
            return
        self.counts["saved" if stored else "not_stored_in_redis"] += 1
        for reason, workers in saved.skipped.items():
            self.counts[f"skipped_{reason}"] += workers

    def _failed(self, error: OSError) -> None:
        self.counts["failed"] += 1
        log.warning("no index snapshot", error=str(error))

    def gauges(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "kvroute_index_snapshots", "Snapshots saved and workers restored, by result.", labels=("result",)
        )
        for result, count in self.counts.items():
            family.add_metric((result,), count)
        yield family
