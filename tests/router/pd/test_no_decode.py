"""Workers that decode leave, one way or the other: each request ends in an answer or in a clean 503."""

from __future__ import annotations

import pytest

from kvroute.router.workers import Member, State
from kvroute.types import Role
from tests.kit import ask, until
from tests.router.pd.kit import COMPLETIONS, NEVER_MARKED, Bench, bench, body, right

POLICIES = ["round_robin", "prefix_affinity", "ttft"]


def members(one: Bench, role: Role) -> list[Member]:
    return [each for each in one.server.registry.members.values() if each.worker.role is role]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("connector", ["nixl", "sglang"])
async def test_what_generates_nothing_is_answered_by_prefill_workers_alone(
    policy: str, connector: str
) -> None:
    async with bench(connector, 2, 1, policy=policy) as one:
        for member in members(one, Role.DECODE):
            one.server.registry.drain(member)
        for path in ("/tokenize", "/detokenize"):
            answer = await ask(one.server.url, path, {"model": "mock", "prompt": "x", "tokens": [1]})
            assert answer.status == 200, answer.body
        answer = await ask(one.server.url, "/unknown", method="GET")
        assert (answer.status, answer.json()) == (404, {"detail": "Not Found"})
        for path in (COMPLETIONS, "/v1/embeddings", "/generate", "/unknown"):
            answer = await ask(one.server.url, path, body())
            assert (answer.status, answer.code) == (503, "no_worker")
        assert one.server.metrics.fallbacks.total() == 0


@pytest.mark.parametrize(
    ("connector", "policy"), [("nixl", "round_robin"), ("p2p-nccl", "prefix_affinity"), ("p2p-nccl", "ttft")]
)
async def test_the_last_one_leaves_between_choice_and_decode(connector: str, policy: str) -> None:
    async with bench(connector, 1, 1, policy=policy, health=NEVER_MARKED) as one:
        one.prefill[0].faults.set({"ttft": 0.1})
        client = await one.begin()
        await until(lambda: bool(one.prefill[0].live))
        (decode,) = members(one, Role.DECODE)
        one.server.registry.remove(decode)
        assert right(await client.receive())  # it had the request, and finishes it
        client.close()
        await until(lambda: decode.state is State.GONE)
        answer = await one.ask()
        assert (answer.status, answer.code) == (503, "no_worker")


@pytest.mark.parametrize(
    ("connector", "policy"), [("nixl", "round_robin"), ("p2p-nccl", "prefix_affinity"), ("p2p-nccl", "ttft")]
)
async def test_the_last_one_fails_after_it_was_drained(connector: str, policy: str) -> None:
    """There is nobody for another attempt, with the same KV or without."""
    async with bench(connector, 2, 1, policy=policy, health=NEVER_MARKED, clean=False) as one:
        for engine in one.prefill:
            engine.faults.set({"ttft": 0.1})
        client = await one.begin()
        await until(lambda: any(engine.live for engine in one.prefill))
        (decode,) = members(one, Role.DECODE)
        one.server.registry.drain(decode)
        await one.decode[0].stop()
        answer = await client.receive()
        client.close()
        assert (answer.status, answer.code) == (502, "connect_refused")
        await one.decode[0].start()


@pytest.mark.parametrize("policy", POLICIES)
async def test_all_prefill_workers_leave_where_decode_workers_take_nothing_whole(policy: str) -> None:
    async with bench("p2p-nccl", 1, 1, policy=policy, health=NEVER_MARKED) as one:
        for member in members(one, Role.PREFILL):
            one.server.registry.drain(member)
        for path in (COMPLETIONS, "/generate", "/invocations", "/v1/%63ompletions", "/v1/completions#x"):
            answer = await ask(one.server.url, path, body())
            assert (answer.status, answer.code) == (503, "no_worker")
        answer = await ask(one.server.url, "/tokenize", {"model": "mock", "prompt": "x"})
        assert answer.status == 200
