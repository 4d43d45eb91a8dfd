"""How much of something there is per second, of late."""

from __future__ import annotations

from math import exp

TAU_S = 30.0
"""Time constant: what was half a minute ago counts about a third."""


class Rate:
    """An exponentially fading sum; constant time and memory."""

    __slots__ = ("_at_s", "_fading")

    def __init__(self) -> None:
        self._fading = 0.0
        self._at_s = 0.0

    def add(self, now_s: float, amount: float = 1.0) -> None:
        """So much more."""
        self._fading = self._fading * exp((self._at_s - now_s) / TAU_S) + amount
        self._at_s = now_s

    def per_s(self, now_s: float) -> float:
        """Amount per second; at first too low, as if there had been nothing before."""
        return self._fading * exp((self._at_s - now_s) / TAU_S) / TAU_S
