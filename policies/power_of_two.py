"""The less loaded of two drawn at random."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import ClassVar

from kvroute.types import Decision, Fleet, RequestView


class PowerOfTwo:
    """Rule: draw two different eligible workers, take the one with fewer leases in flight; ties by chance.

    Options: `seed`, an integer for reproducible draws; none draws one from the system.

    Trade-offs: nearly as even as least_loaded, and when several gateways act on loads they see late or in
    part they do not all pick the same minimum. Blind to the cache; on two workers it is least_loaded.
    """

    needs_prefix: ClassVar[bool] = False

    @dataclass(frozen=True, slots=True)
    class Options:
        seed: int | None = None

    def __init__(self, options: Options) -> None:
        self._random = Random(options.seed).random

    def decide(self, request: RequestView, fleet: Fleet) -> Decision:
        workers, loads = fleet.workers, fleet.loads
        count = len(workers)
        if count == 1:
            return Decision.whole(workers[0], "only")
        # The first draw is uniform over the pair as well, so keeping it on a tie is a fair toss.
        first = int(self._random() * count)
        second = int(self._random() * (count - 1))
        second += second >= first
        chosen = second if loads[second].requests < loads[first].requests else first
        return Decision.whole(workers[chosen], "of_two")
