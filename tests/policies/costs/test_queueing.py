"""Little's law, what it refuses, and the estimate of a wait against a queue played out."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.policies.costs.queueing import Overload, in_flight, mg1_wait_s, steady_utilisation, utilisation


def test_ten_a_second_that_stay_two_seconds_are_twenty() -> None:
    assert in_flight(10, 2.0) == 20


@pytest.mark.parametrize("rate", [10.0, 12.0])
def test_a_full_server_has_no_steady_state(rate: float) -> None:
    with pytest.raises(Overload, match=r"utilisation 1\.\d0 is not below 1") as refused:
        steady_utilisation(rate, 0.4, servers=4)
    assert refused.value.utilisation == pytest.approx(rate / 10)
    with pytest.raises(Overload):
        mg1_wait_s(rate, 0.1, 0.0)
    assert steady_utilisation(9.9, 0.4, servers=4) == pytest.approx(0.99)


def test_no_servers_are_refused() -> None:
    with pytest.raises(ValueError, match="servers: 0"):
        utilisation(1, 1, servers=0)


def test_waits_of_textbook_queues() -> None:
    # Half busy, one second of service: an M/M/1 waits rho/(1-rho) s = 1 s, an M/D/1 half of that.
    assert mg1_wait_s(0.5, 1.0, service_cv2=1) == pytest.approx(1.0)
    assert mg1_wait_s(0.5, 1.0, service_cv2=0) == pytest.approx(0.5)


@given(st.floats(0.01, 0.9), st.floats(1e-3, 10), st.floats(0, 5))
def test_waiting_jobs_and_working_servers_add_up_to_the_jobs_inside(
    busy: float, service_s: float, cv2: float
) -> None:
    rate = busy / service_s
    wait_s = mg1_wait_s(rate, service_s, cv2)
    waiting, working = in_flight(rate, wait_s), in_flight(rate, service_s)
    assert working == pytest.approx(utilisation(rate, service_s))
    assert in_flight(rate, wait_s + service_s) == pytest.approx(waiting + working)


@given(st.integers(0, 2**32), st.floats(0.1, 3.0))
def test_littles_law_in_a_queue_played_out(seed: int, load: float) -> None:
    # Over the time from the first arrival until the last has left the law is exact, whatever the load.
    source = random.Random(seed)
    arrivals, leaves, now, free = [], [], 0.0, 0.0
    for _ in range(50):
        now += source.expovariate(load)
        free = max(now, free) + source.expovariate(1.0)
        arrivals.append(now)
        leaves.append(free)
    span_s = leaves[-1] - arrivals[0]
    changes = sorted([(at, 1) for at in arrivals] + [(at, -1) for at in leaves])
    inside, area, before = 0, 0.0, arrivals[0]
    for at, change in changes:
        area += inside * (at - before)
        inside, before = inside + change, at
    stay_s = sum(left - came for came, left in zip(arrivals, leaves, strict=True)) / 50
    assert in_flight(50 / span_s, stay_s) == pytest.approx(area / span_s)


def test_the_estimate_of_a_wait_against_a_queue_played_out() -> None:
    source = random.Random(7)
    now, free, waited_s, jobs = 0.0, 0.0, 0.0, 100_000
    for _ in range(jobs):
        now += source.expovariate(0.7)
        waited_s += max(0.0, free - now)
        free = max(now, free) + 1.0
    assert waited_s / jobs == pytest.approx(mg1_wait_s(0.7, 1.0, service_cv2=0), rel=0.03)
