from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from kvroute.policies import registry
from kvroute.policies.registry import PolicyError, make_policy, policy_names
from kvroute.types import Decision, RequestView
from tests import plugins

from .fleets import fleet

WITH_PREFIX = {"ttft", "prefix_affinity", "dynamo", "weighted", "mooncake", "preble", "lmetric", "sticky"}
BUILT_IN = {"round_robin", "random", "least_loaded", "power_of_two", "session"} | WITH_PREFIX


class Steered:
    """A third-party policy."""

    needs_prefix: ClassVar[bool] = False

    @dataclass(frozen=True)
    class Options:
        index: int

    def __init__(self, options: Options) -> None:
        self.index = options.index

    def decide(self, request: RequestView, fleet: Any) -> Decision:
        return Decision.whole(fleet.workers[self.index], "steered")


class NoDecide:
    Options = Steered.Options
    needs_prefix = False


class NoOptions:
    needs_prefix = False

    def decide(self, request: RequestView, fleet: Any) -> None: ...


class SaysNothingOfPrefixes:
    Options = Steered.Options

    def decide(self, request: RequestView, fleet: Any) -> None: ...


class FailsToStart(Steered):
    def __init__(self, options: Any) -> None:
        raise OSError("no such weights")


@pytest.fixture
def third_party(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Registers classes of this file under names."""
    return plugins.third_party(monkeypatch, registry.GROUP, globals())


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_built_in_policy_loads_by_its_entry_point_and_decides(name: str) -> None:
    policy = make_policy(name, {})
    crowd = fleet(1, 0, 2, matched=[0, 0, 0], held=[0, 0, 0])
    decision = policy.decide(RequestView(session_id="s", prompt_tokens=100), crowd)
    assert isinstance(decision, Decision)
    assert decision.candidate.prefill in crowd.workers


def test_only_prefix_affinity_asks_for_matches() -> None:
    assert {name for name in BUILT_IN if make_policy(name, {}).needs_prefix} == WITH_PREFIX


def test_names_are_those_registered() -> None:
    assert set(policy_names()) >= BUILT_IN


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(PolicyError, match=r"unknown policy 'ronud_robin'; known: .*round_robin"):
        make_policy("ronud_robin", {})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "prefix_affinity",
            {"treshold": 1},
            "'prefix_affinity' has no option 'treshold'; accepted: match_threshold",
        ),
        (
            "prefix_affinity",
            {"balance_abs": "many"},
            "'prefix_affinity', option 'balance_abs': .*integer.*'many'",
        ),
        (
            "prefix_affinity",
            {"match_threshold": 1.5},
            "'match_threshold': .*less than or equal to 1, got 1.5",
        ),
        ("prefix_affinity", {"balance_rel": float("nan")}, "'balance_rel'"),
        ("prefix_affinity", {"max_load_ratio": 0.5}, r"max_load_ratio must be 0 \(off\) or at least 1"),
        ("session", {"max_load_ratio": 0.5}, r"'session': max_load_ratio must be 0 \(off\) or at least 1"),
        ("round_robin", {"seed": 1}, "'round_robin' has no option 'seed'; it takes no options"),
        ("random", {"seed": "x"}, "'random', option 'seed'"),
    ],
)
def test_a_wrong_option_names_policy_field_fault_and_what_is_accepted(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(PolicyError, match=message):
        make_policy(name, options)


def test_a_third_party_policy_takes_the_same_path(third_party: Any) -> None:
    third_party("steered", "Steered")
    assert "steered" in policy_names()
    chosen = make_policy("steered", {"index": "1"}).decide(RequestView(), fleet(0, 0))
    assert isinstance(chosen, Decision)
    assert chosen.candidate.prefill.id == "b"
    with pytest.raises(PolicyError, match=r"'steered', option 'index': Field required; accepted: index"):
        make_policy("steered", {})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("Missing", "does not import: AttributeError"),
        ("NoDecide", "has no decide"),
        ("NoOptions", "has no Options dataclass"),
        ("SaysNothingOfPrefixes", "does not say needs_prefix"),
        ("BUILT_IN", "is not a class"),
        ("FailsToStart", "did not start: OSError: no such weights"),
    ],
)
def test_a_broken_third_party_policy_says_what_is_broken(third_party: Any, value: str, message: str) -> None:
    third_party("broken", value)
    with pytest.raises(PolicyError, match=f"policy 'broken'.*{re.escape(message)}"):
        make_policy("broken", {"index": 0})


def test_two_policies_of_one_name_are_refused_rather_than_shadowed(third_party: Any) -> None:
    third_party("round_robin", "Steered")
    with pytest.raises(PolicyError, match="registered more than once"):
        make_policy("round_robin", {})
