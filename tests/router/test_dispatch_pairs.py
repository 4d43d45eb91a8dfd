"""Choice and charge where prefill and decode workers are apart."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec.structs import replace

from kvroute.clock import monotonic
from kvroute.router.dispatch import Choice, Dispatcher, NamedPolicy
from kvroute.router.errors import Failure, GatewayError
from kvroute.router.knowledge import NO_PROMPT
from kvroute.router.parsed_request import ParsedRequest
from kvroute.router.server import GatewayServer
from kvroute.types import Candidate, Decision, Fleet, RequestView, Role
from tests.kit import Engine, gateway

PROMPT_TOKENS = 1000


class Scripted:
    """A policy that answers as it is told, and keeps what it was shown."""

    @dataclass(frozen=True)
    class Options:
        pass

    needs_prefix = False

    def __init__(self, answer: Callable[[Fleet], Any], *, chooses_pairs: bool = False) -> None:
        self.chooses_pairs = chooses_pairs
        self._answer = answer
        self.shown: list[list[str]] = []

    def decide(self, _request: RequestView, fleet: Fleet) -> Any:
        self.shown.append([worker.role.value for worker in fleet.workers])
        return self._answer(fleet)


@asynccontextmanager
async def apart(*roles: str) -> AsyncIterator[tuple[GatewayServer, list[Engine]]]:
    """A gateway before idle engines of these roles."""
    engines = [Engine() for _ in roles]
    for engine in engines:
        await engine.start()
    workers = [{"url": engine.url, "role": role} for engine, role in zip(engines, roles, strict=True)]
    try:
        async with gateway(*engines, workers=workers) as server:
            yield server, engines
    finally:
        for engine in engines:
            await engine.stop()


def dispatcher(server: GatewayServer, policy: Scripted) -> Dispatcher:
    services = server._gateway._services
    return Dispatcher(
        server.registry,
        server.knowledge,
        server.metrics,
        NamedPolicy("scripted", policy),
        budget_s=10.0,
        clock=monotonic,
        decision_log=services.decision_log,
    )


def request() -> ParsedRequest:
    return ParsedRequest(RequestView("m", prompt_tokens=PROMPT_TOKENS))


def urls(choice: Choice) -> tuple[str | None, str]:
    return (None if choice.prefill is None else choice.prefill.member.worker.url), choice.member.worker.url


def release(*choices: Choice) -> None:
    for choice in choices:
        choice.lease.release()
        if choice.prefill is not None:
            choice.prefill.lease.release()


async def test_a_policy_that_chooses_no_pairs_is_shown_who_prefills_and_is_given_a_partner() -> None:
    policy = Scripted(lambda fleet: Decision.whole(fleet.workers[0], "first"))
    async with apart("decode", "prefill", "both", "decode") as (server, (d1, p, _b, d2)):
        choices = [dispatcher(server, policy).choose(request(), NO_PROMPT) for _ in range(3)]
        assert policy.shown == [["prefill", "both"]] * 3
        assert {urls(choice)[0] for choice in choices} == {p.url}
        assert {d1.url, d2.url} <= {urls(choice)[1] for choice in choices}
        release(*choices)


async def test_a_worker_for_both_does_all_when_it_is_chosen() -> None:
    policy = Scripted(lambda fleet: Decision.whole(fleet.workers[-1], "last"))
    async with apart("prefill", "both", "decode") as (server, (_p, b, _d)):
        choice = dispatcher(server, policy).choose(request(), NO_PROMPT)
        assert urls(choice) == (None, b.url)
        release(choice)


def of_roles(prefill: Role, decode: Role) -> Callable[[Fleet], Decision]:
    def answer(fleet: Fleet) -> Decision:
        one = next(worker for worker in fleet.workers if worker.role is prefill)
        other = next(worker for worker in fleet.workers if worker.role is decode)
        return Decision(Candidate(one, other), "pair")

    return answer


async def test_both_halves_are_charged_with_the_choice_and_let_go() -> None:
    policy = Scripted(of_roles(Role.PREFILL, Role.DECODE), chooses_pairs=True)
    async with apart("prefill", "decode") as (server, (p, d)):
        choice = dispatcher(server, policy).choose(request(), NO_PROMPT)
        assert policy.shown == [["prefill", "decode"]]
        assert urls(choice) == (p.url, d.url)
        loads = {m.worker.url: m.load for m in server.registry.members.values()}
        assert (loads[p.url].prefilling, loads[p.url].pending_prefill_tokens) == (1, PROMPT_TOKENS)
        assert (loads[d.url].prefilling, loads[d.url].requests) == (0, 1)
        assert loads[d.url].kv_tokens > PROMPT_TOKENS
        release(choice)
        assert [load.requests for load in loads.values()] == [0, 0]


@pytest.mark.parametrize(
    "roles", [(Role.DECODE, Role.DECODE), (Role.DECODE, Role.PREFILL), (Role.PREFILL, Role.PREFILL)]
)
async def test_a_pair_of_the_wrong_roles_is_no_choice(roles: tuple[Role, Role]) -> None:
    def answer(fleet: Fleet) -> Decision:
        first = next(w for w in fleet.workers if w.role is roles[0])
        last = [w for w in fleet.workers if w.role is roles[1]][-1]
        return Decision(Candidate(first, last), "wrong")

    policy = Scripted(answer, chooses_pairs=True)
    async with apart("prefill", "prefill", "decode", "decode") as (server, engines):
        choice = dispatcher(server, policy).choose(request(), NO_PROMPT)
        assert server.metrics.fallbacks.values == {("scripted", "bad_choice"): 1}
        assert choice.decision.reason == "fallback"
        assert urls(choice)[0] in {engine.url for engine in engines[:2]}
        assert urls(choice)[1] in {engine.url for engine in engines[2:]}
        release(choice)


async def test_kv_that_lies_finished_goes_to_another_decode_worker() -> None:
    policy = Scripted(of_roles(Role.PREFILL, Role.DECODE), chooses_pairs=True)
    async with apart("prefill", "decode", "decode") as (server, (p, d1, d2)):
        asked = dispatcher(server, policy)
        first = asked.choose(request(), NO_PROMPT)
        assert urls(first) == (p.url, d1.url)
        second = asked.choose_decode(request(), first, [first.member])
        assert urls(second) == (p.url, d2.url)
        assert (second.decision.candidate.prefill.url, second.decision.candidate.decode.url) == urls(second)
        with pytest.raises(GatewayError) as caught:
            asked.choose_decode(request(), second, [first.member, second.member])
        assert caught.value.failure is Failure.NO_WORKER
        release(first, replace(second, prefill=None))
