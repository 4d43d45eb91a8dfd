"""KV pulled from a peer before a request is queued, as by vLLM's p2p tier, with the gateway's deadline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec import Struct

from kvroute.loadtests.mock_engine.scheduler import Scheduler
from kvroute.loadtests.simulator.memory import PullFrom
from kvroute.policies.costs.links import Link, LinkQueue
from kvroute.router.hints.fields import HintOptions
from kvroute.router.hints.pulling import first_byte_limit_s
from kvroute.types import Prediction, Pull, RequestView

_OPTIONS = HintOptions()


class Pulled(Struct, frozen=True):
    """What comes for one request, and when."""

    keys: Sequence[int]
    """Of its blocks from `start` on; empty when none comes in time, and the prompt is computed."""
    start: int
    at_s: float


class PeerPulls:
    """The way out of each worker, used in turn by those that pull from it."""

    def __init__(self, link: Link, pull_from: PullFrom, workers: int, block_bytes: int) -> None:
        self._from_gpu = pull_from == "any"
        self._queues = [LinkQueue(link) for _ in range(workers)]
        self._block_bytes = block_bytes
        self.results: Counter[str] = Counter()
        """Pulls by what came of them: pulled, late, nothing (the peer had no more than was there)."""

    def begin(
        self,
        pull: Pull,
        source: int,
        engines: tuple[Scheduler, Scheduler],
        keys: Sequence[int],
        prediction: Prediction,
        view: RequestView,
        now_s: float,
    ) -> Pulled:
        """Ask the source for what the target has not; `engines` are the two."""
        there, here = engines
        stop = _held(there, keys, with_gpu=self._from_gpu)
        start = _held(here, keys, with_gpu=True)
        if stop <= start:
            self.results["nothing"] += 1
            return Pulled((), start, now_s)
        at_s = self._queues[source].send((stop - start) * self._block_bytes, now_s)
        # The gateway watches the first byte; here the arrival of the KV stands for it.
        limit_s = first_byte_limit_s(pull, prediction, view, _OPTIONS)
        if limit_s is not None and at_s - now_s > limit_s:
            self.results["late"] += 1
            return Pulled((), start, now_s + limit_s)
        self.results["pulled"] += 1
        return Pulled(keys[start:stop], start, at_s)


def _held(engine: Scheduler, keys: Sequence[int], *, with_gpu: bool) -> int:
    """Leading blocks that lie below the GPU, or there too."""
    count = 0
    while count < len(keys):
        left = keys[count:]
        more = engine.cache.match(left) if with_gpu else 0
        if engine.below is not None:
            more += engine.below.match(left[more:])
        if not more:
            break
        count += more
    return count
