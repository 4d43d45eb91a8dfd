"""Membership, states and load of the registry."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvroute.config_groups import WorkerConfig
from kvroute.router.errors import GatewayError
from kvroute.router.workers import DuplicateWorker, Lease, State

from .registry import Fleet

READY, UNHEALTHY, DRAINING, GONE = State.READY, State.UNHEALTHY, State.DRAINING, State.GONE


# --- membership ------------------------------------------------------------------------------------


def test_an_incarnation_id_is_never_used_twice() -> None:
    fleet = Fleet()
    ids = set()
    for _ in range(100):
        member = fleet.add("a")
        ids.add(member.worker.id)
        fleet.registry.remove(member)
    assert len(ids) == 100
    assert all(worker_id.startswith("a:80") for worker_id in ids)


def test_the_same_url_twice_is_refused_naming_the_one_that_has_it() -> None:
    fleet = Fleet()
    member = fleet.add("a")
    for url in ("http://a:80", "http://A/", "http://a"):
        with pytest.raises(DuplicateWorker, match=f"http://a:80 is already registered as {member.worker.id}"):
            fleet.registry.add(WorkerConfig(url=url))
    assert list(fleet.registry.members) == [member.worker.id]


def test_a_url_is_free_again_once_its_worker_drains() -> None:
    fleet = Fleet()
    old = fleet.add("a")
    fleet.registry.drain(old)
    new = fleet.add("a")
    assert new.worker.id != old.worker.id
    assert fleet.registry.eligible("m", 0).members == (new,)


def test_an_idle_worker_is_forgotten_at_once_and_its_pool_closed() -> None:
    fleet = Fleet()
    member = fleet.add("a")
    fleet.registry.remove(member)
    assert (member.state, member.pool.closed, fleet.registry.members) == (GONE, True, {})  # type: ignore[attr-defined]


def test_a_busy_worker_is_hidden_at_once_and_forgotten_after_its_last_request() -> None:
    fleet = Fleet()
    member, other = fleet.add("a"), fleet.add("b")
    first, second = fleet.charge(member), fleet.charge(member)
    fleet.registry.remove(member)
    assert fleet.eligible() == ["b"]
    first.release()
    assert member.state is DRAINING
    second.release()
    assert member.state is GONE
    assert list(fleet.registry.members.values()) == [other]


def test_a_late_release_of_an_old_incarnation_does_not_touch_the_new_one() -> None:
    fleet = Fleet()
    old = fleet.add("a")
    old_lease = fleet.charge(old)
    fleet.registry.remove(old)
    new = fleet.add("a")
    new_lease = fleet.charge(new)
    old_lease.release()
    old_lease.release()
    assert (old.load.requests, new.load.requests) == (0, 1)
    new_lease.release()
    assert new.load.requests == 0
    assert list(fleet.registry.members.values()) == [new]
    fleet.registry.check_integrity()


def test_listeners_hear_of_every_step() -> None:
    fleet = Fleet()
    heard: list[str] = []
    fleet.registry.on_change(lambda member: heard.append(member.state.value))
    member = fleet.registry.add(WorkerConfig(url="http://a:80"))
    fleet.registry.set_state(member, READY)
    fleet.registry.set_state(member, READY)
    fleet.registry.set_state(member, UNHEALTHY)
    fleet.registry.remove(member)
    assert heard == ["starting", "ready", "unhealthy", "draining", "gone"]


@pytest.mark.parametrize("later", [State.STARTING, READY, UNHEALTHY])
def test_there_is_no_way_back_from_draining_or_gone(later: State) -> None:
    fleet = Fleet()
    member = fleet.add("a")
    lease = fleet.charge(member)
    fleet.registry.remove(member)
    fleet.registry.set_state(member, later)
    assert member.state is DRAINING
    lease.release()
    fleet.registry.set_state(member, later)
    assert member.state is GONE


# --- load ------------------------------------------------------------------------------------------


def test_a_lease_is_released_once_and_its_prefill_once() -> None:
    fleet = Fleet()
    member = fleet.add("a")
    lease = fleet.charge(member, 70)
    other = fleet.charge(member, 30)
    assert (member.load.requests, member.load.pending_prefill_tokens) == (2, 100)
    lease.first_byte()
    lease.first_byte()
    assert member.load.pending_prefill_tokens == 30
    lease.release()
    lease.release()
    assert (member.load.requests, member.load.pending_prefill_tokens) == (1, 30)
    other.release()
    assert (member.load.requests, member.load.pending_prefill_tokens) == (0, 0)


def test_books_balance_whatever_the_order_of_events() -> None:
    fleet, chance = Fleet(per_worker=8, failures=3), random.Random(1)
    leases: list[Lease] = []
    refusals: set[int] = set()
    for _ in range(5000):
        action = chance.random()
        members = list(fleet.registry.members.values())
        if action < 0.05 or not members:
            name = chance.choice("abcd")
            if not any(m.endpoint.host == name and m.state is not DRAINING for m in members):
                fleet.add(name, chance.choice([READY, UNHEALTHY, State.STARTING]))
        elif action < 0.1:
            fleet.registry.remove(chance.choice(members))
        elif action < 0.6:
            try:
                leases.append(fleet.charge(chance.choice(fleet.registry.eligible("m", fleet.now_s).members)))
            except GatewayError as error:
                refusals.add(error.status)
        elif leases:
            lease = leases.pop(chance.randrange(len(leases)))
            if chance.random() < 0.5:
                lease.first_byte()
            lease.release()
            result: Any = chance.choice([(200, None), (400, None), (None, None), (500, "status_500")])
            fleet.outcome(lease.member, *result)
        fleet.now_s += 0.01
        fleet.registry.check_integrity()
    for lease in leases:
        lease.release()
    assert refusals == {429, 503}
    assert all(m.load.requests == 0 and m.state is not DRAINING for m in fleet.registry.members.values())
    fleet.registry.check_integrity()


def test_books_that_do_not_balance_are_noticed() -> None:
    fleet = Fleet()
    member = fleet.add("a")
    member.load.requests = -1
    with pytest.raises(AssertionError):
        fleet.registry.check_integrity()


def test_what_other_replicas_sent_counts_in_choices_and_in_no_lease() -> None:
    fleet = Fleet(per_worker=2)
    member = fleet.add("a")
    lease = fleet.charge(member, tokens=10)
    fleet.registry.set_others(member, 5, 700)
    assert (member.load.requests, member.load.pending_prefill_tokens, member.requests) == (6, 710, 1)
    assert member.load.others_prefill_s == member.pace.speed.marginal_prefill_s(700) > 0
    assert fleet.eligible() == ["a"]  # the limit is on this gateway's own connections
    fleet.registry.set_others(member, 2, 100)
    assert (member.load.requests, member.load.pending_prefill_tokens) == (3, 110)
    lease.release()
    fleet.registry.check_integrity()
    fleet.registry.set_others(member, 0, 0)
    assert (member.load.requests, member.load.pending_prefill_tokens) == (0, 0)


def test_a_worker_that_leaves_waits_for_no_other_replica() -> None:
    fleet = Fleet()
    member = fleet.add("a")
    lease = fleet.charge(member)
    fleet.registry.set_others(member, 5, 700)
    fleet.registry.remove(member)
    assert member.state is State.DRAINING
    lease.release()
    assert member.state is State.GONE
