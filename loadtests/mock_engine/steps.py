"""What one step of a scheduler runs, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from kvroute.conductor.tiers.stack import TierChange
from kvroute.loadtests.mock_engine.sequences import Sequence


class StepTimes(Protocol):
    """How long a step takes. One that only decodes takes a time at most quadratic in the context."""

    def step_s(self, prefill_tokens: int, attention: float, decodes: int, context_tokens: float) -> float:
        """Seconds; `attention` is the sum of n (P + n/2) over prefill chunks of n tokens after P."""
        ...


@dataclass(slots=True)
class Step:
    """What one step runs, or several alike in a row that only decode."""

    duration_s: float = 0.0
    """Of all of them."""
    count: int = 1
    context_tokens: int = 0
    """Attended to by the decodes of the first."""
    prefills: list[tuple[Sequence, int]] = field(default_factory=list)
    """(sequence, tokens of its chunk)"""
    decodes: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks `start` to `stop` of a sequence became resident."""

    sequence: Sequence
    start: int
    stop: int


@dataclass(slots=True)
class Outcome:
    """What a step did: in the order of these fields, `demoted`, `removed`, `stored`, `offloaded`.

    Removals happened before the stores that needed their room. What goes from the GPU to a tier below is told
    before it is gone from the GPU, and what is written there as it is computed after it is in the GPU.
    """

    tokens: list[Sequence] = field(default_factory=list)
    """Each got one more token, or one for every step of a row."""
    firsts: list[Sequence] = field(default_factory=list)
    """Of those, whose token is their first."""
    finished: list[Sequence] = field(default_factory=list)
    stored: list[Stored] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)
    demoted: list[TierChange] = field(default_factory=list)
    """In the tiers below, as blocks were read or evicted above."""
    offloaded: list[TierChange] = field(default_factory=list)
    """In the tiers below, as blocks were stored above."""

    @property
    def has_changes(self) -> bool:
        """Whether any tier holds other blocks than before."""
        return bool(self.demoted or self.removed or self.stored or self.offloaded)


@dataclass(slots=True)
class Totals:
    """Counters since the start."""

    queried_tokens: int = 0
    cached_tokens: int = 0
    """Found in the GPU."""
    loaded_tokens: int = 0
    """Found below it."""
    prefill_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
