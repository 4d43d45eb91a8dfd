"""What every request adds to a worker's load is taken off again, by any route and whatever happens."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from kvroute.config_groups import WorkerConfig
from kvroute.router.server import GatewayServer
from tests.kit import CHAT, Client, Engine, Received, Wire, ask, until
from tests.router.edge import EVENTS, Lasting, edge, first_chunk, promptly

BUILT_IN = [
    *("round_robin", "random", "least_loaded", "power_of_two", "session", "prefix_affinity", "ttft"),
    *("dynamo", "weighted", "mooncake", "preble", "lmetric", "sticky"),
]


def _loads(server: GatewayServer) -> list[int]:
    return [member.load.requests for member in server.registry.members.values()]


async def test_probes_do_not_write_load() -> None:
    script = Lasting()
    async with Engine(script) as engine, edge(engine) as server:
        clients = [await Client.connect(server.url) for _ in range(10)]
        for client in clients:
            await client.send(CHAT, {"model": "m"})
        await until(lambda: len(engine.received) == 10)
        probes = engine.probes
        await until(lambda: engine.probes >= probes + 9)  # health, metrics and models, three times over
        assert _loads(server) == [10]
        for client in clients:
            client.abort()
        await until(lambda: _loads(server) == [0])


async def test_a_late_release_belongs_to_the_worker_that_was_charged() -> None:
    script = Lasting(EVENTS[0])
    async with Engine(script) as engine, edge(engine) as server:
        first = await first_chunk(server, CHAT, {"model": "m", "stream": True})
        (old,) = server.registry.members.values()
        server.registry.remove(old)
        new = server.registry.add(WorkerConfig(url=engine.url))
        await until(lambda: new.state.value == "ready")
        second = await first_chunk(server, CHAT, {"model": "m", "stream": True})
        assert (old.load.requests, new.load.requests) == (1, 1)
        first.abort()
        await until(lambda: old.load.requests == 0)
        assert new.load.requests == 1
        assert list(server.registry.members.values()) == [new]
        second.abort()
        await until(lambda: new.load.requests == 0)


async def test_a_stream_outlives_the_removal_of_its_worker() -> None:
    script = Lasting(EVENTS[0])
    async with Engine(script) as engine, edge(engine) as server:
        client = await first_chunk(server, CHAT, {"model": "m", "stream": True})
        (member,) = server.registry.members.values()
        server.registry.remove(member)
        refused = await ask(server.url, CHAT, {"model": "m"})
        assert (refused.status, refused.code) == (503, "no_worker")
        await script.wire.chunk(EVENTS[1])
        await script.wire.chunk(b"")
        assert [await client.chunk() for _ in range(2)] == [EVENTS[1], b""]
        await until(lambda: not server.registry.members)
        client.close()
        await promptly(script.left)


@pytest.mark.parametrize("policy", BUILT_IN)
@pytest.mark.parametrize("target", ["/v1/some/new/api", "/v1/chat/completions"])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_load_is_charged_on_every_route(policy: str, target: str, version: str) -> None:
    script = Lasting()
    engines = [Engine(script) for _ in range(4)]
    async with engines[0], engines[1], engines[2], engines[3], edge(*engines, policy=policy) as server:
        clients = [await Client.connect(server.url) for _ in range(8)]
        for client in clients:
            client.writer.write(
                b"POST %b HTTP/%b\r\nContent-Length: 2\r\n\r\n{}" % (target.encode(), version.encode())
            )
        await until(lambda: sum(len(engine.received) for engine in engines) == 8)
        loads = _loads(server)
        by_url = [len(engine.received) for engine in engines]
        assert loads == by_url, "charged where it was sent"
        if policy in ("round_robin", "least_loaded", "prefix_affinity"):
            assert loads == [2, 2, 2, 2]
        for client in clients:
            client.abort()
        await until(lambda: _loads(server) == [0] * 4)


async def test_one_prefix_on_an_unknown_route_does_not_end_on_one_engine() -> None:
    async def slow(_request: Received, wire: Wire) -> None:
        await asyncio.sleep(0.02)
        await wire.answer(200, b"{}")

    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(Engine(slow)) for _ in range(8)]
        server = await stack.enter_async_context(edge(*engines, policy="prefix_affinity"))
        body = {"model": "m", "messages": [{"role": "user", "content": "x" * 8000}]}

        async def work() -> None:
            client = await Client.connect(server.url)
            for _ in range(6):
                assert (await client.ask("/v1/unheard/of", body)).status == 200
            client.close()

        await asyncio.gather(*(work() for _ in range(16)))
        counts = [len(engine.received) for engine in engines]
        assert sum(counts) == 96
        assert max(counts) <= 24, counts


SHAPES = [
    {"prompt": "text"},
    {"prompt": ["one", "two"]},
    {"prompt": [1, 2, 3]},
    {"prompt": [[1, 2], [3]]},
    {"prompt": ""},
    {"prompt": []},
    {"prompt": None},
    {"prompt": "text", "input_ids": [1, 2, 3]},
    {"input_ids": []},
    {"messages": []},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
    {"messages": [{"role": "user", "content": None}]},
    {"prompt": [1, "mixed", None, {"a": 1}]},
    {"prompt": {"an": "object"}},
    {"prompt": [1, -2, 10**30, 1.5, True]},
]


@pytest.mark.parametrize("policy", BUILT_IN)
async def test_every_shape_of_prompt_reaches_the_engine_under_every_policy(policy: str) -> None:
    async with Engine() as one, Engine() as two, edge(one, two, policy=policy) as server:
        for target in (CHAT, "/v1/completions", "/generate", "/v1/embeddings", "/v1/responses"):
            for shape in SHAPES:
                answer = await ask(server.url, target, {"model": "m", **shape})
                assert (answer.status, answer.body) == (200, b'{"ok":true}'), (target, shape)
        assert server.metrics.fallbacks.total() == 0
        assert len(one.received) + len(two.received) == 5 * len(SHAPES)
