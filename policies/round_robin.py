"""Turns, blind to load and cache."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import nlargest
from typing import ClassVar

from kvroute.types import Decision, Fleet, RequestView, Worker

REMEMBERED = 4096
"""Workers whose last turn is kept; far more than a fleet, so only departed ones are ever forgotten."""


class RoundRobin:
    """Rule: the eligible worker whose last turn is the longest ago; one that never had a turn comes first.

    Over a fixed set this is plain round robin. A counter modulo a changing number of workers can skip the
    same worker for ever; the age of the last turn cannot, whichever subset is eligible on each call.

    Options: none.

    Trade-offs: needs no signal at all and spreads requests exactly evenly, but a request of 100k tokens
    counts as much as one of ten, and every repeated prompt is prefilled once per worker.
    """

    needs_prefix: ClassVar[bool] = False

    @dataclass(frozen=True, slots=True)
    class Options:
        pass

    def __init__(self, options: Options) -> None:
        self._turn = 0
        self._last_turn: dict[str, int] = {}

    def decide(self, request: RequestView, fleet: Fleet) -> Decision:
        return Decision.whole(self._next(fleet), "turn")

    def choose_decode(self, request: RequestView, fleet: Fleet) -> int:
        """Index of the decode worker: they take turns of their own."""
        return fleet.workers.index(self._next(fleet))

    def _next(self, fleet: Fleet) -> Worker:
        last_turn = self._last_turn.get
        worker = min(fleet.workers, key=lambda w: last_turn(w.id, 0))
        self._turn += 1
        self._last_turn[worker.id] = self._turn
        if len(self._last_turn) > 2 * REMEMBERED:
            self._last_turn = dict(nlargest(REMEMBERED, self._last_turn.items(), key=lambda item: item[1]))
        return worker
