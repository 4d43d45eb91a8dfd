"""Decisions about workers, the same at every replica once all have heard of them."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from kvroute.conductor.shared.messages import MAX_WORKERS, Intent, SharedWorker
from kvroute.conductor.shared.stats import Ignored
from kvroute.endpoint import Endpoint, EndpointError

REMEMBERED_MS = 24 * 3_600_000
"""A removal is remembered so long: a replica that was cut off for longer may bring the worker back."""
AHEAD_MS = 24 * 3_600_000
"""A version further ahead of this clock could never be replaced by an honest decision; it is not taken."""


class Ledger:
    """Per URL the decision with the highest (version, origin).

    Merging is commutative and idempotent, so replicas may repeat to each other all they know, in any order.
    Versions follow the wall clock and never go back, so they hold beyond the life of all replicas. Only what
    an operator decides at run time is in here: what stands in a replica's configuration is its own affair,
    or a worker that was taken out of the file would be brought back by the replica that restarts last.
    """

    def __init__(self, origin: str, wall_ms: Callable[[], int]) -> None:
        self._origin = origin
        self._wall_ms = wall_ms
        self._workers: dict[str, SharedWorker] = {}
        self._highest = 0

    def decide(self, worker: SharedWorker) -> SharedWorker | None:
        """A decision taken here: the worker with version and origin, None when it changes nothing."""
        known = self._workers.get(worker.url)
        if known is not None and replace(known, version=0, origin="") == replace(
            worker, version=0, origin=""
        ):
            return None
        if known is None and not self._make_room():
            return None
        self._highest = max(self._highest + 1, self._wall_ms())
        decided = replace(worker, version=self._highest, origin=self._origin)
        self._workers[worker.url] = decided
        return decided

    def merge(self, worker: SharedWorker) -> bool | Ignored:
        """A decision of another replica: True when it is news, or why it cannot be taken."""
        known = self._workers.get(worker.url)
        if known is not None and (known.version, known.origin) >= (worker.version, worker.origin):
            return False
        if worker.version > self._wall_ms() + AHEAD_MS:
            return Ignored.FROM_THE_FUTURE
        if not _is_canonical(worker.url):
            return Ignored.BAD_URL
        if known is None and self._is_forgotten(worker):
            return False
        if known is None and not self._make_room():
            return Ignored.TOO_MANY_WORKERS
        self._highest = max(self._highest, worker.version)
        self._workers[worker.url] = worker
        return True

    def all(self) -> list[SharedWorker]:
        """What to repeat to the others; forgets removals of long ago."""
        for worker in [w for w in self._workers.values() if self._is_forgotten(w)]:
            del self._workers[worker.url]
        return list(self._workers.values())

    def _is_forgotten(self, worker: SharedWorker) -> bool:
        return worker.intent is Intent.REMOVED and worker.version < self._wall_ms() - REMEMBERED_MS

    def _make_room(self) -> bool:
        """False when `MAX_WORKERS` are known and none of them is a removal that could be forgotten."""
        if len(self._workers) < MAX_WORKERS:
            return True
        removed = [w for w in self._workers.values() if w.intent is Intent.REMOVED]
        if not removed:
            return False
        del self._workers[min(removed, key=lambda w: w.version).url]
        return True


def _is_canonical(url: str) -> bool:
    try:
        return Endpoint.parse(url).url == url
    except EndpointError:
        return False
