"""The latency limits of one request: its own where it has them, else the policy's."""

from __future__ import annotations

from msgspec import Struct


class Limits(Struct, frozen=True, gc=False):
    """In seconds; None is no limit."""

    ttft_s: float | None = None
    itl_s: float | None = None
    e2e_s: float | None = None

    def broken(self, ttft_s: float, itl_s: float, output_tokens: float) -> str | None:
        """The first limit that such a prediction breaks: ttft, itl, e2e; None when it keeps all."""
        if self.ttft_s is not None and ttft_s > self.ttft_s:
            return "ttft"
        if self.itl_s is not None and itl_s > self.itl_s:
            return "itl"
        if self.e2e_s is not None and ttft_s + output_tokens * itl_s > self.e2e_s:
            return "e2e"
        return None

    def wait_s(self, ttft_s: float, itl_s: float, output_tokens: float) -> float:
        """How long to wait until the limit that is broken may be kept again, should nobody else come.

        A queue shrinks by a second in a second. Steps get shorter as requests end: half of those there now
        are over after half of a decode life.
        """
        waits = [0.0]
        if self.ttft_s is not None:
            waits.append(ttft_s - self.ttft_s)
        if self.itl_s is not None and itl_s > self.itl_s:
            waits.append(output_tokens * itl_s / 2)
        if self.e2e_s is not None:
            waits.append(ttft_s + output_tokens * itl_s - self.e2e_s)
        return max(waits)


NO_LIMITS = Limits()
