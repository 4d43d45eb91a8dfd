"""Times between tokens, of all answers together: too many to keep, so counted by size."""

from __future__ import annotations

from math import log

LEAST_S = 1e-5
STEP = 1.01
_LOG = log(STEP)
BINS = 1852
"""Each 1 % wider than the one before, from 10 us to 1000 s."""


class Gaps:
    """A histogram of seconds; each is known within 0.5 %, or 10 us."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts = [0] * BINS

    def add(self, gap_s: float) -> None:
        at = min(int(log(gap_s / LEAST_S) / _LOG) + 1, BINS - 1) if gap_s > LEAST_S else 0
        self._counts[at] += 1

    def merge(self, other: Gaps) -> None:
        """Add those of another."""
        self._counts = [mine + its for mine, its in zip(self._counts, other._counts, strict=True)]

    def table(self) -> tuple[list[float], list[int]]:
        """(seconds, how many), where there are any."""
        filled = [at for at, count in enumerate(self._counts) if count]
        return [_middle_s(at) for at in filled], [self._counts[at] for at in filled]


def _middle_s(at: int) -> float:
    return 0.0 if at == 0 else float(LEAST_S * STEP ** (at - 0.5))
