"""What a second of decoding counts beside a second of the wait for a first token."""

from __future__ import annotations

EXPONENT = 0.7
EQUAL_RATIO = 0.09
"""Prefill over decode life, from which on a second of either counts as the weights say."""
PLACED = 300
"""Requests over which both are averaged."""
FEW = 20
"""Until so many were placed, nothing is known."""


class Worth:
    """Follows how long prefills and decode lives are, in the requests placed of late.

    Where answers take a hundred times as long as prefills, a second more of either is not the same to who
    waits: a share of the one against a share of the other lies nearer, and `EXPONENT` between the two (0
    counts seconds, 1 shares). With the weights left as they are, engines fast at prefill would keep prompts
    waiting for the sake of a hundredth of their answers' time.
    """

    __slots__ = ("_decode_s", "_placed", "_prefill_s")

    def __init__(self) -> None:
        self._placed = 0
        self._prefill_s = self._decode_s = 0.0

    def add(self, prefill_s: float, decode_s: float) -> None:
        """A request was placed: what its prefill should take, and its decode life."""
        self._placed += 1
        share = 1 / min(self._placed, PLACED)
        self._prefill_s += share * (prefill_s - self._prefill_s)
        self._decode_s += share * (decode_s - self._decode_s)

    @property
    def of_decoding(self) -> float:
        """From 0 to 1: 1 where decode lives are short."""
        if self._placed < FEW or self._decode_s <= 0:
            return 1.0
        return min(1.0, float((self._prefill_s / self._decode_s / EQUAL_RATIO) ** EXPONENT))
