"""The simulator against queueing theory: one engine, one at a time, prompts all alike, Poisson arrivals."""

from __future__ import annotations

import random
from itertools import pairwise
from math import sqrt

import pytest

from kvroute.loadtests.plan.queue import QueuePlan, plan_queue
from kvroute.loadtests.results.little import NotClaimed, little
from kvroute.loadtests.results.measured import Measured
from kvroute.loadtests.simulator.setting import Setting
from kvroute.loadtests.simulator.simulation import Simulation
from kvroute.loadtests.traces.arrivals import arrivals
from kvroute.loadtests.traces.rows import Row, Rows, Trace
from kvroute.policies.registry import make_policy

ONE = Setting(workers=1, max_sequences=1)
TOKENS = 1024
SERVICE_S = ONE.speed.calibrated(ONE.scale, 0.0).step_s(TOKENS, TOKENS * TOKENS / 2, 0, 0.0)


def queue(rho: float, requests: int, seed: int) -> tuple[Simulation, list[Measured]]:
    """Single tokens after prompts of which none repeats another's, so that all take `SERVICE_S`."""
    source = random.Random(seed)
    rows, at_s = Rows(), 0.0
    for number in range(requests):
        at_s += source.expovariate(rho / SERVICE_S)
        rows.add(Row(at_s, TOKENS, 1, (2 * number, 2 * number + 1)))
    simulation = Simulation(ONE, make_policy("round_robin", {}))
    return simulation, simulation.measure(arrivals(Trace("poisson", 512, rows), 512))


def mean_and_deviation(rho: float, requests: int) -> tuple[float, float]:
    """Of the mean wait of so many, in service times, at M/D/1.

    Moments by Takacs: E W^k = rho/(1-rho) sum_i C(k, i) E W^(k-i) / (i + 1). The asymptotic variance of the
    mean over arrivals, from Poisson's equation of the waits: rho/(1-rho) (E W^3 - E W E W^2) +
    (1+rho)/(1-rho) Var W; for exponential service the same way gives 29 at rho 1/2, as in the books.
    """
    factor = rho / (1 - rho)
    first = factor / 2
    second = factor * (first + 1 / 3)
    third = factor * (1.5 * second + first + 1 / 4)
    variance = factor * (third - first * second) + (1 + rho) / (1 - rho) * (second - first**2)
    return first, sqrt(variance / requests)


def check(rho: float, requests: int) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    simulation, measured = queue(rho, requests, seed)
    waits_s = [one.first_s - one.arrival_s - SERVICE_S for one in measured if one.first_s is not None]
    expected_s = 0.0
    for (before, after), wait_s in zip(pairwise(measured), waits_s[1:], strict=True):
        # Lindley: who comes next waits as long as his forerunner, longer by a service, less by the gap.
        expected_s = max(expected_s + SERVICE_S - (after.arrival_s - before.arrival_s), 0.0)
        assert wait_s == pytest.approx(expected_s, abs=1e-7)
    mean, deviation = mean_and_deviation(rho, requests)
    got = sum(waits_s) / requests / SERVICE_S
    print(f"rho {rho}: mean wait {got:.4f} D for {mean:.4f} +- {deviation:.4f}")
    # 5 standard deviations: once in two million runs; and the empty start, less than one of 100 in mean.
    assert got == pytest.approx(mean, abs=5 * deviation + 0.01 * mean)
    stays_s = sum(one.e2e_s for one in measured)
    assert simulation.running_integral_s == pytest.approx(stays_s, rel=1e-9)
    law = little(measured)
    assert not isinstance(law, NotClaimed)
    assert law == pytest.approx(1.0, abs=20 / requests / (1 - rho))


@pytest.mark.parametrize("rho", [0.3, 0.6, 0.8])
def test_waits_are_those_of_an_m_d_1_queue(rho: float) -> None:
    check(rho, 2000)


@pytest.mark.soak
@pytest.mark.parametrize("rho", [0.3, 0.6, 0.8])
def test_many_waits_are_those_of_an_m_d_1_queue(rho: float) -> None:
    check(rho, 60_000)


@pytest.mark.parametrize("rho", [1.0, 1.3])
def test_no_steady_state_is_claimed_where_there_is_none(rho: float) -> None:
    report, _ = plan_queue(QueuePlan(rho / SERVICE_S, SERVICE_S, SERVICE_S))
    assert report.data["stable"] is False
    assert report.data["in_flight"] is None
    assert report.data["mg1_wait_s"] is None
    assert f"utilisation {rho:.2f} is not below 1" in report.data["verdict"]
    simulation, measured = queue(1.3, 1000, 5)
    assert simulation.running_integral_s == pytest.approx(sum(one.e2e_s for one in measured), rel=1e-9)
    law = little(measured)
    assert isinstance(law, NotClaimed)
    assert "the fleet did not keep up" in law.reason


def test_a_run_costs_the_same_for_every_request() -> None:
    """Events of the loop, which do not depend on the machine: 4 times the requests, 4 times the events."""
    source = random.Random(3)
    per_request = {}
    for requests in (150, 600):
        rows, at_s = Rows(), 0.0
        for number in range(requests):
            at_s += source.expovariate(6.0)
            blocks = (number % 17, *range(1000 + 8 * number, 1000 + 8 * number + source.randrange(1, 8)))
            rows.add(Row(at_s, 512 * len(blocks), source.randrange(5, 60), blocks))
        for name in ("round_robin", "dynamo", "ttft"):
            simulation = Simulation(Setting(workers=3), make_policy(name, {}))
            simulation.measure(arrivals(Trace("made", 512, rows), 512))
            per_request[name, requests] = simulation.events / requests
    print(per_request)
    for name in ("round_robin", "dynamo", "ttft"):
        assert per_request[name, 600] == pytest.approx(per_request[name, 150], rel=0.15)
        assert per_request[name, 600] < 20
