from __future__ import annotations

import pytest

from kvroute.policies.registry import PolicyError, make_policy
from kvroute.policies.sticky import Sticky
from kvroute.types import RequestView

from .books import Book, books, chosen
from .fleets import fleet

PROMPT = RequestView(prompt_tokens=1000)
TAU = 286_720


def _sticky(**options: float) -> Sticky:
    return Sticky(Sticky.Options(**options))  # type: ignore[arg-type]


def test_the_fewest_uncached_tokens_among_those_that_hold_enough() -> None:
    crowd = books(Book(pending=5000, cached=850), Book(pending=9000, cached=900), Book(cached=700))
    assert chosen(_sticky().decide(PROMPT, crowd)) == ("b", "sticky")


@pytest.mark.parametrize(("cached", "reason"), [(799, "miss"), (800, "sticky")])
def test_enough_is_from_the_threshold_on(cached: int, reason: str) -> None:
    crowd = books(Book(pending=10, cached=cached), Book())
    assert chosen(_sticky().decide(PROMPT, crowd)) == ("a" if reason == "sticky" else "b", reason)


def test_a_share_that_floats_do_not_hold_is_enough() -> None:
    """55 of 100 is 0.55, though 0.55 x 100 is above 55."""
    crowd = books(Book(pending=10, cached=55), Book())
    answer = _sticky(min_hit=0.55).decide(RequestView(prompt_tokens=100), crowd)
    assert chosen(answer) == ("a", "sticky")


@pytest.mark.parametrize(("least", "expected"), [(0, ("b", "saturated")), (1, ("a", "sticky"))])
def test_stickiness_ends_beyond_tau_of_the_least(least: int, expected: tuple[str, str]) -> None:
    crowd = books(Book(pending=TAU + 1, cached=900), Book(pending=least))
    assert chosen(_sticky().decide(PROMPT, crowd)) == expected


def test_a_saturated_holder_leaves_the_field_to_another() -> None:
    crowd = books(Book(pending=501, cached=1000), Book(pending=400, cached=800), Book())
    assert chosen(_sticky(tau_tokens=500).decide(PROMPT, crowd)) == ("b", "sticky")


def test_without_a_holder_the_least_pending_prefill_whatever_is_cached() -> None:
    crowd = books(Book(pending=20, cached=700), Book(pending=10), Book(pending=30))
    assert chosen(_sticky().decide(PROMPT, crowd)) == ("b", "miss")
    crowd = books(Book(pending=10), Book(pending=10, cached=700), Book(pending=30))
    assert chosen(_sticky().decide(PROMPT, crowd)) == ("b", "miss")


def test_equal_holders_go_by_pending_then_in_turn() -> None:
    crowd = books(Book(pending=20, cached=900), Book(pending=10, cached=900))
    assert chosen(_sticky().decide(PROMPT, crowd))[0] == "b"
    policy, crowd = _sticky(), books(*[Book(cached=900)] * 3)
    assert [chosen(policy.decide(PROMPT, crowd))[0] for _ in range(6)] == list("abcabc")
    assert [chosen(policy.decide(PROMPT, fleet(0, 0)))[0] for _ in range(4)] == list("abab")


def test_a_prompt_of_unknown_length_is_a_miss() -> None:
    crowd = books(Book(pending=1, cached=900), Book())
    assert chosen(_sticky().decide(RequestView(), crowd)) == ("b", "miss")


@pytest.mark.parametrize("wrong", [{"min_hit": 0}, {"min_hit": 1.1}, {"tau_tokens": -1}])
def test_wrong_options_are_named(wrong: dict[str, object]) -> None:
    with pytest.raises(PolicyError, match=f"'sticky', option '{next(iter(wrong))}'"):
        make_policy("sticky", wrong)
