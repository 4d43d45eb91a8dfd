"""Where copies go."""

from __future__ import annotations

import pytest

from kvroute.conductor.tiers.base import Node
from kvroute.conductor.tiers.placement import FailureDomains, FreeRatio, HotReplication, LocalFirst
from kvroute.conductor.tiers.registry import PLACEMENTS
from tests.conductor.tiers.blocks import block

NODES = [
    Node("a", 1000, 200, "rack1", local=True),
    Node("b", 1000, 900, "rack1"),
    Node("c", 10_000, 5000, "rack2"),
    Node("d", 1000, 50, "rack3"),
]


def test_local_first_and_the_emptiest_when_it_is_full() -> None:
    assert LocalFirst().place(block(1), NODES) == ("a",)
    assert LocalFirst().place(block(1, size=300), NODES) == ("b",)


def test_free_ratio_is_a_share_not_an_amount() -> None:
    assert FreeRatio().place(block(1), NODES) == ("b",)
    assert FreeRatio().place(block(1, size=1000), NODES) == ("c",)
    twins = [Node("y", 10, 10), Node("x", 20, 20)]
    assert FreeRatio().place(block(1, size=5), twins) == ("x",), "the id breaks the tie"


def test_hot_blocks_get_copies_on_different_nodes() -> None:
    policy = HotReplication(copies=3, hot_reads=4)
    assert policy.place(block(1, reads=3), NODES) == ("a",)
    assert policy.place(block(1, reads=4), NODES) == ("a", "b", "c")
    assert policy.place(block(1, reads=4, size=500), NODES) == ("b", "c")


def test_no_two_copies_in_one_failure_domain() -> None:
    assert FailureDomains(copies=2).place(block(1), NODES) == ("b", "c")
    assert FailureDomains(copies=9).place(block(1, size=10), NODES) == ("b", "c", "d")


@pytest.mark.parametrize("name", PLACEMENTS.names)
def test_without_room_there_is_no_place(name: str) -> None:
    policy = PLACEMENTS.make(name)
    assert policy.place(block(1, size=6000, reads=100), NODES) == ()
    assert policy.place(block(1), []) == ()
    assert policy.place(block(1), [Node("full", 0, 0)]) == ()
