"""Transfers that have yet to begin: what the next waits for, and what it makes others wait."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from kvroute.policies.costs.link_book import MAX_SHARE, MOST, SHARE_TAU_S, LinkBook
from kvroute.policies.costs.links import Link, LinkQueue
from kvroute.policies.costs.queueing import mg1_wait_s

NAMES = ["a", "b", "c"]


def waits(book: LinkBook, ready_s: float, names: list[str] = NAMES) -> list[list[float]]:
    made = book.wait_s(names, names, np.full((len(names), len(names)), ready_s))
    assert made is not None
    return [[round(float(one), 9) for one in row] for row in made]


def test_a_transfer_waits_for_the_link_out_and_the_link_in() -> None:
    """From a to b, ready at 2 s, for 3 s: whoever leaves a or comes to b from then on waits until 5 s."""
    book = LinkBook()
    assert book.wait_s(NAMES, NAMES, np.zeros((3, 3))) is None
    book.add("a", "b", 2.0, 3.0, now_s=0.0)
    assert waits(book, 1.9) == [[0, 0, 0], [0, 0, 0], [0, 0, 0]], "it would be over, or is let go first"
    assert waits(book, 2.5) == [[2.5, 2.5, 2.5], [0, 2.5, 0], [0, 2.5, 0]]
    assert waits(book, 5.0) == [[0, 0, 0], [0, 0, 0], [0, 0, 0]]


def test_waits_are_those_of_links_used_in_order_of_readiness() -> None:
    seed = Random().randrange(2**32)
    print(f"seed {seed}")
    source = Random(seed)
    for _ in range(50):
        book, booked = LinkBook(), []
        for _ in range(source.randrange(1, MOST + 1)):
            booked.append((source.uniform(0, 5), source.uniform(0.01, 2)))
            book.add("a", "b", *booked[-1], now_s=0.0)
        ready_s = source.uniform(0, 8)
        link = LinkQueue(Link(1.0))
        for begins_s, wire_s in sorted(booked):
            if begins_s <= ready_s:
                link.send(wire_s, begins_s)
        made = book.wait_s(["a"], ["b"], np.array([[ready_s]]))
        assert made is not None
        assert made[0, 0] == pytest.approx(link.wait_s(ready_s)), (booked, ready_s)


def test_of_more_than_are_kept_the_work_still_stands_in_the_way() -> None:
    book = LinkBook()
    for at in range(3 * MOST):
        book.add("a", "b", 0.0, 1.0, now_s=0.0)
        assert waits(book, 0.5, ["a"]) == [[at + 0.5]]


def test_what_is_over_is_forgotten() -> None:
    book = LinkBook()
    for at in range(200):
        book.add(f"a{at}", f"b{at}", at * 10.0, 1.0, now_s=at * 10.0)
    assert len(book._out) == len(book._in) < 30, "as long as its share of time is worth knowing"
    assert waits(book, 5000.0, ["a0", "a199"]) == [[0, 0], [0, 0]]


def test_what_a_transfer_costs_others_is_the_slope_of_their_waits() -> None:
    """Transfers of 0.6 s in the link into b, one in two seconds, for longer than it remembers: the sum of all
    waits grows with one more by what the formula of Pollaczek and Khinchine says.
    """
    book = LinkBook()
    for at in range(200):
        book.add("a", "b", at * 2.0, 0.6, now_s=at * 2.0)
    now_s = 200 * 2.0
    made = book.delays(["a", "c"], ["b", "c"], now_s)
    assert made is not None
    assert made[1, 1] == 0
    step = 1e-6
    rate = 0.5
    slope_s = rate * (mg1_wait_s(rate + step, 0.6, 0.0) - mg1_wait_s(rate, 0.6, 0.0)) / step
    assert made[0, 0] * 0.6 == pytest.approx(slope_s, rel=0.1)
    assert made[1, 0] == made[0, 0] == made[0, 1], "the busier of the two links"


def test_a_link_that_is_too_busy_is_dear_but_not_shut() -> None:
    book = LinkBook()
    book.add("a", "b", 0.0, 100 * SHARE_TAU_S, now_s=0.0)
    made = book.delays(["a"], ["b"], 0.0)
    assert made is not None
    assert made[0, 0] == pytest.approx(MAX_SHARE / (2 * (1 - MAX_SHARE) ** 2))
