from __future__ import annotations

from collections import Counter

from kvroute.policies.random_choice import RandomChoice
from kvroute.types import RequestView

from .fleets import fleet


def _choices(seed: int | None, count: int) -> list[str]:
    policy = RandomChoice(RandomChoice.Options(seed))
    return [policy.decide(RequestView(), fleet(9, 0, 0, 0)).candidate.prefill.id for _ in range(count)]


def test_a_seed_makes_the_choices_reproducible() -> None:
    assert _choices(5, 50) == _choices(5, 50)
    assert _choices(5, 50) != _choices(6, 50)


def test_every_worker_has_the_same_chance() -> None:
    counts = Counter(_choices(1, 4000))
    assert len(counts) == 4
    assert all(900 < count < 1100 for count in counts.values()), counts
