"""Prefixes on their way up from the tiers below the GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from kvroute.loadtests.mock_engine.sequences import Sequence


class LoadQueue:
    """Sequences that wait for their loads, which use one link in turn."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Sequence, float]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for sequence, _ in self._waiting)

    @property
    def next_s(self) -> float:
        """Seconds until the first has arrived; IndexError when there is none."""
        return self._waiting[0][1]

    def add(self, sequence: Sequence, load_s: float) -> None:
        """Start a load of so many seconds, once those before it are over."""
        self._waiting.append((sequence, load_s))

    def remove(self, sequence: Sequence) -> None:
        """Break a load off; what it has used of the link is lost."""
        self._waiting = deque(each for each in self._waiting if each[0] is not sequence)

    def advance(self, seconds: float) -> list[Sequence]:
        """Let time pass; who has arrived, in order."""
        arrived = []
        while self._waiting:
            sequence, left_s = self._waiting[0]
            if left_s > seconds:
                self._waiting[0] = (sequence, left_s - seconds)
                break
            seconds -= left_s
            self._waiting.popleft()
            arrived.append(sequence)
        return arrived
