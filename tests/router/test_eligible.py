"""Who may take a request: states, models, limits, breakers, slow start."""

from __future__ import annotations

import pytest

from kvroute.router.errors import Failure
from kvroute.router.workers import State

from .registry import Fleet

READY, UNHEALTHY, DRAINING = State.READY, State.UNHEALTHY, State.DRAINING


# --- choosing --------------------------------------------------------------------------------------


def test_who_starts_or_drains_is_never_tried_even_when_nobody_else_is_there() -> None:
    fleet = Fleet()
    assert fleet.refusal().message == "no worker can take this request: no worker is registered"
    fleet.add("a", State.STARTING)
    fleet.add("b", DRAINING)
    error = fleet.refusal()
    assert (error.failure, error.status, error.retry_after_s) == (Failure.NO_WORKER, 503, 1)
    assert error.message == "no worker can take this request: http://a:80 starting, http://b:80 draining"
    assert not fleet.registry.usable


def test_the_unhealthy_are_tried_only_when_nobody_is_well() -> None:
    fleet = Fleet()
    a, b = fleet.add("a", UNHEALTHY), fleet.add("b")
    assert fleet.eligible() == ["b"]
    fleet.registry.set_state(b, UNHEALTHY)
    assert fleet.eligible() == ["a", "b"]
    assert fleet.registry.usable
    fleet.registry.set_state(a, READY)
    assert fleet.eligible() == ["a"]


def test_models_go_to_their_holders_and_an_unknown_one_lists_the_known() -> None:
    fleet = Fleet()
    a = fleet.add("a", models=("m", "lora-1"))
    fleet.add("b", models=("m",))
    assert fleet.eligible("m") == ["a", "b"]
    assert fleet.eligible("lora-1") == ["a"]
    assert fleet.eligible(None) == ["a", "b"]
    error = fleet.refusal("nope")
    assert (error.status, error.param) == (404, "model")
    assert error.message == "The model `nope` does not exist. Known models: lora-1, m"
    fleet.registry.update(a, models=("m",))
    assert fleet.refusal("lora-1").status == 404


def test_a_worker_that_lists_no_models_takes_any() -> None:
    fleet = Fleet()
    fleet.add("a", models=("m",))
    fleet.add("any", models=())
    assert fleet.eligible("m") == ["a", "any"]
    assert fleet.eligible("whatever") == ["any"]
    assert fleet.registry.models == {"m"}


def test_a_full_worker_is_passed_over_and_a_full_fleet_says_when_to_come_back() -> None:
    fleet = Fleet(per_worker=2)
    a, b = fleet.add("a"), fleet.add("b")
    leases = [fleet.charge(a), fleet.charge(a)]
    assert fleet.eligible() == ["b"]
    leases += [fleet.charge(b), fleet.charge(b)]
    error = fleet.refusal()
    assert (error.failure, error.status, error.retry_after_s) == (Failure.OVERLOADED, 429, 1)
    assert "limits.requests_per_worker" in error.message
    leases[0].release()
    assert fleet.eligible() == ["a"]


# --- breaker ---------------------------------------------------------------------------------------


def test_an_open_breaker_takes_a_worker_out_until_its_time_is_over() -> None:
    fleet = Fleet(failures=2)
    a, _ = fleet.add("a"), fleet.add("b")
    fleet.outcome(a, 500, "status_500")
    assert fleet.eligible() == ["a", "b"]
    fleet.outcome(a, None, "upstream_reset")
    assert fleet.eligible() == ["b"]
    fleet.now_s += 5
    assert fleet.eligible() == ["a", "b"]


def test_half_open_one_request_is_let_through() -> None:
    fleet = Fleet(failures=1)
    a, _ = fleet.add("a"), fleet.add("b")
    fleet.outcome(a, None, "upstream_reset")
    fleet.now_s += 5
    lease = fleet.charge(a)
    assert fleet.eligible() == ["b"]
    lease.release()
    fleet.outcome(a, 200)
    assert fleet.eligible() == ["a", "b"]


