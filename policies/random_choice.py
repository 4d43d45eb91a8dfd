"""Uniform chance."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import ClassVar

from kvroute.types import Decision, Fleet, RequestView


class RandomChoice:
    """Rule: any eligible worker with equal chance.

    Options: `seed`, an integer for reproducible choices; none draws one from the system.

    Trade-offs: stateless between replicas, so several gateways do not march in step; the most loaded of N
    workers strays further from the mean than under round robin.
    """

    needs_prefix: ClassVar[bool] = False

    @dataclass(frozen=True, slots=True)
    class Options:
        seed: int | None = None

    def __init__(self, options: Options) -> None:
        self._random = Random(options.seed).random

    def decide(self, request: RequestView, fleet: Fleet) -> Decision:
        workers = fleet.workers
        return Decision.whole(workers[int(self._random() * len(workers))], "chance")
