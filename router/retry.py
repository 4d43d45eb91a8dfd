"""How often a failed attempt may be given to another worker."""

from __future__ import annotations

from kvroute.config_groups import Retry


class RetryBudget:
    """Retries are a fraction of requests in the long run: a failing fleet is not hit twice as hard."""

    def __init__(self, options: Retry) -> None:
        self._ratio = options.budget_ratio
        self._burst = float(options.budget_burst)
        self._saved = self._burst

    def request(self) -> None:
        """Called once per request."""
        if self._saved < self._burst:
            self._saved = min(self._burst, self._saved + self._ratio)

    def take(self) -> bool:
        """Spend one retry; False when none is left."""
        if self._saved < 1.0:
            return False
        self._saved -= 1.0
        return True
