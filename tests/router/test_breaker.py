"""When a worker is left alone, and who may look whether it is back."""

from __future__ import annotations

import pytest

from kvroute.config_groups import Breaker as Options
from kvroute.router.breaker import Breaker, BreakerState

CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN


@pytest.fixture
def breaker() -> Breaker:
    return Breaker(Options(failures=3, open_s=5))


def opened(breaker: Breaker, at_s: float = 0.0) -> Breaker:
    for _ in range(3):
        breaker.failure(at_s)
    assert breaker.state(at_s) is OPEN
    return breaker


def test_opens_on_failures_in_a_row_and_not_before(breaker: Breaker) -> None:
    breaker.failure(0)
    breaker.failure(0)
    assert (breaker.state(0), breaker.allows(0)) == (CLOSED, True)
    breaker.failure(0)
    assert (breaker.state(0), breaker.allows(0)) == (OPEN, False)


def test_a_success_ends_the_streak(breaker: Breaker) -> None:
    for _ in range(10):
        breaker.failure(0)
        breaker.failure(0)
        breaker.success()
    assert breaker.state(0) is CLOSED


def test_no_verdict_neither_ends_the_streak_nor_adds_to_it(breaker: Breaker) -> None:
    for _ in range(10):
        breaker.no_verdict(True)
    assert breaker.state(0) is CLOSED
    for _ in range(3):
        breaker.failure(0)
        breaker.no_verdict(True)
    assert breaker.state(0) is OPEN


def test_half_open_lets_exactly_one_through(breaker: Breaker) -> None:
    opened(breaker)
    assert breaker.state(4.9) is OPEN
    assert not breaker.sent(4.9)
    assert (breaker.state(5.0), breaker.allows(5.0)) == (HALF_OPEN, True)
    assert breaker.sent(5.0)
    assert not breaker.allows(5.0)
    assert not breaker.sent(5.0)


def test_a_trial_that_succeeds_closes(breaker: Breaker) -> None:
    opened(breaker).sent(5.0)
    breaker.success()
    assert (breaker.state(5.0), breaker.allows(5.0)) == (CLOSED, True)
    breaker.failure(6.0)
    assert breaker.state(6.0) is CLOSED


def test_a_trial_that_fails_opens_for_the_whole_time_again(breaker: Breaker) -> None:
    opened(breaker).sent(5.0)
    breaker.failure(7.0)
    assert breaker.state(11.9) is OPEN
    assert breaker.state(12.0) is HALF_OPEN
    assert breaker.allows(12.0)


def test_a_trial_that_tells_nothing_gives_its_place_to_the_next(breaker: Breaker) -> None:
    opened(breaker).sent(5.0)
    breaker.no_verdict(True)
    assert breaker.state(5.0) is HALF_OPEN
    assert breaker.allows(5.0)
    assert breaker.sent(5.0)


def test_its_repr_shows_what_it_decides_on(breaker: Breaker) -> None:
    opened(breaker, at_s=1.0)
    assert repr(breaker) == "<Breaker streak=3 open_until=6.0 trial=False>"
