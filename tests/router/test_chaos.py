"""Random clients, engines and accidents: a response is exact, or it can be seen that it is not."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest
import uvloop

from kvroute.router.server import GatewayServer
from tests.kit import CHAT, HANG_S, Client, Engine, Received, Wire, until
from tests.router.edge import edge, send_reset

LoopFactory = Callable[[], asyncio.AbstractEventLoop]
REQUESTS = 240
CLIENTS = 12
SEED = int(os.environ.get("CHAOS_SEED", random.SystemRandom().randrange(10**6)))


class Accidents:
    """An engine that answers what its request asks for, in random pieces, and breaks off now and then."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    async def __call__(self, request: Received, wire: Wire) -> None:
        chance = self.random
        plan = request.json()
        body = _body(plan)
        fate = chance.random()
        if fate < 0.08:
            await wire.answer(chance.choice([429, 500, 503]), b"engine says no")
            return
        if fate < 0.14:
            wire.close()
            return
        pieces = _cut(body, chance)
        dies_at = chance.randrange(len(pieces) + 1) if fate < 0.28 else None
        if plan["stream"]:
            await wire.start_stream()
        else:
            await wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body))
        for number, piece in enumerate(pieces):
            if number == dies_at:
                send_reset(wire) if chance.random() < 0.5 else wire.close()
                return
            await (wire.chunk(piece) if plan["stream"] else wire.send(piece))
            await asyncio.sleep(chance.choice([0, 0, 0, 0.001]))
        if plan["stream"]:
            await wire.chunk(b"")
        if chance.random() < 0.1:
            wire.close()


def _body(plan: dict[str, int]) -> bytes:
    """The response a request asks for: random bytes, or events."""
    chance = random.Random(plan["seed"])
    if not plan["stream"]:
        return chance.randbytes(chance.choice([1, 100, 70_000, 400_000]))
    events = [json.dumps({"text": "é🏔"[: chance.randrange(3)] * chance.randrange(300)}) for _ in range(20)]
    return b"".join(b"data: " + event.encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"


def _cut(body: bytes, chance: random.Random) -> list[bytes]:
    borders = sorted({0, len(body), *(chance.randrange(len(body)) for _ in range(chance.choice([0, 3, 30])))})
    return [body[start:end] for start, end in pairwise(borders)]


def _judge(status: int, body: bytes, complete: bool, expected: bytes, streamed: bool) -> str:
    """What a client can tell of a response; anything else than these is a lie."""
    if status != 200:
        assert complete
        assert status in (429, 500, 502, 503), status
        assert body == b"engine says no" or json.loads(body)["error"]["code"]
        return "refused"
    if complete and body == expected:
        return "exact"
    if not complete:
        assert expected.startswith(body)
        return "broken"
    assert streamed
    sent, _, last = body.rpartition(b"data: ")
    assert json.loads(last)["error"]["code"] == "upstream_died"
    assert expected.startswith(sent)
    assert sent.endswith(b"\n\n")
    return "error event"


async def _client(server: GatewayServer, chance: random.Random, work: list[int], seen: Counter[str]) -> None:
    client = await Client.connect(server.url)
    while work:
        work.pop()
        plan = {"model": "m", "stream": chance.random() < 0.5, "seed": chance.randrange(10**9)}
        await client.send(CHAT, {**plan, "pad": "x" * chance.choice([0, 0, 0, 300_000])})
        if chance.random() < 0.15:
            await asyncio.sleep(chance.choice([0, 0.001, 0.005]))
            client.abort()
            seen["left"] += 1
            client = await Client.connect(server.url)
            continue
        answer = await client.receive()
        seen[_judge(answer.status, answer.body, answer.complete, _body(plan), bool(plan["stream"]))] += 1
        if not answer.complete:
            client.close()
            client = await Client.connect(server.url)
    client.close()


@pytest.mark.parametrize(
    ("loop_factory", "policy"),
    [(asyncio.new_event_loop, "least_loaded"), (uvloop.new_event_loop, "prefix_affinity")],
)
def test_no_response_lies_and_the_books_balance(loop_factory: LoopFactory, policy: str) -> None:
    print(f"CHAOS_SEED={SEED}")
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(_run(policy))


async def _run(policy: str) -> None:
    chance = random.Random(SEED)
    engines = [Engine(Accidents(SEED + number)) for number in range(3)]
    options = {"policy": policy, "retry": {"budget_burst": 1000}, "breaker": {"failures": 10, "open_s": 0.1}}
    async with engines[0], engines[1], engines[2], edge(*engines, **options) as server:
        work = list(range(REQUESTS))
        seen: Counter[str] = Counter()
        async with asyncio.timeout(2 * HANG_S):
            clients = [random.Random(chance.random()) for _ in range(CLIENTS)]
            await asyncio.gather(*(_client(server, each, work, seen) for each in clients))
        assert seen.total() == REQUESTS
        assert seen["exact"] > REQUESTS / 2, seen
        assert seen["left"], seen
        await until(lambda: not server.state.connections)
        metrics = server.metrics
        counted = Counter({labels[2]: int(count) for labels, count in metrics.requests.values.items()})
        assert counted.total() <= REQUESTS
        assert all(member.load.requests == 0 for member in server.registry.members.values())
        assert metrics.failures.value("internal_error") == 0
        assert counted["500"] + counted["502"] + counted["503"] + counted["429"] >= seen["refused"]
