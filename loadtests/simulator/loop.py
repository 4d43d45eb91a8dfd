"""Virtual time: one heap of what is due."""

from __future__ import annotations

import gc
from collections.abc import Callable
from heapq import heappop, heappush

FIRST = -(2**62)
TURNS = -(2**61)


class EventLoop:
    """Calls what is due in the order of time, and at one moment in the order it was asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events = 0
        self.inside = 0
        """Requests in the system, held ones too."""
        self.inside_s = 0.0
        """That times seconds."""
        self._heap: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._order = 0
        self._firsts = FIRST

    def __repr__(self) -> str:
        return f"<EventLoop at {self.now_s:.3f} s, {len(self._heap)} due>"

    def clock(self) -> float:
        return self.now_s

    @property
    def is_due(self) -> bool:
        """Whether anything is still to come."""
        return bool(self._heap)

    def at(self, when_s: float, do: Callable[..., None], *arguments: object) -> None:
        self._order += 1
        heappush(self._heap, (when_s, self._order, do, arguments))

    def turn_at(self, when_s: float, turn: int, do: Callable[..., None], *arguments: object) -> None:
        """Before what `at` asks for, lower turns first, whenever they were asked for."""
        self._order += 1
        heappush(self._heap, (when_s, TURNS + (turn << 40) + self._order, do, arguments))

    def after(self, seconds: float, do: Callable[..., None], *arguments: object) -> None:
        self.at(self.now_s + seconds, do, *arguments)

    def first_at(self, when_s: float, do: Callable[..., None], *arguments: object) -> None:
        """Before everything of the same moment that is asked for by `at`."""
        self._firsts += 1
        heappush(self._heap, (when_s, self._firsts, do, arguments))

    def run(self) -> None:
        """Until nothing is due."""
        was_enabled = gc.isenabled()
        gc.disable()  # nothing here is cyclic garbage, and a look for it takes a third of the time
        heap = self._heap
        try:
            while heap:
                when_s, _, do, arguments = heappop(heap)
                self.inside_s += self.inside * (when_s - self.now_s)
                self.now_s = when_s
                self.events += 1
                do(*arguments)
        finally:
            if was_enabled:
                gc.enable()
