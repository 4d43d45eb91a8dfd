"""Who waits, who goes first, and what those behind are told."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from kvroute.policies.holding import QUANTUM_S, HoldQueue, Ticket
from kvroute.types import Hold, RequestView, Worker

A, B = Worker("a", "http://a:8000"), Worker("b", "http://b:8000")


def add(
    queue: HoldQueue[str],
    item: str,
    arrived_s: float,
    *,
    rank_s: float = 0.0,
    prefill_s: float = 1.0,
    **view: object,
) -> Ticket[str]:
    return queue.add(item, RequestView(**view), Hold(A, prefill_s, rank_s), arrived_s)  # type: ignore[arg-type]


class Door:
    """Lets so many through and notes who asked, and what had been promised then."""

    def __init__(self, room: int = 0) -> None:
        self.room = room
        self.asked: list[tuple[str, dict[str, float]]] = []

    def decide(self, item: str, promised_s: Mapping[str, float]) -> str | Hold:
        self.asked.append((item, dict(promised_s)))
        if self.room:
            self.room -= 1
            return f"{item} placed"
        return Hold(B if item.startswith("b") else A, 0.5)

    @property
    def order(self) -> list[str]:
        return [item for item, _ in self.asked]


def test_short_ones_go_first_and_age_makes_up_for_length() -> None:
    queue, door = HoldQueue[str](10), Door()
    add(queue, "long", 0.0, rank_s=9.0)
    add(queue, "short", 5.0, rank_s=1.0)
    add(queue, "late", 9.5, rank_s=1.0)
    queue.pump(door.decide)
    assert door.order == ["short", "long", "late"]


def test_priority_stands_before_everything() -> None:
    queue, door = HoldQueue[str](10), Door()
    add(queue, "first", 0.0)
    add(queue, "urgent", 5.0, rank_s=9.0, priority=-1)
    add(queue, "background", 0.0, priority=3)
    queue.pump(door.decide)
    assert door.order == ["urgent", "first", "background"]


def test_those_behind_are_told_what_is_promised_to_those_before() -> None:
    queue, door = HoldQueue[str](10), Door()
    for at, item in enumerate(["a1", "b1", "a2"]):
        add(queue, item, float(at))
    assert queue.pump(door.decide) == []
    assert door.asked == [("a1", {}), ("b1", {"a": 0.5}), ("a2", {"a": 0.5, "b": 0.5})]
    assert queue.promised_s == {"a": 1.0, "b": 0.5}


def test_who_is_placed_waits_no_more_and_promises_nothing() -> None:
    queue, door = HoldQueue[str](10), Door(room=1)
    add(queue, "one", 0.0)
    two = add(queue, "two", 1.0)
    assert queue.pump(door.decide) == [("one", "one placed")]
    assert (len(queue), queue.promised_s) == (1, {"a": 0.5})
    queue.remove(two)
    queue.remove(two)
    assert (len(queue), queue.promised_s) == (0, {})


def test_only_the_first_are_asked() -> None:
    queue, door = HoldQueue[str](100, look=3), Door()
    for at in range(10):
        add(queue, str(at), float(at))
    queue.pump(door.decide)
    assert door.order == ["0", "1", "2"]


def test_a_full_queue_takes_nobody() -> None:
    queue = HoldQueue[str](1)
    add(queue, "one", 0.0)
    assert queue.full
    with pytest.raises(ValueError, match="1 requests are held already"):
        add(queue, "two", 0.0)


def test_an_error_is_an_answer() -> None:
    queue = HoldQueue[str](10)
    add(queue, "one", 0.0)
    error = RuntimeError("nobody is there")
    assert queue.pump(lambda _item, _promised: error) == [("one", error)]
    assert len(queue) == 0


def test_a_tenant_with_many_requests_does_not_keep_another_waiting() -> None:
    """Both pay 0.6 s per request from 1 s each: after two of the first's, the other goes before it."""
    queue = HoldQueue[str](100)
    for at in range(6):
        add(queue, f"greedy {at}", float(at), prefill_s=0.6, tenant="greedy")
    add(queue, "modest 0", 10.0, prefill_s=0.6, tenant="modest")
    add(queue, "modest 1", 11.0, prefill_s=0.6, tenant="modest")
    placed: list[str] = []
    while len(queue):
        placed += [item for item, _ in queue.pump(Door(room=1).decide)]
    assert placed == [
        "greedy 0",
        "greedy 1",  # now 0.2 s overdrawn
        "modest 0",
        "modest 1",  # overdrawn too: both are granted more
        *(f"greedy {at}" for at in range(2, 6)),
    ]


def test_who_reuses_more_gets_more_requests_for_the_same_seconds() -> None:
    queue = HoldQueue[str](100)
    for at in range(20):
        add(queue, "cold", at / 10, prefill_s=1.0, tenant="cold")
        add(queue, "warm", at / 10, prefill_s=0.25, tenant="warm")
    placed = []
    for _ in range(15):
        placed += [item for item, _ in queue.pump(_paying(room=1))]
    assert (placed.count("cold"), placed.count("warm")) == (3, 12)


def test_a_tenant_that_waits_for_nothing_neither_saves_nor_owes() -> None:
    queue = HoldQueue[str](10)
    add(queue, "one", 0.0, prefill_s=50 * QUANTUM_S, tenant="debtor")
    queue.pump(Door(room=1).decide)
    add(queue, "other", 1.0, tenant="other")
    add(queue, "again", 0.5, tenant="debtor")
    door = Door()
    queue.pump(door.decide)
    assert door.order == ["again", "other"]


def _paying(room: int):  # type: ignore[no-untyped-def]  # noqa: ANN202
    left = [room]

    def decide(item: str, _promised: Mapping[str, float]) -> str | Hold:
        if left[0]:
            left[0] -= 1
            return item
        return Hold(A, 1.0 if item == "cold" else 0.25)

    return decide