@pytest.mark.parametrize("status", [400, 404, 422, 429, None])
def test_a_4xx_or_a_client_that_left_is_neither_success_nor_failure(status: int | None) -> None:
    fleet = Fleet(failures=5)
    a, _ = fleet.add("a"), fleet.add("b")
    for _ in range(20):
        fleet.outcome(a, status)
    assert fleet.eligible() == ["a", "b"]
    for _ in range(4):
        fleet.outcome(a, 500, "status_500")
        fleet.outcome(a, status)
    assert fleet.eligible() == ["a", "b"]
    fleet.outcome(a, 500, "status_500")
    assert fleet.eligible() == ["b"]
    fleet.now_s += 5
    fleet.charge(a).release()
    fleet.outcome(a, status)
    assert a.breaker.open_until_s is not None, "a half open breaker must not close on it"
    assert fleet.eligible() == ["a", "b"], "and the next request is the trial"


def test_when_every_breaker_is_open_they_are_still_tried() -> None:
    fleet = Fleet(failures=1)
    for member in (fleet.add("a"), fleet.add("b")):
        fleet.outcome(member, None, "upstream_reset")
    assert fleet.eligible() == ["a", "b"]


def test_traffic_that_succeeds_makes_an_unhealthy_worker_ready() -> None:
    fleet = Fleet()
    member = fleet.add("a", UNHEALTHY)
    member.bad_probes = 2
    fleet.outcome(member, 400)
    assert (member.state, member.bad_probes) == (UNHEALTHY, 2)
    fleet.outcome(member, 200)
    assert (member.state, member.bad_probes) == (READY, 0)


# --- slow start ------------------------------------------------------------------------------------


def share(fleet: Fleet, host: str) -> float:
    return sum(host in fleet.eligible() for _ in range(2000)) / 2000


def test_a_worker_that_joins_is_offered_a_growing_share() -> None:
    fleet = Fleet(slow_start_s=10)
    fleet.add("a")
    fleet.now_s += 20
    fleet.add("new")
    assert share(fleet, "new") == pytest.approx(0.1, abs=0.03)
    fleet.now_s += 5
    assert share(fleet, "new") == pytest.approx(0.5, abs=0.05)
    assert share(fleet, "a") == 1
    fleet.now_s += 5
    assert share(fleet, "new") == 1


def test_slow_start_never_leaves_a_request_without_a_worker() -> None:
    fleet = Fleet(slow_start_s=10)
    fleet.add("a")
    fleet.add("b")
    assert {tuple(fleet.eligible()) for _ in range(200)} == {("a", "b")}


def test_a_worker_that_recovers_does_not_start_over() -> None:
    fleet = Fleet(slow_start_s=10)
    fleet.add("a")
    b = fleet.add("b")
    fleet.now_s += 20
    fleet.eligible()
    fleet.registry.set_state(b, UNHEALTHY)
    fleet.registry.set_state(b, READY)
    assert share(fleet, "b") == 1


def test_a_trial_that_answers_is_enough_to_take_a_worker_back() -> None:
    """The trial may be a stream of ten minutes; that its first byte came is what was to be known."""
    fleet = Fleet(failures=1)
    a, b = fleet.add("a"), fleet.add("b")
    fleet.outcome(a, None, "connect_refused")
    fleet.now_s += 6
    trial = fleet.charge(a)
    assert fleet.eligible() == ["b"]
    fleet.registry.answered(a)
    assert fleet.eligible() == ["a", "b"]
    trial.release()
    assert b.load.requests == 0


def test_a_name_of_megabytes_is_not_repeated() -> None:
    fleet = Fleet()
    fleet.add("a")
    message = fleet.refusal("x" * 5_000_000).message
    assert message == f"The model `{'x' * 100}... (5000000 characters)` does not exist. Known models: m"


def test_a_worker_that_never_starts_does_not_make_an_unknown_model_a_matter_of_time() -> None:
    fleet = Fleet()
    fleet.add("a")
    fleet.add("stuck", State.STARTING, models=())
    assert fleet.refusal("nope").status == 404
    fleet.add("loading", State.STARTING, models=("soon",))
    assert fleet.refusal("soon").status == 503


def test_only_the_trial_itself_ends_a_trial() -> None:
    fleet = Fleet(failures=1)
    a, _ = fleet.add("a"), fleet.add("b")
    fleet.outcome(a, None, "upstream_reset")
    fleet.now_s += 6
    fleet.charge(a)
    fleet.outcome(a, None, None, trial=False)  # an older client left
    assert fleet.eligible() == ["b"]
    fleet.outcome(a, None, None)
    assert fleet.eligible() == ["a", "b"]
