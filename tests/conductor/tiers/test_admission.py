"""What is let in, and what is kept out."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvroute.conductor.tiers.admission import Always, ExpectedBenefit, LengthThreshold, SecondAccess
from tests.conductor.tiers.blocks import block


def test_always_admits_the_first_time() -> None:
    assert Always().admit(block(1), 0.0)


def test_second_access_admits_what_was_asked_for_before() -> None:
    policy = SecondAccess(ghost_entries=2)
    verdicts = []
    for key in (1, 2, 1, 3, 1, 2):
        policy.record(block(key))
        verdicts.append(policy.admit(block(key), 0.0))
    # Two keys are remembered: when 3 came, 2 was forgotten, and not 1, which had been asked for since.
    assert verdicts == [False, False, True, False, True, False]
    assert not policy.admit(block(9), 0.0)


def test_length_is_that_of_the_prompt_not_the_depth_of_the_block() -> None:
    policy = LengthThreshold(min_blocks=4, max_blocks=10)
    admitted = [n for n in range(20) if policy.admit(block(n, depth=0, prompt_blocks=n), 0.0)]
    assert admitted == list(range(4, 11))
    assert LengthThreshold().admit(block(1, prompt_blocks=10**6), 0.0)


def test_benefit_is_reuse_times_time_saved_against_the_writing() -> None:
    policy = ExpectedBenefit(
        read_s_per_byte=0.001, write_s_per_byte=0.004, prior_reuses=0.5, half_life_s=10.0
    )
    # 0.5 x (1 - 0.1) = 0.45 s gained, 0.4 s spent.
    assert policy.admit(block(1, recompute_s=1.0), 0.0)
    assert not policy.admit(block(1, recompute_s=0.9), 0.0)
    assert policy.admit(block(1, recompute_s=0.9, reads=1), 0.0)
    # Idle for two half lives, a quarter of 1.5 reuses is left.
    assert not policy.admit(block(1, recompute_s=0.9, reads=1), 20.0)
    assert not policy.admit(block(1, recompute_s=0.05, reads=1000), 0.0), "reading is slower than computing"


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: SecondAccess(ghost_entries=0), "ghost_entries"),
        (lambda: LengthThreshold(min_blocks=-1), "min_blocks"),
        (lambda: LengthThreshold(min_blocks=5, max_blocks=4), "max_blocks must be an integer of at least 5"),
        (lambda: ExpectedBenefit(half_life_s=0), "half_life_s"),
        (lambda: ExpectedBenefit(prior_reuses=float("nan")), "prior_reuses"),
    ],
)
def test_settings_out_of_range_are_named(make: Callable[[], object], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        make()
