"""Long runs and large fleets: what is kept of requests that are over, how often others are looked at."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from msgspec.structs import replace

from kvroute.loadtests.results.measured import Measured
from kvroute.loadtests.results.packed import PackedRequests, those
from kvroute.loadtests.simulator.held import LARGE, LOOK_S
from kvroute.loadtests.simulator.setting import Setting
from kvroute.loadtests.simulator.simulation import Simulation
from kvroute.loadtests.traces.arrivals import Arrival, arrivals, arriving
from kvroute.loadtests.traces.rows import Row, Trace
from kvroute.loadtests.traces.workloads import BLOCK_TOKENS, generate
from kvroute.policies.registry import make_policy
from kvroute.router.waiting import REST
from kvroute.types import Decision, Fleet, Hold, RequestView


class CountedKeys(tuple[int, ...]):
    """Keys of a prompt that tell how many such there are."""

    alive = 0

    def __new__(cls, keys: tuple[int, ...]) -> CountedKeys:
        cls.alive += 1
        return super().__new__(cls, keys)

    def __del__(self) -> None:
        CountedKeys.alive -= 1


@pytest.mark.parametrize("policy", ["ttft", "dynamo", "round_robin"])
def test_nothing_of_a_request_stays_once_it_is_over(policy: str) -> None:
    """Whatever still knows the request would keep its keys: records, sequences, tickets, what is due."""
    CountedKeys.alive = 0
    simulation = Simulation(Setting(workers=4, block_tokens=BLOCK_TOKENS), make_policy(policy, {}))
    beyond: list[int] = []
    held = 0

    def counted() -> Iterator[Arrival]:
        nonlocal held
        for one in arriving(generate("mixed", 600, 6.0, 3), BLOCK_TOKENS):
            beyond.append(CountedKeys.alive - simulation._loop.inside)
            held += simulation.router.held
            yield replace(one, keys=replace(one.keys, keys=CountedKeys(one.keys.keys)))

    simulation.measure(counted())
    assert (held > 0) == (policy == "ttft")
    # The next arrival is not inside yet, and the index has packed the keys of the last.
    assert max(beyond) <= 2
    assert CountedKeys.alive <= 1


MADE = Measured(12.25, 9000, 250, "w17", "w3", 12.5, 12.75, 13.0, 17.5, 0.125, 8192, 512, 0, 64, 0.75, 1)
"""Every field another than it is unless given, but for failures."""


def packed(*those: Measured) -> PackedRequests:
    every = PackedRequests()
    for _ in those:
        every.expect()
    for number, one in reversed(list(enumerate(those))):
        every.put(number, one)
    return every


def test_packed_requests_are_what_was_put_in_in_order_of_arrival() -> None:
    lost = Measured(13.0, 100, 7, failure="worker_lost", retries=2)
    refused = replace(lost, failure="slo", rejected=True, predicted_ttft_s=float("inf"))
    every = packed(MADE, lost, refused)
    assert list(every) == [MADE, lost, refused] == [every[0], every[1], every[-1]]
    assert every == [MADE, lost, refused]
    assert every != [MADE, lost]
    assert every[1:] == [lost, refused]
    assert every[1:][0] == lost
    assert those(every[:2], lambda one: one.failure is None) == [MADE]
    assert those([lost, MADE], lambda one: one.failure is None) == [MADE]
    with pytest.raises(IndexError):
        every[3]


def test_packed_requests_tell_how_many_have_not_ended() -> None:
    every = packed(MADE, MADE)
    every.expect()
    assert (every.missing, len(every)) == (1, 3)
    every.put(2, MADE)
    assert every.missing == 0


def test_a_packed_request_takes_little() -> None:
    count = 5000
    tracemalloc.start()
    every = packed(*[MADE] * count)
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(every) == count
    assert taken < 200 * count


class Holding:
    """Holds every prompt of 100 tokens for as long as it may."""

    needs_prefix: ClassVar[bool] = False
    Options: Any = None

    def __init__(self) -> None:
        self.looks_s: list[float] = []

    def decide(self, request: RequestView, fleet: Fleet) -> Decision | Hold:
        worker = fleet.workers[0]
        if request.prompt_tokens != 100 or not fleet.may_hold:
            return Decision.whole(worker, "scripted")
        self.looks_s.append(fleet.now_s)
        return Hold(worker, 0.1)


@pytest.mark.parametrize("workers", [LARGE - 1, LARGE])
def test_the_gateway_of_a_large_fleet_rests_after_it_has_looked(workers: int) -> None:
    """A request is held at 1 s, and looked at once more; then others come and have their first tokens."""
    rest_s = LOOK_S * workers * (1 + REST)
    rows = [Row(1.0, 100, 1, (0,))]
    rows += [Row(1.0 + rest_s * part / 10, 200, 1, (number,)) for number, part in enumerate((1, 2, 3), 1)]
    policy = Holding()
    setting = Setting(
        workers=workers, sweep_s=None, request_overhead_s=rest_s / 100, step_times=Brief(rest_s)
    )
    Simulation(setting, policy).measure(arrivals(Trace("made", 512, rows), 512))
    heard_s = [row.arrival_s + rest_s / 100 + Brief(rest_s).step_s() for row in rows[1:]]
    if workers < LARGE:
        assert policy.looks_s == pytest.approx([1.0, 1.0, *heard_s], abs=1e-12)
    else:
        assert policy.looks_s == pytest.approx([1.0, 1.0, 1.0 + rest_s], abs=1e-12)


class Brief:
    """Steps of a twentieth of a rest."""

    def __init__(self, rest_s: float) -> None:
        self._rest_s = rest_s

    def step_s(self, *_: float) -> float:
        return self._rest_s / 20
