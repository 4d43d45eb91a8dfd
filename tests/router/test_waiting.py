"""Requests held in the gateway: until a worker frees, in order, bounded, and never lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvroute.router.server import GatewayServer
from tests.kit import CHAT, Answer, Client, Engine, Received, Wire, until
from tests.router.edge import DONE, EVENTS, edge, event

LONG = 60_000
"""Tokens, by their bytes: more than a step prefills, for more than two seconds by the preset."""


def chat(tokens: int, name: str = "x") -> dict[str, Any]:
    return {"model": "m", "stream": True, "messages": [{"role": "user", "content": name + "y" * 4 * tokens}]}


class Gated:
    """An engine's script: who has come, and when each may have its first byte and its end."""

    def __init__(self) -> None:
        self.came: list[str] = []
        self.first: dict[str, asyncio.Event] = {}

    async def __call__(self, request: Received, wire: Wire) -> None:
        name = request.json()["messages"][0]["content"].rstrip("y")
        self.came.append(name)
        await self.first.setdefault(name, asyncio.Event()).wait()
        await wire.start_stream()
        await wire.chunk(EVENTS[0])
        await wire.chunk(DONE)
        await wire.chunk(b"")

    def let(self, name: str) -> None:
        self.first.setdefault(name, asyncio.Event()).set()


async def send(server: GatewayServer, tokens: int, name: str, *headers: str) -> Client:
    client = await Client.connect(server.url)
    await client.send(CHAT, chat(tokens, name), *headers)
    return client


def held(server: GatewayServer) -> int:
    return len(server.waiting)


def ended(server: GatewayServer, how: str) -> float:
    return server.metrics.holds.value(how)


async def test_a_request_waits_for_the_first_byte_of_a_long_one() -> None:
    script = Gated()
    async with Engine(script) as engine, edge(engine, policy="ttft") as server:
        first = await send(server, LONG, "a")
        await until(lambda: script.came == ["a"])
        second = await send(server, 2000, "b")
        await until(lambda: held(server) == 1)
        assert script.came == ["a"], "the second has not been sent"
        script.let("a")
        await until(lambda: script.came == ["a", "b"])
        script.let("b")
        answers = [await client.receive() for client in (first, second)]
        assert [answer.status for answer in answers] == [200, 200]
        assert (held(server), ended(server, "placed")) == (0, 1)


async def test_short_ones_go_first() -> None:
    script = Gated()
    async with Engine(script) as engine, edge(engine, policy="ttft") as server:
        clients = [await send(server, LONG, "a")]
        await until(lambda: script.came == ["a"])
        for number, (name, tokens) in enumerate([("long", LONG), ("short", 200)], 1):
            clients.append(await send(server, tokens, name))
            await until(lambda number=number: held(server) == number)  # type: ignore[misc]
        script.let("a")
        await until(lambda: "short" in script.came)
        assert script.came[:2] == ["a", "short"]
        for name in ("short", "long"):
            script.let(name)
        assert [(await client.receive()).status for client in clients] == [200] * 3


async def test_a_client_that_leaves_waits_no_more() -> None:
    script = Gated()
    async with Engine(script) as engine, edge(engine, policy="ttft") as server:
        first = await send(server, LONG, "a")
        await until(lambda: script.came == ["a"])
        second = await send(server, 2000, "b")
        await until(lambda: held(server) == 1)
        second.abort()
        await until(lambda: held(server) == 0)
        assert ended(server, "left") == 1
        script.let("a")
        assert (await first.receive()).status == 200
        assert script.came == ["a"]


async def test_after_its_limit_it_is_sent_as_things_are() -> None:
    script = Gated()
    async with Engine(script) as engine, edge(engine, policy="ttft", limits={"held_s": 0.2}) as server:
        clients = [await send(server, LONG, "a")]
        await until(lambda: script.came == ["a"])
        clients.append(await send(server, 2000, "b"))
        await until(lambda: script.came == ["a", "b"])
        assert ended(server, "expired") == 1
        for name in "ab":
            script.let(name)
        assert [(await client.receive()).status for client in clients] == [200, 200]


