"""One engine in virtual time: the scheduler of the mock engine, stepped by the event loop instead of a clock.

Steps that only decode are taken in a row, as one; an arrival ends the row with the step in progress.
"""

from __future__ import annotations

from kvroute.loadtests.mock_engine.scheduler import Scheduler
from kvroute.loadtests.mock_engine.sequences import Sequence
from kvroute.loadtests.mock_engine.steps import Outcome, Step


class SimulatedEngine:
    """Says when its step in progress ends; whoever drives it calls `complete` then, and `wake` after `submit`
    when it was idle: who comes at the same moment runs in the same step.
    """

    __slots__ = ("_started_s", "_step", "ends_s", "in_a_row", "scheduler", "turn")

    def __init__(self, scheduler: Scheduler, in_a_row: bool = True) -> None:
        self.scheduler = scheduler
        self.in_a_row = in_a_row
        self.ends_s: float | None = None
        """End of the step in progress; None when idle."""
        self.turn = 0
        """Moves on whenever `ends_s` becomes another."""
        self._step: Step | None = None
        self._started_s = 0.0

    def submit(self, sequence: Sequence, now_s: float) -> None:
        """Queue a sequence; it can run from the next step on. ValueError when it could never fit."""
        self.scheduler.add(sequence)
        step = self._step
        if step is not None:
            self.scheduler.cut(step, now_s - self._started_s)
            self._set_end(self._started_s + step.duration_s)

    def wake(self, now_s: float) -> None:
        """Begin a step, unless one is in progress."""
        if self._step is None:
            self._start(now_s)

    def complete(self, now_s: float) -> tuple[Step, Outcome]:
        """The step in progress is over: what it was, what came of it; the next has begun."""
        step = self._step
        assert step is not None
        outcome = self.scheduler.complete(step)
        self._start(now_s)
        return step, outcome

    def _start(self, now_s: float) -> None:
        step = self._step = self.scheduler.step(self.in_a_row)
        self._started_s = now_s
        self._set_end(None if step is None else now_s + step.duration_s)

    def _set_end(self, ends_s: float | None) -> None:
        if ends_s != self.ends_s:
            self.ends_s = ends_s
            self.turn += 1
