"""The latency limits of one request: its own where it has them, else the policy's."""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

BROKEN = ("ttft", "itl", "e2e", "room")
"""What a candidate may break; the last is no limit of time, but the decode worker's KV room."""
KEPT = 0
"""The code of a candidate that keeps all; else its place in `BROKEN` plus one."""
Codes = NDArray[np.int8]
Floats = NDArray[np.float64]


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

    def codes(self, ttft_s: Floats, itl_s: Floats, output_tokens: float) -> Codes | None:
        """Which limit each of many predictions breaks, as `broken`; None where there is none to break.

        The two broadcast against each other.
        """
        if self == NO_LIMITS:
            return None
        codes = np.zeros(np.broadcast_shapes(ttft_s.shape, itl_s.shape), np.int8)
        for code, limit_s, predicted_s in (  # the first that is broken is written last
            (3, self.e2e_s, ttft_s + output_tokens * itl_s),
            (2, self.itl_s, itl_s),
            (1, self.ttft_s, ttft_s),
        ):
            if limit_s is not None:
                codes[np.broadcast_to(predicted_s > limit_s, codes.shape)] = code
        return codes

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
