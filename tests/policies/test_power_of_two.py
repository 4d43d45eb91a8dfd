from __future__ import annotations

from collections import Counter

from kvroute.policies.power_of_two import PowerOfTwo
from kvroute.types import RequestView

from .fleets import fleet


def _choices(seed: int | None, count: int, *requests: int) -> list[str]:
    policy = PowerOfTwo(PowerOfTwo.Options(seed))
    return [policy.decide(RequestView(), fleet(*requests)).candidate.prefill.id for _ in range(count)]


def test_the_most_loaded_never_wins_and_the_least_loaded_wins_its_pairs() -> None:
    counts = Counter(_choices(1, 3000, 5, 0, 3))
    assert counts["a"] == 0
    assert 1850 < counts["b"] < 2150  # in two of three pairs
    assert 850 < counts["c"] < 1150  # in the pair without b


def test_ties_go_either_way() -> None:
    counts = Counter(_choices(2, 3000, 1, 1, 1))
    assert all(900 < counts[name] < 1100 for name in "abc"), counts


def test_of_two_workers_the_less_loaded() -> None:
    assert set(_choices(3, 50, 4, 2)) == {"b"}


def test_one_worker_is_no_choice() -> None:
    assert _choices(4, 2, 9) == ["a", "a"]


def test_a_seed_makes_the_choices_reproducible() -> None:
    assert _choices(5, 50, 0, 0, 0) == _choices(5, 50, 0, 0, 0)
