"""Requests that the router holds: when they are asked about again, and for how long they may be held."""

from __future__ import annotations

from collections.abc import Callable

from kvroute.loadtests.simulator.loop import EventLoop
from kvroute.loadtests.simulator.placing import Answer, Ask
from kvroute.loadtests.simulator.requests import Record
from kvroute.loadtests.simulator.router import Router
from kvroute.loadtests.simulator.setting import Setting
from kvroute.policies.holding import Ticket
from kvroute.router.waiting import REST

LARGE = 100
"""Workers from which on the gateway's rests are simulated; in smaller fleets they are shorter than a step."""
LOOK_S = 0.5e-6
"""Seconds that a look at one held request takes the gateway, for each worker (`kvroute bench decide`)."""


class HeldRequests:
    """Asked about again when something is heard from a worker, and every `Setting.sweep_s`.

    As the gateway does, that of a large fleet rests `REST` times as long as it has looked, so that what was
    heard meanwhile is one reason to look and not hundreds. `answered` hears who waits no more.
    """

    def __init__(
        self,
        setting: Setting,
        router: Router[Record],
        loop: EventLoop,
        answered: Callable[[Ask[Record], Answer], None],
    ) -> None:
        self._setting, self._router, self._loop, self._answered = setting, router, loop, answered
        self._tickets: dict[int, Ticket[Ask[Record]]] = {}
        """By number of the request."""
        self._pumps = 0
        self._look_s = setting.workers * LOOK_S * (1 + REST) if setting.workers >= LARGE else 0.0
        """One look, and the rest after it."""
        self._rested_s = 0.0
        self._is_resting = False

    def add(self, ticket: Ticket[Ask[Record]]) -> None:
        """It was held just now."""
        number = ticket.item.item.number
        self._tickets[number] = ticket
        # By number: what is due so late must not keep requests that have long been over.
        self._loop.after(self._setting.hold_limit_s, self._expire, number)
        self.freed()

    def freed(self) -> None:
        """Something was heard: they are asked about again, at once or after the rest."""
        if self._loop.now_s < self._rested_s:
            if not self._is_resting:
                self._is_resting = True
                self._loop.at(self._rested_s, self._rested)
            return
        self._rested_s = self._loop.now_s + self._router.looks * self._look_s
        for ask, answer in self._router.pump():
            del self._tickets[ask.item.number]
            self._answered(ask, answer)
        if self._setting.sweep_s is not None and self._router.held:
            self._pumps += 1
            self._loop.after(self._setting.sweep_s, self._sweep, self._pumps)

    def _rested(self) -> None:
        self._is_resting = False
        self.freed()

    def _sweep(self, pumps: int) -> None:
        if pumps == self._pumps:
            self.freed()

    def _expire(self, number: int) -> None:
        ticket = self._tickets.pop(number, None)
        if ticket is not None:
            self._answered(ticket.item, self._router.expire(ticket))
