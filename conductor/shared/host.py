"""What the shared state needs of the gateway it lives in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import structlog
from msgspec import Struct

from kvroute.clock import Clock
from kvroute.conductor.shared.messages import SharedWorker
from kvroute.conductor.shared.stats import Ignored, SharedStats
from kvroute.types import PromptKeys

log = structlog.get_logger(__name__)

QUIET_S = 60.0


class LocalWorker(Struct, frozen=True, gc=False):
    """The incarnation that this replica would send a request for a URL to."""

    worker_id: str
    started_at: float | None
    """The engine's own process start time; None while it has not said."""


class OthersLoad(Struct, frozen=True, gc=False):
    """What all other replicas have on one worker."""

    requests: int = 0
    pending_prefill_tokens: int = 0


class Host(Protocol):
    """Every method is called on the event loop and must not block; one that raises is counted."""

    def local_loads(self) -> Iterable[tuple[str, int, int]]:
        """(URL, requests in flight, prompt tokens not yet prefilled) of this replica alone.

        Asked every 50 ms. Workers without load may be left out; a URL given twice is added up.
        """
        ...

    def find_worker(self, url: str) -> LocalWorker | None:
        """None while no worker with this URL is registered."""
        ...

    def predict(self, worker_id: str, keys: PromptKeys) -> None:
        """Another replica has sent the prompt of `keys` to this worker."""
        ...

    def others_load(self, url: str, load: OthersLoad) -> None:
        """The load of the others on this URL has become `load`. May come before the worker is known here:
        ask `SharedState.others_load` when one is added."""
        ...

    def adopt(self, worker: SharedWorker) -> None:
        """A decision taken at another replica: add, drain or remove the worker of this URL.

        May repeat what is so already, and must not be passed to `SharedState.decided`.
        """
        ...


class HostFailures:
    """Each is counted, one a minute and method is logged: a host that is broken is so for every call."""

    def __init__(self, stats: SharedStats, clock: Clock) -> None:
        self._stats = stats
        self._clock = clock
        self._quiet_until_s: dict[str, float] = {}

    def add(self, method: str) -> None:
        """Call it while the exception is handled."""
        self._stats.ignored[Ignored.HOST_FAILED] += 1
        now_s = self._clock()
        if now_s >= self._quiet_until_s.get(method, now_s):
            self._quiet_until_s[method] = now_s + QUIET_S
            log.exception("the gateway failed its shared state", method=method)
