"""Requests held in the gateway: until a worker frees, in order, bounded, and never lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kvroute.policies.pricing import CHUNK_TOKENS
from kvroute.policies.ttft import FEW_TOKENS, Ttft
from kvroute.router.dispatch import Choice
from kvroute.router.errors import Failure, GatewayError
from kvroute.router.parsed_request import ParsedRequest
from kvroute.router.server import GatewayServer
from kvroute.types import RequestView
from tests.kit import CHAT, Answer, Client, Engine, Received, Wire, until
from tests.router.edge import DONE, EVENTS, edge, event

LONG = 50_000
"""Tokens, by their bytes: more than a step prefills, for two seconds by the preset."""
KNOWN = CHUNK_TOKENS + 1000
VERY_LONG = 70_000
"""Goes before short ones."""


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


# --- several in one turn of the loop -------------------------------------------------------------


def asking(
    server: GatewayServer, tokens: int, text: bytes = b"", *, priority: int = 0, model: str = "m"
) -> asyncio.Task[Choice]:
    """As a request's own task asks, from its next turn on; with a text, what is known of it counts."""
    view = RequestView(model=model, prompt_tokens=tokens, priority=priority)
    request = ParsedRequest(view, _prompt=text, _root=1)
    return asyncio.create_task(server.waiting.choose(request, server.knowledge.prompt(request), "id"))


async def turn() -> None:
    """Whatever is due in this turn of the loop, and was due before us."""
    await asyncio.sleep(0)


def requests_at(server: GatewayServer) -> list[int]:
    return [member.load.requests for member in server.registry.members.values()]


async def leave(*tasks: asyncio.Task[Choice]) -> None:
    """Cancel those that wait, give back the leases of the others."""
    for task in tasks:
        task.cancel()
    for answer in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(answer, Choice):
            answer.lease.release()


async def test_a_burst_on_an_idle_engine_goes_short_first() -> None:
    script = Gated()
    async with Engine(script) as engine, edge(engine, policy="ttft") as server:
        prompts = {"long": 3 * FEW_TOKENS, "middle": 2 * FEW_TOKENS, "short": FEW_TOKENS + 100}
        clients = [await Client.connect(server.url) for _ in prompts]
        await until(lambda: len(server.state.connections) == 3)
        await asyncio.gather(
            *(
                client.send(CHAT, chat(tokens, name))
                for client, (name, tokens) in zip(clients, prompts.items(), strict=True)
            )
        )
        for name in ("short", "middle", "long"):
            await until(partial(script.came.__contains__, name))
            script.let(name)
        assert [(await client.receive()).status for client in clients] == [200] * 3
        assert script.came == ["short", "middle", "long"]


async def test_who_has_much_in_a_cache_goes_before_shorter_ones() -> None:
    known = b"y" * 4 * KNOWN
    async with Engine() as engine, edge(engine, policy="ttft") as server:
        first = await asking(server, KNOWN, known)
        first.lease.release()
        tasks = [asking(server, 3 * FEW_TOKENS), asking(server, KNOWN, known)]
        await tasks[0]
        await turn()
        assert (tasks[1].done(), held(server)) == (True, 0), "the other would have kept it waiting"
        await leave(*tasks)


