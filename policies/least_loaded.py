"""Join the shortest queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvroute.policies.ties import least_loaded_index
from kvroute.types import Decision, Fleet, RequestView


class LeastLoaded:
    """Rule: the eligible worker with the fewest leases in flight; ties rotate.

    Options: none.

    Trade-offs: follows slow workers and long answers with no model of either. Replicas of
    the gateway that do not share load (`redis.url`) each fill the same idle worker. Blind to the cache.
    """

    needs_prefix: ClassVar[bool] = False

    @dataclass(frozen=True, slots=True)
    class Options:
        pass

    def __init__(self, options: Options) -> None:
        self._turn = -1

    def decide(self, request: RequestView, fleet: Fleet) -> Decision:
        self._turn += 1
        return Decision.whole(fleet.workers[least_loaded_index(fleet, self._turn)], "least_loaded")
