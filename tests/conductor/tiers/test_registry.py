"""Policies by name; an error says what is known."""

from __future__ import annotations

import pytest

from kvroute.conductor.tiers.admission import SecondAccess
from kvroute.conductor.tiers.registry import (
    ADMISSIONS,
    EVICTIONS,
    PLACEMENTS,
    PREFETCHES,
    WRITE_BACKS,
    Registry,
    TierPolicyError,
)
from tests.conductor.tiers.blocks import block


def test_all_names_make_policies_with_a_state_of_their_own() -> None:
    assert [len(registry.names) for registry in (ADMISSIONS, EVICTIONS, PLACEMENTS)] == [4, 5, 4]
    assert PREFETCHES.names == ["buffer", "deadline"]
    assert WRITE_BACKS.names == ["back", "selective", "through"]
    for registry in (ADMISSIONS, EVICTIONS, PLACEMENTS, PREFETCHES, WRITE_BACKS):
        for name in registry.names:
            assert registry.make(name) is not None
    one, two = ADMISSIONS.make("second_access"), ADMISSIONS.make("second_access")
    assert isinstance(one, SecondAccess)
    one.record(block(1))
    one.record(block(1))
    assert (one.admit(block(1), 0.0), two.admit(block(1), 0.0)) == (True, False)


def test_options_reach_the_policy() -> None:
    policy = ADMISSIONS.make("expected_benefit", {"write_s_per_byte": 1.0, "prior_reuses": 1.0})
    assert not policy.admit(block(1, recompute_s=99.0), 0.0)
    assert policy.admit(block(1, recompute_s=101.0), 0.0)


@pytest.mark.parametrize(
    ("registry", "name", "options", "message"),
    [
        (
            EVICTIONS,
            "arc",
            {},
            "unknown eviction policy 'arc'; known: hazard, lfu, lru, tiny_lfu, value_per_byte",
        ),
        (WRITE_BACKS, "Through", {}, "unknown write-back policy 'Through'; known: back, selective, through"),
        (EVICTIONS, "lru", {"size": 1}, "eviction policy 'lru' has no option 'size'; it takes no options"),
        (
            ADMISSIONS,
            "second_access",
            {"ghosts": 1},
            "has no option 'ghosts'; accepted: ghost_entries (default 65536)",
        ),
        (
            ADMISSIONS,
            "second_access",
            {"ghost_entries": "many"},
            "admission policy 'second_access': ghost_entries must be an integer of at least 1, got 'many'",
        ),
        (EVICTIONS, "value_per_byte", {"half_life": 1}, "accepted: read_s_per_byte (default 0.0)"),
        (EVICTIONS, "value_per_byte", {"half_life_s": -1}, "half_life_s must be a number of at least 0.001"),
    ],
)
def test_what_cannot_be_made_says_what_can(
    registry: Registry[object], name: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(TierPolicyError) as caught:
        registry.make(name, options)
    assert message in str(caught.value)
