"""Does the engine count the tokens that were predicted? A model whose predictions do not hold loses them."""

from __future__ import annotations

from enum import Enum
from itertools import count

from kvroute.clock import Clock

DISTRUST_AT = 3.0
FORGIVEN_PER_MATCH = 0.1
"""So that distrust takes three mismatches close together, or more than one prediction in eleven for long."""
PROBE_AFTER_S = 30.0
PROBE_EVERY = 8
TRUST_AFTER = 16


class Use(Enum):
    """What to do with a prediction now."""

    EXACT = "exact"
    PROBE = "probe"
    """Make it and observe it, but route without it."""
    NONE = "none"


class Agreement:
    """Of one model. Any thread may call `use`; all else belongs to one, the event loop's.

    Trust is lost at `DISTRUST_AT` mismatches, each match making up for a tenth of one. Then, after
    `PROBE_AFTER_S`, one request in `PROBE_EVERY` is predicted without effect, and trust returns after
    `TRUST_AFTER` matches in a row; a mismatch among them starts the wait again.
    """

    def __init__(self, clock: Clock) -> None:
        self.matches = 0
        self.mismatches = 0
        self.losses = 0
        """How often trust was lost."""
        self._clock = clock
        self._score = 0.0
        self._probe_from_s: float | None = None
        self._asked = count(1)
        self._in_a_row = 0

    @property
    def trusted(self) -> bool:
        return self._probe_from_s is None

    def use(self) -> Use:
        """For the next request. Counts it. From any thread: it reads what changes elsewhere once only."""
        probe_from_s = self._probe_from_s
        if probe_from_s is None:
            return Use.EXACT
        if self._clock() < probe_from_s:
            return Use.NONE
        return Use.PROBE if next(self._asked) % PROBE_EVERY == 0 else Use.NONE

    def observe_prompt_tokens(self, predicted: int, reported: int) -> bool:
        """What the engine reported for a request whose tokens were predicted. True when trust changed."""
        if predicted == reported:
            self.matches += 1
            return self._matched()
        self.mismatches += 1
        return self._mismatched()

    def distrust(self) -> None:
        """The engine was asked and tokenises otherwise."""
        if self._probe_from_s is None:
            self.losses += 1
        self._in_a_row = 0
        self._probe_from_s = self._clock() + PROBE_AFTER_S

    def _matched(self) -> bool:
        self._score = max(0.0, self._score - FORGIVEN_PER_MATCH)
        if self._probe_from_s is None:
            return False
        self._in_a_row += 1
        if self._in_a_row < TRUST_AFTER:
            return False
        self._probe_from_s, self._score = None, 0.0
        return True

    def _mismatched(self) -> bool:
        trusted = self.trusted
        self._score += 1.0
        if not trusted or self._score >= DISTRUST_AT:
            self.distrust()
        return trusted and not self.trusted

    def __repr__(self) -> str:
        return f"<Agreement {'trusted' if self.trusted else 'distrusted'} {self.matches}={self.mismatches}!>"
