"""How much of something there is per second, of late."""

from __future__ import annotations

from math import exp

TAU_S = 30.0
"""Time constant: what was half a minute ago counts about a third."""


class Rate:
    """An exponentially fading sum; constant time and memory."""

    __slots__ = ("_at_s", "_fading", "_since_s")

    def __init__(self) -> None:
        self._fading = 0.0
        self._at_s = 0.0
        self._since_s: float | None = None

    def add(self, now_s: float, amount: float = 1.0) -> None:
        """So much more."""
        if self._since_s is None:
            self._since_s = now_s
        self._fading = self._fading * exp((self._at_s - now_s) / TAU_S) + amount
        self._at_s = now_s

    def per_s(self, now_s: float) -> float:
        """Amount per second; what is missing of a window that has only begun is made up for."""
        if self._since_s is None:
            return 0.0
        seen = 1 - exp(-max(now_s - self._since_s, 1.0) / TAU_S)
        return self._fading * exp((self._at_s - now_s) / TAU_S) / (TAU_S * seen)