async def test_the_shortest_of_a_burst_gets_the_worker_that_is_free() -> None:
    async with Engine() as one, Engine() as other, edge(one, other, policy="ttft") as server:
        busy = await asking(server, LONG)
        tasks = [asking(server, tokens) for tokens in (LONG, LONG - 1, LONG // 2)]
        short = await tasks[2]
        assert short.member is not busy.member
        assert requests_at(server) == [1, 1]
        assert [task.done() for task in tasks] == [False, False, True]
        assert held(server) == 2
        await leave(*tasks)
        busy.lease.release()
        assert ended(server, "left") == 2


async def test_the_longest_of_a_burst_goes_before_the_short_ones() -> None:
    async with Engine() as one, Engine() as other, edge(one, other, policy="ttft") as server:
        busy = await asking(server, LONG)
        tasks = [asking(server, tokens) for tokens in (LONG // 2, VERY_LONG, VERY_LONG + 1)]
        longest = await tasks[2]
        assert longest.member is not busy.member
        assert [task.done() for task in tasks] == [False, False, True]
        await leave(*tasks)
        busy.lease.release()


@pytest.mark.parametrize("order", [lambda *_: 1 / 0, lambda *_: "first", lambda *_: ("first",)])
async def test_a_policy_that_fails_to_order_is_counted_and_all_are_placed(
    monkeypatch: pytest.MonkeyPatch, order: Callable[..., object]
) -> None:
    monkeypatch.setattr(Ttft, "order", order)
    async with Engine() as one, Engine() as other, edge(one, other, policy="ttft") as server:
        tasks = [asking(server, tokens) for tokens in (2000, 1000)]
        await asyncio.gather(*tasks)
        assert sorted(requests_at(server)) == [1, 1]
        assert server.metrics.fallbacks.value("ttft", "order_error") == 2
        await leave(*tasks)


async def test_the_most_urgent_goes_before_shorter_ones() -> None:
    async with Engine() as engine, edge(engine, policy="ttft") as server:
        short, urgent = asking(server, LONG // 2), asking(server, LONG, priority=-1)
        await urgent
        assert (short.done(), held(server)) == (False, 1)
        await leave(short, urgent)


async def test_a_policy_that_does_not_ask_for_it_decides_in_order_and_at_once() -> None:
    async with Engine() as one, Engine() as other, edge(one, other, policy="round_robin") as server:
        tasks = [asking(server, tokens) for tokens in (LONG, LONG // 2, LONG // 4)]
        await turn()
        assert all(task.done() for task in tasks)
        first, second, third = [task.result().member for task in tasks]
        assert first is third
        assert first is not second
        await leave(*tasks)


async def test_who_leaves_in_the_turn_it_came_is_neither_charged_nor_held() -> None:
    async with Engine() as engine, edge(engine, policy="ttft") as server:
        (member,) = server.registry.members.values()
        gone, stays = asking(server, LONG // 2), asking(server, LONG)
        await turn()
        version = member.load.version
        gone.cancel()
        await until(stays.done)
        choice = stays.result()
        assert gone.cancelled()
        assert (member.load.requests, member.load.version) == (1, version + 1), "one charge, of the other"
        assert choice.lease.charge.prompt_tokens == LONG
        assert held(server) == 0
        assert server.metrics.holds.values == {}
        await leave(stays)


async def test_who_leaves_after_being_placed_gives_its_lease_back() -> None:
    async with Engine() as engine, edge(engine, policy="ttft") as server:
        task = asking(server, LONG)
        await turn()
        assert requests_at(server) == [0], "it is decided on in the next turn"
        await turn()
        assert (requests_at(server), task.done()) == ([1], False)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert requests_at(server) == [0]


async def test_who_leaves_after_being_released_gives_its_lease_back() -> None:
    async with Engine() as engine, edge(engine, policy="ttft") as server:
        busy = await asking(server, LONG)
        task = asking(server, LONG)
        await until(lambda: held(server) == 1)
        server.waiting.close()
        assert (requests_at(server), task.done()) == ([2], False)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert (requests_at(server), ended(server, "placed")) == ([1], 1)
        busy.lease.release()


async def test_where_others_of_the_turn_take_the_last_place_it_is_sent() -> None:
    async with Engine() as engine, edge(engine, policy="ttft", limits={"held_requests": 1}) as server:
        busy = await asking(server, LONG)
        tasks = [asking(server, tokens) for tokens in (LONG, LONG // 2, LONG // 4)]
        await until(lambda: tasks[0].done() and tasks[1].done())
        assert (held(server), ended(server, "full")) == (1, 2)
        assert (tasks[2].done(), requests_at(server)) == (False, [3])
        await leave(*tasks)
        busy.lease.release()


async def test_all_of_a_burst_are_held_no_longer_than_the_limit() -> None:
    async with Engine() as engine, edge(engine, policy="ttft", limits={"held_s": 0.05}) as server:
        busy = await asking(server, LONG)
        tasks = [asking(server, LONG) for _ in range(3)]
        await asyncio.gather(*tasks)
        assert (held(server), ended(server, "expired"), requests_at(server)) == (0, 3, [4])
        await leave(*tasks)
        busy.lease.release()


async def test_a_gateway_that_closes_sends_those_that_have_just_come() -> None:
    async with Engine() as engine, edge(engine, policy="ttft") as server:
        busy = await asking(server, LONG)
        tasks = [asking(server, LONG) for _ in range(3)]
        await turn()
        server.waiting.close()
        assert requests_at(server) == [1]
        await turn()
        assert (held(server), requests_at(server)) == (0, [4])
        await asyncio.gather(*tasks)
        await leave(*tasks)
        busy.lease.release()


async def test_one_that_nobody_may_take_is_refused_and_the_others_of_its_turn_are_not() -> None:
    async with Engine() as engine, edge(engine, policy="ttft") as server:
        tasks = [asking(server, 100, model="another"), asking(server, 200)]
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(answers[0], GatewayError)
        assert answers[0].failure is Failure.MODEL_NOT_FOUND
        assert isinstance(answers[1], Choice)
        await leave(tasks[1])
