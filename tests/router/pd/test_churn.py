"""Workers come and go while split requests run: each ends, and nothing of any is left anywhere."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter

import pytest

from kvroute.router.workers import Member, State
from kvroute.types import Role
from tests.kit import HANG_S, Client, until
from tests.router.pd.kit import COMPLETIONS, Bench, bench, body, right_text, said

CLIENTS = 12
LEASE_S = 6.0
"""Ends what nobody can know of: a prefill that was over when its engine heard that its client had left."""
SEED = int(os.environ.get("CHURN_SEED", random.SystemRandom().randrange(10**6)))


class Churn:
    """Takes workers away and brings them back, for as long as requests run; one of each role stays ready."""

    def __init__(self, one: Bench, chance: random.Random, every_s: float) -> None:
        self.one, self.chance, self.every_s = one, chance, every_s
        self.removed = 0

    async def run(self) -> None:
        registry = self.one.server.registry
        away: list[Member] = []
        while True:
            await asyncio.sleep(self.every_s)
            if away and self.chance.random() < 0.5:
                registry.add(away.pop(0).config)
            ready = [member for member in registry.members.values() if member.state is State.READY]
            self.chance.shuffle(ready)
            for member in ready:
                if self._is_spare(member, ready):
                    registry.remove(member)
                    away.append(member)
                    self.removed += 1
                    break
            else:
                if away:
                    registry.add(away.pop(0).config)

    @staticmethod
    def _is_spare(member: Member, ready: list[Member]) -> bool:
        is_prefill = member.worker.role is Role.PREFILL
        return sum((one.worker.role is Role.PREFILL) == is_prefill for one in ready) > 1


async def _ask(one: Bench, number: int, chance: random.Random) -> str:
    """One request with a prompt of its own; what became of it."""
    prompt = [number + 7, *range(200, 200 + chance.randrange(5, 80))]
    client = await Client.connect(one.server.url)
    await client.send(COMPLETIONS, body(prompt=prompt, stream=chance.random() < 0.5))
    try:
        if chance.random() < 0.1:
            await asyncio.sleep(chance.choice([0.0, 0.001, 0.005]))
            client.abort()
            return "left"
        answer = await client.receive()
        assert answer.complete
        if answer.status != 200:
            return f"status {answer.status} {answer.code}"
        return "right" if said(answer) == right_text(prompt) else "WRONG"
    finally:
        client.close()


async def _churn(connector: str, requests: int, every_s: float) -> None:
    chance = random.Random(SEED)
    print(f"CHURN_SEED={SEED}")
    numbers, ends = iter(range(requests)), Counter[str]()

    async def client(one: Bench) -> None:
        for number in numbers:
            async with asyncio.timeout(HANG_S):
                ends[await _ask(one, number, chance)] += 1

    mock = {"kv_lease_s": LEASE_S, "kv_wait_s": 600.0, "kv_blocks": 2048}
    retry = {"attempts": 5, "budget_burst": 10_000}
    async with bench(connector, 3, 3, mock=mock, retry=retry, pd={"kv_lease_s": LEASE_S}) as one:
        for engine in one.fleet.engines:
            engine.faults.set({"gap": 0.002, "handoff_delay": 0.003})
        churn = Churn(one, chance, every_s)
        churning = asyncio.create_task(churn.run())
        try:
            await asyncio.gather(*[client(one) for _ in range(CLIENTS)])
        finally:
            churning.cancel()
        print(dict(ends), f"{churn.removed} removed")
        assert sum(ends.values()) == requests
        assert set(ends) == {"right", "left"}
        assert churn.removed >= 3
        await until(lambda: not any(member.requests for member in one.server.registry.members.values()))
        await one.idle()
        assert one.released().get("expired", 0) <= ends["left"]


@pytest.mark.parametrize("connector", ["nixl", "sglang"])
async def test_every_request_ends_while_workers_come_and_go(connector: str) -> None:
    await _churn(connector, 80, every_s=0.02)


@pytest.mark.soak
@pytest.mark.parametrize("connector", ["nixl", "mooncake", "sglang", "shared-storage", "p2p-nccl"])
async def test_two_thousand_requests_while_workers_come_and_go(connector: str) -> None:
    await _churn(connector, 2000, every_s=0.1)
