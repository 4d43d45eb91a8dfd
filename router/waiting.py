"""Requests held in the gateway until a worker frees: late binding, bounded in number and in time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from msgspec import Struct

from kvroute.clock import Clock
from kvroute.policies.holding import HoldQueue
from kvroute.router.dispatch import Choice, Dispatcher
from kvroute.router.knowledge import Prompt
from kvroute.router.metrics import Metrics, gauge
from kvroute.router.parsed_request import ParsedRequest
from kvroute.router.workers import Registry
from kvroute.types import Hold

if TYPE_CHECKING:
    from prometheus_client.core import Metric

SWEEP_S = 0.05
"""Held requests are priced again this often although nothing was heard: time alone shortens a queue."""
REST = 4.0
"""After looking at those held, rest for so many times as long: looking takes a fifth of the time at most."""


class _Held(Struct):
    """A request that waits, and whom to tell."""

    request: ParsedRequest
    prompt: Prompt
    request_id: str
    since_s: float
    answer: asyncio.Future[Choice]


class Waiting:
    """Stands before the dispatcher: an answer at once where there is one, else when its turn comes."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        registry: Registry,
        metrics: Metrics,
        *,
        limit: int,
        limit_s: float,
        clock: Clock,
    ) -> None:
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._limit_s = limit_s
        self._clock = clock
        self._queue: HoldQueue[_Held] = HoldQueue(limit)
        self._holds = True
        self._next: asyncio.Handle | None = None
        self._rested_s = 0.0
        registry.on_freed(self._freed)
        metrics.add_source(self)

    def __len__(self) -> int:
        return len(self._queue)

    async def choose(self, request: ParsedRequest, prompt: Prompt, request_id: str) -> Choice:
        """As `Dispatcher.choose`, for a request that has just arrived; it waits for at most `limit_s`."""
        dispatcher = self._dispatcher
        dispatcher.arrived()
        if self._queue.full or not self._holds:
            self._metrics.holds.add("full" if self._holds else "closing")
            return dispatcher.choose(request, prompt, (), request_id)
        answer = dispatcher.consider(request, prompt, (), request_id, self._queue.promised_s)
        if isinstance(answer, Choice):
            return answer
        future: asyncio.Future[Choice] = asyncio.get_running_loop().create_future()
        held = _Held(request, prompt, request_id, self._clock(), future)
        return await self._wait(held, answer)

    async def _wait(self, held: _Held, hold: Hold) -> Choice:
        ticket = self._queue.add(held, held.request.view, hold, held.since_s)
        ended = "left"
        try:
            self._freed()
            await asyncio.wait([held.answer], timeout=self._limit_s)
            self._queue.remove(ticket)
            if held.answer.done():
                ended = "placed" if held.answer.exception() is None else "refused"
                return held.answer.result()
            ended = "expired"
            held_s = self._clock() - held.since_s
            return self._dispatcher.choose(held.request, held.prompt, (), held.request_id, held_s)
        except asyncio.CancelledError:
            self._queue.remove(ticket)
            if held.answer.done() and held.answer.exception() is None:
                held.answer.result().lease.release()
            raise
        finally:
            self._metrics.holds.add(ended)
            self._metrics.hold_time.of().observe(self._clock() - held.since_s)

    def close(self) -> None:
        """Hold nobody any more: those held are sent as things are."""
        self._holds = False
        while len(self._queue):
            self._pump()

    # --- when something frees ------------------------------------------------------------------

    def _freed(self) -> None:
        """A worker gave a first byte, ended a request or changed: once per turn of the loop is enough."""
        if len(self._queue):
            self._again(max(0.0, self._rested_s - self._clock()))

    def _again(self, after_s: float) -> None:
        if self._next is not None:
            self._next.cancel()
        loop = asyncio.get_running_loop()
        self._next = loop.call_later(after_s, self._pump) if after_s else loop.call_soon(self._pump)

    def _pump(self) -> None:
        started_s = self._clock()
        released: list[tuple[_Held, Choice | Exception]] = self._queue.pump(self._decide)
        for held, answer in released:
            if isinstance(answer, Exception):
                held.answer.set_exception(answer)
            else:
                held.answer.set_result(answer)
        ended_s = self._clock()
        self._rested_s = ended_s + REST * (ended_s - started_s)
        if len(self._queue):
            self._again(SWEEP_S)

    def _decide(self, held: _Held, promised_s: Mapping[str, float]) -> Hold | Choice | Exception:
        held_s = self._clock() - held.since_s
        dispatcher = self._dispatcher
        try:
            if not self._holds:
                return dispatcher.choose(held.request, held.prompt, (), held.request_id, held_s)
            return dispatcher.consider(held.request, held.prompt, (), held.request_id, promised_s, held_s)
        except Exception as error:  # it is that request's alone: others are released in the same turn
            return error

    def gauges(self) -> Iterator[Metric]:
        yield gauge("kvroute_held_requests", "Requests waiting for a worker.", (), [((), len(self._queue))])
