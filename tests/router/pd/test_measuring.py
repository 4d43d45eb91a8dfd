"""Links as they are measured."""

from __future__ import annotations

from typing import cast

import pytest

from kvroute.policies.costs.links import Link, Nearness, PdLinks
from kvroute.router.dispatch import Dispatcher
from kvroute.router.pd.measuring import MIN_BYTES, HandoffSpeeds

PAYLOAD = 2**30


class Desk:
    """What of a dispatcher is measured for."""

    def __init__(self) -> None:
        self.pd_links = PdLinks.uniform(Link(10e9, 0.001))


def measured(payload_bytes: int, handoff_s: float, times: int = 100) -> Desk:
    desk = Desk()
    speeds = HandoffSpeeds(cast(Dispatcher, desk))
    for _ in range(times):
        speeds.observe(Nearness.RACK, payload_bytes, handoff_s)
    return desk


@pytest.mark.parametrize("bytes_per_s", [1e9, 40e9])
def test_a_link_is_replaced_by_what_handoffs_take(bytes_per_s: float) -> None:
    links = measured(PAYLOAD, 0.001 + PAYLOAD / bytes_per_s).pd_links
    assert links.rack.bytes_per_s == pytest.approx(bytes_per_s, rel=0.25)
    assert links.rack.latency_s == 0.001
    assert links.far == Link(10e9, 0.001)


def test_one_that_is_right_within_a_fifth_stays() -> None:
    assert measured(PAYLOAD, 0.001 + PAYLOAD / 11e9).pd_links.rack == Link(10e9, 0.001)


def test_small_handoffs_and_those_shorter_than_the_set_up_say_nothing() -> None:
    assert measured(MIN_BYTES - 1, 1.0).pd_links.rack == Link(10e9, 0.001)
    assert measured(PAYLOAD, 0.001).pd_links.rack == Link(10e9, 0.001)


def test_what_cannot_be_is_bounded() -> None:
    assert measured(PAYLOAD, 1e9, times=300).pd_links.rack.bytes_per_s == pytest.approx(1e6, rel=0.25)
