"""How much to fetch ahead, and when to write down."""

from __future__ import annotations

import pytest

from kvroute.conductor.tiers.base import Fetch, Link
from kvroute.conductor.tiers.prefetch import Buffer, Deadline
from kvroute.conductor.tiers.write_back import Back, Selective, Through
from tests.conductor.tiers.blocks import block


@pytest.mark.parametrize(
    ("needed_at_s", "latency_s", "in_flight", "blocks"),
    [
        (11.0, 0.0, 0, 10),
        (10.5, 0.0, 0, 5),
        (10.3, 0.0, 0, 3),  # exactly in time is in time
        (10.5, 0.2, 0, 3),
        (10.5, 0.0, 250, 2),
        (10.5, 0.6, 0, 0),
        (9.0, 0.0, 0, 0),
    ],
)
def test_deadline_takes_what_arrives_in_time(
    needed_at_s: float, latency_s: float, in_flight: int, blocks: int
) -> None:
    link = Link(1000.0, latency_s, in_flight)
    assert Deadline().blocks(Fetch(10, 100, needed_at_s), link, 10.0) == blocks


def test_an_endless_link_brings_everything() -> None:
    assert Deadline().blocks(Fetch(10, 100, 11.0), Link(float("inf")), 10.0) == 10


@pytest.mark.parametrize(("in_flight", "blocks"), [(0, 10), (300, 7), (350, 6), (1000, 0), (5000, 0)])
def test_buffer_bounds_the_bytes_in_flight(in_flight: int, blocks: int) -> None:
    assert Buffer(1000).blocks(Fetch(20, 100, 0.0), Link(1.0, 0.0, in_flight), 99.0) == blocks


def test_buffer_asks_for_no_more_than_there_is() -> None:
    assert Buffer(1000).blocks(Fetch(3, 100, 0.0), Link(1.0), 0.0) == 3


def test_when_each_policy_writes() -> None:
    """(after being computed, after each of three reads, before eviction)"""
    moments = {
        type(policy).__name__: (
            [policy.after_access(block(1, reads=reads)) for reads in range(4)],
            policy.before_eviction(block(1, reads=9)),
        )
        for policy in (Through(), Selective(hits=2), Back())
    }
    assert moments == {
        "Through": ([True, True, True, True], False),
        "Selective": ([False, False, True, True], False),
        "Back": ([False, False, False, False], True),
    }
