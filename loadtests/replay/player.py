"""Open loop: each request goes out when it is due, whatever became of those before it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from kvroute.clock import monotonic
from kvroute.loadtests.replay.answer import Request
from kvroute.loadtests.replay.gaps import Gaps
from kvroute.loadtests.replay.target import Target
from kvroute.loadtests.results.measured import Measured

AT_LIMIT = "in_flight_limit"
"""Why a request was not sent at all: so many were under way that this client takes no more."""
CLIENT_ERROR = "client_error"
"""A defect of this client, whose trace is logged: the request counts all the same."""


@dataclass(slots=True)
class Played:
    """What one run came to."""

    requests: list[Measured] = field(default_factory=list)
    """In the order in which they ended."""
    gaps: Gaps = field(default_factory=Gaps)
    most_in_flight: int = 0
    other_length: int = 0
    """Whole answers of another length than was asked for."""
    cut: int = 0
    """Requests that were under way when the run was stopped; they are in no figure."""

    def merge(self, other: Played) -> None:
        """Add those of another process."""
        self.requests += other.requests
        self.gaps.merge(other.gaps)
        self.most_in_flight += other.most_in_flight
        self.other_length += other.other_length
        self.cut += other.cut

    @property
    def lags_s(self) -> list[float]:
        """How late each request was sent, sorted; those that were not sent have none."""
        return sorted(made.sent_s - made.arrival_s for made in self.requests if made.sent_s is not None)


class Player:
    """Plays requests against one target, once."""

    def __init__(self, target: Target, max_in_flight: int) -> None:
        self.played = Played()
        self.sent = 0
        self._target = target
        self._max_in_flight = max_in_flight
        self._uncounted = Gaps()
        self._tasks: set[asyncio.Task[Measured]] = set()
        self._pacer: asyncio.Task[None] | None = None

    async def play(self, requests: Iterable[Request], epoch_s: float) -> Played:
        """Send them all, in order of `due_s`; each is taken from the iterator just before it is due.

        `epoch_s` (monotonic) is their time 0.
        """
        pacer = self._pacer = asyncio.ensure_future(self._pace(requests, epoch_s))
        try:
            await asyncio.wait({pacer})
            if not pacer.cancelled():
                pacer.result()
            while self._tasks:
                await asyncio.wait(self._tasks)
        finally:
            self.stop()
        return self.played

    def stop(self) -> None:
        """Send nothing more and cut what is under way; `play` returns what was measured until now."""
        for task in (*self._tasks, self._pacer):
            if task is not None:
                task.cancel()

    async def _pace(self, requests: Iterable[Request], epoch_s: float) -> None:
        for request in requests:
            due_s = epoch_s + request.due_s
            while (wait_s := due_s - monotonic()) > 0:  # noqa: ASYNC110  # a timer may come a little early
                await asyncio.sleep(wait_s)
            self.sent += 1
            if len(self._tasks) >= self._max_in_flight:
                self.played.requests.append(_failed(request, AT_LIMIT))
                continue
            gaps = self.played.gaps if request.counts else self._uncounted
            task = asyncio.ensure_future(self._target.ask(request, epoch_s, gaps))
            self._tasks.add(task)
            task.add_done_callback(partial(self._ended, request))
            self.played.most_in_flight = max(self.played.most_in_flight, len(self._tasks))
            await asyncio.sleep(0)  # it goes out now, before the next one is made

    def _ended(self, request: Request, task: asyncio.Task[Measured]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            self.played.cut += 1
            return
        error = task.exception()
        if error is not None:
            self.played.requests.append(_failed(request, CLIENT_ERROR))
            task.get_loop().call_exception_handler({"message": CLIENT_ERROR, "exception": error})
            return
        made = task.result()
        self.played.requests.append(made)
        if made.failure is None and made.output_tokens != request.output_tokens:
            self.played.other_length += 1


def _failed(request: Request, why: str) -> Measured:
    return Measured(request.due_s, request.prompt_tokens, request.output_tokens, failure=why)
