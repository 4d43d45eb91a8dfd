"""A registry with workers in given states, on a clock that the test moves."""

from __future__ import annotations

from typing import cast

import pytest

from kvroute.config_groups import Breaker, Health, Limits, WorkerConfig
from kvroute.endpoint import Endpoint
from kvroute.router.errors import GatewayError
from kvroute.router.pool import UpstreamPool
from kvroute.router.workers import Lease, Member, Registry, State
from kvroute.types import Outcome


class Pool:
    """Stands where connections would be; the registry only ever closes it."""

    def __init__(self, _endpoint: Endpoint) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


class Fleet:
    """A registry with its clock."""

    def __init__(self, *, slow_start_s: float = 0, per_worker: int = 1024, failures: int = 5) -> None:
        self.now_s = 100.0
        self.registry = Registry(
            lambda endpoint: cast(UpstreamPool, Pool(endpoint)),
            health=Health(slow_start_s=slow_start_s),
            breaker=Breaker(failures=failures, open_s=5),
            limits=Limits(requests_per_worker=per_worker),
            clock=lambda: self.now_s,
        )

    def add(self, name: str, state: State = State.READY, models: tuple[str, ...] = ("m",)) -> Member:
        member = self.registry.add(WorkerConfig(url=f"http://{name}:80"))
        self.registry.update(member, models=models)
        self.registry.set_state(member, state)
        return member

    def eligible(self, model: str | None = "m") -> list[str]:
        return [m.endpoint.host for m in self.registry.eligible(model, self.now_s).members]

    def refusal(self, model: str | None = "m") -> GatewayError:
        with pytest.raises(GatewayError) as caught:
            self.registry.eligible(model, self.now_s)
        return caught.value

    def charge(self, member: Member, tokens: int = 10) -> Lease:
        return self.registry.charge(member, self.now_s, uncached_tokens=tokens)

    def outcome(
        self, member: Member, status: int | None = 200, failure: str | None = None, *, trial: bool = True
    ) -> None:
        self.registry.observe(member, Outcome(member.worker, status, failure), is_trial=trial)
