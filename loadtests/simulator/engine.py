"""One engine in virtual time: the scheduler of the mock engine, stepped by the event loop instead of a clock.

Steps that only decode are taken in a row, as one; an arrival ends the row with the step in progress.
"""

from __future__ import annotations

from bisect import bisect_right

from kvroute.loadtests.mock_engine.scheduler import Scheduler
from kvroute.loadtests.mock_engine.sequences import Sequence
from kvroute.loadtests.mock_engine.steps import Outcome, Step


class Gaps:
    """How long the steps of an engine took: the longest since any of them.

    A step that is no longer than a later one is forgotten, so that what is kept only decreases.
    """

    __slots__ = ("_numbers", "_seconds", "steps")

    def __init__(self) -> None:
        self.steps = 0
        """So far; a row counts as one."""
        self._numbers: list[int] = []
        self._seconds: list[float] = []

    def add(self, seconds: float) -> None:
        self.steps += 1
        kept = self._seconds
        while kept and kept[-1] <= seconds:
            kept.pop()
            self._numbers.pop()
        kept.append(seconds)
        self._numbers.append(self.steps)

    def longest_s(self, since: int) -> float:
        """Of those after the first `since`; 0 when there are none."""
        at = bisect_right(self._numbers, since)
        return self._seconds[at] if at < len(self._seconds) else 0.0


class SimulatedEngine:
    """Says when its step in progress ends; whoever drives it calls `complete` then, and `wake` after `submit`
    or `receive` when it was idle: who comes at the same moment runs in the same step.
    """

    __slots__ = ("ends_s", "gaps", "in_a_row", "is_up", "life", "scheduler", "started_s", "step", "turn")

    def __init__(self, scheduler: Scheduler, in_a_row: bool = True) -> None:
        self.scheduler = scheduler
        self.in_a_row = in_a_row
        self.ends_s: float | None = None
        """End of the step in progress; None when idle."""
        self.turn = 0
        """Moves on whenever `ends_s` becomes another."""
        self.step: Step | None = None
        """In progress."""
        self.started_s = 0.0
        """When that began."""
        self.gaps = Gaps()
        self.is_up = True
        self.life = 0
        """Moves on whenever it fails."""

    def submit(self, sequence: Sequence, now_s: float) -> None:
        """Queue a sequence; it can run from the next step on. ValueError when it could never fit."""
        self.scheduler.add(sequence)
        self._cut(now_s)

    def receive(self, sequence: Sequence, now_s: float) -> Outcome:
        """The KV of a remote sequence is here; it decodes from the next step on."""
        self._cut(now_s)
        return self.scheduler.receive(sequence)

    def abort(self, sequence: Sequence, now_s: float) -> None:
        """Drop a sequence in any phase."""
        self._cut(now_s)
        self.scheduler.abort(sequence)

    def let_go(self, sequence: Sequence, now_s: float) -> None:
        """Free the KV of one whose prompt was prefilled here for another engine, or do not hold it at all."""
        self._cut(now_s)
        self.scheduler.let_go(sequence)

    def fail(self) -> list[Sequence]:
        """Gone with all it held: whom it had, in order. It takes nothing until `is_up` again."""
        scheduler = self.scheduler
        for sequence in list(scheduler.held):
            scheduler.let_go(sequence)
        lost = [
            *scheduler.decoding,
            *scheduler.prefilling,
            *scheduler.receiving,
            *scheduler.loading,
            *scheduler.waiting,
        ]
        for sequence in lost:
            scheduler.abort(sequence)
        scheduler.clear()
        scheduler.cache.take_removed()
        scheduler.take_fetches()
        self.step = None
        self.is_up = False
        self.life += 1
        self._set_end(None)
        return lost

    def wake(self, now_s: float) -> None:
        """Begin a step, unless one is in progress."""
        if self.step is None:
            self._start(now_s)

    def complete(self) -> tuple[Step, Outcome]:
        """The step in progress is over: what it was, what came of it. `wake` is due, to begin the next."""
        step = self.step
        assert step is not None
        self.gaps.add(self.scheduler.longest_s(step))
        self.step = None
        self._set_end(None)  # the next may end at this very moment, when all it does is wait for what is here
        return step, self.scheduler.complete(step)

    def _cut(self, now_s: float) -> None:
        """A row in progress ends with its step in progress, and a wait for a load at once."""
        step = self.step
        if step is not None:
            self.scheduler.cut(step, now_s - self.started_s)
            self._set_end(self.started_s + step.duration_s)

    def _start(self, now_s: float) -> None:
        step = self.step = self.scheduler.step(self.in_a_row)
        self.started_s = now_s
        self._set_end(None if step is None else now_s + step.duration_s)

    def _set_end(self, ends_s: float | None) -> None:
        if ends_s != self.ends_s:
            self.ends_s = ends_s
            self.turn += 1