@pytest.mark.parametrize("limits", [{"held_requests": 0}, {"held_requests": 1}])
async def test_when_no_more_may_wait_they_are_sent(limits: dict[str, int]) -> None:
    script = Gated()
    async with Engine(script) as engine, edge(engine, policy="ttft", limits=limits) as server:
        room = limits["held_requests"]
        clients = [await send(server, LONG, "a")]
        await until(lambda: script.came == ["a"])
        for name in "bc"[:room]:
            clients.append(await send(server, 2000, name))
        await until(lambda: held(server) == room)
        clients.append(await send(server, 2000, "z"))
        await until(lambda: script.came == ["a", "z"])
        assert ended(server, "full") == (2 if not room else 1)
        for name in "abz":
            script.let(name)
        assert [(await client.receive()).status for client in clients] == [200] * len(clients)


async def test_when_the_last_worker_goes_it_is_refused() -> None:
    script = Gated()
    async with Engine(script) as engine, edge(engine, policy="ttft") as server:
        first = await send(server, LONG, "a")
        await until(lambda: script.came == ["a"])
        second = await send(server, 2000, "b")
        await until(lambda: held(server) == 1)
        (member,) = server.registry.members.values()
        server.registry.drain(member)
        answer = await second.receive()
        assert (answer.status, answer.code) == (503, "no_worker")
        assert ended(server, "refused") == 1
        script.let("a")
        assert (await first.receive()).status == 200


async def test_another_worker_takes_what_waits_for_the_first() -> None:
    one, other = Gated(), Gated()
    async with Engine(one) as first, Engine(other) as second, edge(first, policy="ttft") as server:
        clients = [await send(server, LONG, "a")]
        await until(lambda: one.came == ["a"])
        clients.append(await send(server, 2000, "b"))
        await until(lambda: held(server) == 1)
        from kvroute.config_groups import WorkerConfig

        server.registry.add(WorkerConfig(url=second.url))
        await until(lambda: other.came == ["b"])
        one.let("a")
        other.let("b")
        assert [(await client.receive()).status for client in clients] == [200, 200]


async def test_a_gateway_that_closes_sends_those_it_holds_and_holds_no_more() -> None:
    script = Gated()
    async with Engine(script) as engine, edge(engine, policy="ttft") as server:
        clients = [await send(server, LONG, "a")]
        await until(lambda: script.came == ["a"])
        clients += [await send(server, 2000, f"held {number}") for number in range(30)]
        await until(lambda: held(server) == 30)
        server.waiting.close()
        await until(lambda: len(script.came) == 31)
        clients.append(await send(server, 2000, "late"))
        await until(lambda: len(script.came) == 32)
        for name in script.came:
            script.let(name)
        assert [(await client.receive()).status for client in clients] == [200] * 32
        assert (held(server), ended(server, "placed"), ended(server, "closing")) == (0, 30, 1)


async def rejected(server: GatewayServer, *headers: str) -> Answer:
    client = await send(server, 2000, "z", *headers)
    return await client.receive()


async def test_a_predicted_miss_is_answered_429_with_the_time_to_come_back() -> None:
    script = Gated()
    policy = {"name": "ttft", "options": {"admission": "slo", "hold": False}}
    async with Engine(script) as engine, edge(engine, policy=policy) as server:
        first = await send(server, 20_000, "a")  # 0.4 s and more, by the preset
        await until(lambda: script.came == ["a"])
        answer = await rejected(server, "x-slo-ttft-ms: 100")
        assert (answer.status, answer.code) == (429, "rejected")
        assert int(answer.header("retry-after") or 0) == 1
        script.let("z")
        assert (await rejected(server, "x-slo-ttft-ms: 100000")).status == 200
        script.let("a")
        assert (await first.receive()).status == 200
        assert (await rejected(server, "x-slo-ttft-ms: 100")).status == 200, "the queue is gone"


async def test_nothing_is_lost_when_many_wait_and_leave() -> None:
    """Sixty requests on two engines that answer at their leisure; a third of the clients leave."""

    async def slowly(_request: Received, wire: Wire) -> None:
        await asyncio.sleep(0.01)
        await wire.start_stream()
        await wire.chunk(event("x"))
        await wire.chunk(DONE)
        await wire.chunk(b"")

    async with Engine(slowly) as one, Engine(slowly) as other, edge(one, other, policy="ttft") as server:
        clients = [await send(server, LONG if n % 4 == 0 else 3000, f"{n}-") for n in range(60)]
        for client in clients[::3]:
            client.abort()
        kept = [client for number, client in enumerate(clients) if number % 3]
        answers = await asyncio.gather(*(client.receive() for client in kept))
        assert [answer.status for answer in answers] == [200] * 40
        await until(lambda: held(server) == 0)
        assert ended(server, "placed") > 0
