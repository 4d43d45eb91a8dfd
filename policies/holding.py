"""Requests that wait in the gateway for a worker to free: bounded, short first, aged, fair among tenants."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvroute.types import Hold, RequestView

T = TypeVar("T")
A = TypeVar("A")
QUANTUM_S = 1.0
"""Prefill seconds that each waiting tenant is granted, when all of them have used up what they had."""


@dataclass(slots=True, eq=False)
class Ticket(Generic[T]):
    """One held request. Lower goes first: its priority, then arrival plus rank."""

    item: T
    tenant: str
    order: tuple[int, float, int]
    prefill_s: float

    def __lt__(self, other: Ticket[T]) -> bool:
        return self.order < other.order


@dataclass(slots=True)
class HoldQueue(Generic[T]):
    """Pure: whoever drives it calls `pump` when something may have freed.

    Tenants share by deficit (as in Locality-aware Fair Scheduling, DLPM): each has prefill seconds to spend,
    and goes behind all others while it has overdrawn them. As only uncached prefill is paid for, reuse is
    free. With one tenant waiting none of this matters.
    """

    limit: int
    look: int = 24
    """Tickets looked at per `pump`: the price of one is a decision."""
    promised_s: dict[str, float] = field(default_factory=dict)
    """By worker id: prefill seconds that the requests looked at last would bring it."""
    _tickets: list[Ticket[T]] = field(default_factory=list)
    _credits_s: dict[str, float] = field(default_factory=dict)
    _count: int = 0

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def full(self) -> bool:
        """Nobody more can wait."""
        return len(self._tickets) >= self.limit

    def add(self, item: T, request: RequestView, hold: Hold, arrived_s: float) -> Ticket[T]:
        """Let a request wait; ValueError when `full`."""
        if self.full:
            raise ValueError(f"{self.limit} requests are held already")
        self._count += 1
        order = (request.priority, arrived_s + hold.rank_s, self._count)
        ticket = Ticket(item, request.tenant, order, hold.prefill_s)
        insort(self._tickets, ticket)
        self._credits_s.setdefault(ticket.tenant, QUANTUM_S)
        return ticket

    def remove(self, ticket: Ticket[T]) -> None:
        """It waits no more, whatever the reason; idempotent."""
        if ticket in self._tickets:
            self._tickets.remove(ticket)
            self._forget_idle_tenants()
            if not self._tickets:
                self.promised_s = {}

    def pump(self, decide: Callable[[T, Mapping[str, float]], A | Hold]) -> list[tuple[T, A]]:
        """Ask again about the first tickets, in order; who waits no more, and with what answer.

        `decide` is told what is promised to those that go before; it must charge a decision at once. A ticket
        that must still wait adds to what is promised. An exception as the answer is not charged to a tenant.
        """
        promised_s: dict[str, float] = {}
        self.promised_s = promised_s
        released: list[tuple[T, A]] = []
        for ticket in self._in_turn():
            answer = decide(ticket.item, promised_s)
            if isinstance(answer, Hold):
                ticket.prefill_s = answer.prefill_s
                worker = answer.worker.id
                promised_s[worker] = promised_s.get(worker, 0.0) + answer.prefill_s
                continue
            released.append((ticket.item, answer))
            self._tickets.remove(ticket)
            if not isinstance(answer, Exception):
                self._credits_s[ticket.tenant] -= ticket.prefill_s
        if released:
            self._forget_idle_tenants()
        return released

    def _in_turn(self) -> list[Ticket[T]]:
        if len(self._credits_s) < 2:
            return self._tickets[: self.look]
        if all(credit <= 0 for credit in self._credits_s.values()):
            short_s = QUANTUM_S - max(self._credits_s.values())
            for tenant in self._credits_s:
                self._credits_s[tenant] = min(self._credits_s[tenant] + short_s, QUANTUM_S)
        credits_s = self._credits_s
        ordered = sorted(self._tickets, key=lambda t: (t.order[0], credits_s[t.tenant] <= 0, t.order[1:]))
        return ordered[: self.look]

    def _forget_idle_tenants(self) -> None:
        """A tenant that waits for nothing neither saves up nor is held to what it overdrew."""
        waiting = {ticket.tenant for ticket in self._tickets}
        for tenant in self._credits_s.keys() - waiting:
            del self._credits_s[tenant]
