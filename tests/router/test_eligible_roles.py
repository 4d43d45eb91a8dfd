"""Who may take what where prefill and decode workers are apart."""

from __future__ import annotations

from typing import cast

import pytest

from kvroute.config_groups import Breaker, Health, Limits, WorkerConfig
from kvroute.router.eligible import Eligible, Task
from kvroute.router.errors import Failure, GatewayError
from kvroute.router.pd.detecting import Transfer
from kvroute.router.pool import UpstreamPool
from kvroute.router.workers import Member, Registry, State
from kvroute.types import Role

from .registry import Pool


class Apart:
    """A registry with workers of given roles; `p1`, `b1` and `d1` are for prefill, both and decode."""

    def __init__(
        self,
        *names: str,
        splits: bool = False,
        per_worker: int = 1024,
        whole: bool = True,
        slow_start_s: float = 0,
    ) -> None:
        self.now_s = 100.0
        self.registry = Registry(
            lambda endpoint: cast(UpstreamPool, Pool(endpoint)),
            health=Health(slow_start_s=slow_start_s),
            breaker=Breaker(failures=1, open_s=5),
            limits=Limits(requests_per_worker=per_worker),
            clock=lambda: self.now_s,
            splits=splits,
        )
        self.members = {name: self.add(name, whole=whole) for name in names}

    def add(self, name: str, *, whole: bool = True) -> Member:
        role = {"p": Role.PREFILL, "b": Role.BOTH, "d": Role.DECODE}[name[0]]
        member = self.registry.add(WorkerConfig(url=f"http://{name}:80", role=role))
        if role is Role.DECODE:
            self.registry.update(member, takes_whole=whole)
        self.registry.set_state(member, State.READY)
        return member

    def eligible(self, task: Task = Task.SPLIT, tried: tuple[str, ...] = ()) -> Eligible:
        return self.registry.eligible("m", self.now_s, [self.members[name] for name in tried], task)

    def names(self, task: Task = Task.SPLIT, tried: tuple[str, ...] = ()) -> list[str]:
        return [member.endpoint.host for member in self.eligible(task, tried).members]

    def refused(self, task: Task = Task.SPLIT, tried: tuple[str, ...] = ()) -> Failure:
        with pytest.raises(GatewayError) as caught:
            self.eligible(task, tried)
        return caught.value.failure


def test_prefill_workers_come_first_and_decode_workers_last() -> None:
    fleet = Apart("d1", "b1", "p1", "d2", "p2")
    assert fleet.names() == ["p1", "p2", "b1", "d1", "d2"]
    assert fleet.eligible().can_split
    assert fleet.registry.splits


def test_where_all_do_all_nothing_is_split_unless_asked_for() -> None:
    assert not Apart("b1", "b2").eligible().can_split
    assert Apart("b1", "b2", splits=True).eligible().can_split
    assert not Apart("b1", splits=True).eligible().can_split
    assert not Apart("b1", "b2").registry.splits


def test_a_request_that_cannot_be_split_goes_to_whoever_does_all() -> None:
    assert Apart("p1", "b1", "d1").names(Task.WHOLE) == ["b1", "d1"]
    assert Apart("p1", "b1", "d1", whole=False).names(Task.WHOLE) == ["b1"]
    assert Apart("p1", "d1", whole=False).refused(Task.WHOLE) is Failure.NO_WORKER


def test_a_route_that_generates_nothing_is_left_to_those_that_decode() -> None:
    assert Apart("p1", "d1", whole=False).names(Task.ANSWER) == ["d1"]
    assert Apart("p1").names(Task.ANSWER) == ["p1"]


def test_without_prefill_workers_decode_workers_do_all_where_they_can() -> None:
    fleet = Apart("d1", "d2")
    assert fleet.names() == ["d1", "d2"]
    assert not fleet.eligible().can_split
    assert Apart("d1", whole=False).refused() is Failure.NO_WORKER
    assert Apart("p1").refused() is Failure.NO_WORKER


@pytest.mark.parametrize(("whole", "left"), [(True, ["d1"]), (False, ["p1", "d1"])])
def test_unwell_prefill_workers_are_tried_only_where_nobody_else_can(whole: bool, left: list[str]) -> None:
    fleet = Apart("p1", "d1", whole=whole)
    fleet.registry.set_state(fleet.members["p1"], State.UNHEALTHY)
    assert fleet.names() == left


def test_unwell_decode_workers_are_tried_rather_than_none() -> None:
    fleet = Apart("p1", "d1", "d2")
    fleet.registry.set_state(fleet.members["d1"], State.UNHEALTHY)
    assert fleet.names() == ["p1", "d2"]
    fleet.registry.set_state(fleet.members["d2"], State.UNHEALTHY)
    assert fleet.names() == ["p1", "d1", "d2"]


def test_after_a_failure_the_others_must_be_able_to_do_it() -> None:
    fleet = Apart("p1", "p2", "d1")
    assert fleet.names(tried=("p1",)) == ["p2", "d1"]
    assert fleet.names(tried=("p1", "p2")) == ["d1"]
    assert not fleet.eligible(tried=("p1", "p2")).can_split
    assert fleet.refused(tried=("d1",)) is Failure.NO_WORKER
    assert Apart("p1", "d1", whole=False).refused(tried=("p1",)) is Failure.NO_WORKER


def test_full_decode_workers_are_an_overload() -> None:
    fleet = Apart("p1", "d1", per_worker=1)
    fleet.registry.charge(fleet.members["d1"], 100.0)
    assert fleet.refused() is Failure.OVERLOADED


def test_a_full_prefill_worker_leaves_the_rest_to_the_decode_worker() -> None:
    fleet = Apart("p1", "d1", per_worker=1)
    fleet.registry.charge(fleet.members["p1"], 100.0)
    assert fleet.names() == ["d1"]


def test_a_worker_that_says_what_it_is_for_is_believed_unless_configured() -> None:
    fleet = Apart()
    silent = fleet.registry.add(WorkerConfig(url="http://x:80"))
    fleet.registry.set_transfer(silent, Transfer("NixlConnector", "nixl", Role.PREFILL))
    assert (silent.worker.role, silent.worker.takes_whole) == (Role.PREFILL, False)
    told = fleet.registry.add(WorkerConfig(url="http://y:80", role=Role.BOTH))
    fleet.registry.set_transfer(told, Transfer("NixlConnector", "nixl", Role.PREFILL))
    assert (told.worker.role, told.worker.takes_whole) == (Role.BOTH, True)


@pytest.mark.parametrize(
    ("names", "whole", "usable"),
    [
        (("p1",), True, False),
        (("d1",), True, True),
        (("d1",), False, False),
        (("p1", "d1"), False, True),
        (("b1",), True, True),
        ((), True, False),
    ],
)
def test_a_gateway_is_ready_with_somebody_who_decodes_and_somebody_who_prefills(
    names: tuple[str, ...], whole: bool, usable: bool
) -> None:
    assert Apart(*names, whole=whole).registry.usable is usable


def test_slow_start_does_not_leave_out_the_only_one_of_its_role() -> None:
    fleet = Apart("d1", slow_start_s=10)
    fleet.now_s += 20
    fleet.add("p1")
    assert {tuple(fleet.names()) for _ in range(200)} == {("p1", "d1")}
    fleet.add("d2")
    assert {tuple(fleet.names()) for _ in range(200)} == {("p1", "d1"), ("p1", "d1", "d2")}
