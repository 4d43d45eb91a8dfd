"""Requests held in the gateway until a worker frees: late binding, bounded in number and in time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from msgspec import Struct

from kvroute.clock import Clock
from kvroute.policies.holding import HoldQueue, Ticket
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


class _Left(Exception):
    """In place of an answer for somebody who is gone."""


class _Held(Struct):
    """A request that waits, and whom to tell. Its answer is cancelled with whoever waits for it."""

    request: ParsedRequest
    prompt: Prompt
    request_id: str
    since_s: float
    answer: asyncio.Future[Choice]
    ticket: Ticket[_Held] | None = None
    """Its place, once it is held."""
    limit: asyncio.TimerHandle | None = None
    """Held no longer than that."""
    ended: str = "left"


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
        self._arrived: list[_Held] = []
        """In this turn of the loop."""
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
        loop = asyncio.get_running_loop()
        if dispatcher.orders:
            held = _Held(request, prompt, request_id, self._clock(), loop.create_future())
            if not self._arrived:
                loop.call_soon(self._place_arrived)
            self._arrived.append(held)
        else:
            answer = dispatcher.consider(request, prompt, (), request_id, self._queue.promised_s)
            if isinstance(answer, Choice):
                return answer
            held = _Held(request, prompt, request_id, self._clock(), loop.create_future())
            self._hold(held, answer)
        return await self._answer(held)

    async def _answer(self, held: _Held) -> Choice:
        try:
            return await held.answer
        except asyncio.CancelledError:
            answer = held.answer
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                answer.result().release()  # it was placed in the same turn
            raise
        finally:
            if held.ticket is not None:
                self._no_longer(held)

    # --- those that are held -------------------------------------------------------------------

    def _place_arrived(self) -> None:
        """Those that came in one turn of the loop, in the policy's order: each is placed, or held."""
        arrived, self._arrived = self._arrived, []
        if len(arrived) > 1:
            order = self._dispatcher.order
            arrived.sort(key=lambda held: (held.request.view.priority, order(held.request, held.prompt)))
        for held in arrived:
            if not self._holds:
                self._metrics.holds.add("closing")
            if held.answer.done():
                continue  # its client has left
            answer = self._decide(held, self._queue.promised_s)
            if isinstance(answer, Hold):
                self._hold(held, answer)
            else:
                _tell(held, answer)

    def _hold(self, held: _Held, hold: Hold) -> None:
        if self._queue.full:  # by others of the same turn
            self._metrics.holds.add("full")
            _tell(held, self._at_once(held))
            return
        held.ticket = self._queue.add(held, held.request.view, hold, held.since_s)
        held.limit = asyncio.get_running_loop().call_later(self._limit_s, self._expire, held)
        self._freed()

    def _expire(self, held: _Held) -> None:
        if held.answer.done():
            return
        held.ended = "expired"
        assert held.ticket is not None
        self._queue.remove(held.ticket)
        _tell(held, self._at_once(held))

    def _no_longer(self, held: _Held) -> None:
        assert held.ticket is not None
        assert held.limit is not None
        held.limit.cancel()
        self._queue.remove(held.ticket)
        self._metrics.holds.add(held.ended)
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
            if not held.answer.done():  # else its client has left
                held.ended = "refused" if isinstance(answer, Exception) else "placed"
                _tell(held, answer)
        ended_s = self._clock()
        self._rested_s = ended_s + REST * (ended_s - started_s)
        if len(self._queue):
            self._again(SWEEP_S)

    def _decide(self, held: _Held, promised_s: Mapping[str, float]) -> Hold | Choice | Exception:
        if held.answer.done():
            return _Left()
        if not self._holds:
            return self._at_once(held)
        held_s = self._clock() - held.since_s
        try:
            return self._dispatcher.consider(
                held.request, held.prompt, (), held.request_id, promised_s, held_s
            )
        except Exception as error:  # it is that request's alone: others are released in the same turn
            return error

    def _at_once(self, held: _Held) -> Choice | Exception:
        held_s = self._clock() - held.since_s
        try:
            return self._dispatcher.choose(held.request, held.prompt, (), held.request_id, held_s)
        except Exception as error:
            return error

    def gauges(self) -> Iterator[Metric]:
        yield gauge("kvroute_held_requests", "Requests waiting for a worker.", (), [((), len(self._queue))])


def _tell(held: _Held, answer: Choice | Exception) -> None:
    if isinstance(answer, Exception):
        held.answer.set_exception(answer)
    else:
        held.answer.set_result(answer)
