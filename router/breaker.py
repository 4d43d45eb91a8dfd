"""Circuit breaker: stop asking a worker that keeps failing, then let one request through to see."""

from __future__ import annotations

from enum import StrEnum

from kvroute.config_groups import Breaker as BreakerOptions


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Closed until `failures` in a row; open for `open_s`; then half open, with one trial at a time.

    A 4xx is neither success nor failure: it neither closes the breaker nor resets the streak.
    """

    def __init__(self, options: BreakerOptions) -> None:
        self._options = options
        self._streak = 0
        self._trial = False
        self.open_until_s: float | None = None
        """None when closed; in the past when half open."""

    def __repr__(self) -> str:
        return f"<Breaker streak={self._streak} open_until={self.open_until_s} trial={self._trial}>"

    def state(self, now_s: float) -> BreakerState:
        if self.open_until_s is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now_s < self.open_until_s else BreakerState.HALF_OPEN

    def allows(self, now_s: float) -> bool:
        """True when a request may be sent; half open, only while no trial is under way."""
        state = self.state(now_s)
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and not self._trial)

    def sent(self, now_s: float) -> bool:
        """A request goes out; True when it is the trial."""
        if self._trial or self.state(now_s) is not BreakerState.HALF_OPEN:
            return False
        self._trial = True
        return True

    def success(self) -> None:
        self._streak = 0
        self._trial = False
        self.open_until_s = None

    def failure(self, now_s: float) -> None:
        self._streak += 1
        if self.state(now_s) is BreakerState.HALF_OPEN or self._streak >= self._options.failures:
            self.open_until_s = now_s + self._options.open_s
        self._trial = False

    def no_verdict(self, is_trial: bool) -> None:
        """A request told nothing (4xx, client gone); if it was the trial, the next one is."""
        if is_trial:
            self._trial = False
