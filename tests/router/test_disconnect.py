"""A client that goes away takes its upstream request with it, whatever the phase."""

from __future__ import annotations

import asyncio

import pytest

from kvroute.router.server import GatewayServer
from tests.kit import CHAT, Client, Engine, Received, Wire, ask, until
from tests.router.edge import EVENTS, PROMPTLY_S, Lasting, edge, first_chunk, handlers, promptly, stream

GONE = pytest.mark.parametrize("how", ["abort", "close"])


def _leave(client: Client, how: str) -> None:
    client.abort() if how == "abort" else client.close()


async def _usable(server: GatewayServer, engine: Engine) -> None:
    engine.script = stream(*EVENTS)
    answer = await ask(server.url, CHAT, {"model": "m", "stream": True})
    assert (answer.status, answer.body, answer.complete) == (200, b"".join(EVENTS), True)


@GONE
@pytest.mark.parametrize("streaming", [True, False])
async def test_a_client_that_leaves_before_the_first_byte(how: str, streaming: bool) -> None:
    script = Lasting()
    async with Engine(script) as engine, edge(engine) as server:
        client = await Client.connect(server.url)
        await client.send(CHAT, {"model": "m", "stream": streaming})
        await promptly(script.begun)
        _leave(client, how)
        await promptly(script.left)
        await until(lambda: server.metrics.disconnects.value("waiting") == 1)
        assert server.metrics.requests.value(CHAT, "m", "client_left") == 1
        await _usable(server, engine)


@GONE
async def test_a_client_that_leaves_a_stream_that_is_silent(how: str) -> None:
    script = Lasting(EVENTS[0])
    async with Engine(script) as engine, edge(engine) as server:
        client = await first_chunk(server, CHAT, {"model": "m", "stream": True})
        assert handlers() == 1
        _leave(client, how)
        await promptly(script.left)
        await until(lambda: handlers() == 0)
        assert server.metrics.disconnects.value("streaming") == 1
        await _usable(server, engine)


async def test_a_client_that_leaves_a_stream_that_flows() -> None:
    left = asyncio.Event()
    sent = 0

    async def flow(_request: Received, wire: Wire) -> None:
        nonlocal sent
        await wire.start_stream()
        watching = asyncio.ensure_future(wire.eof(12 * PROMPTLY_S))
        while not watching.done():
            await wire.chunk(EVENTS[0])
            sent += 1
            await asyncio.sleep(0.01)
        left.set()

    async with Engine(flow) as engine, edge(engine) as server:
        client = await first_chunk(server, CHAT, {"model": "m", "stream": True})
        client.abort()
        await promptly(left)
        assert sent < 60
        await _usable(server, engine)


async def test_a_client_that_leaves_between_head_and_body_of_the_engine() -> None:
    script = Lasting()

    async def head_only(request: Received, wire: Wire) -> None:
        await wire.start_stream()
        await script(request, wire)

    async with Engine(head_only) as engine, edge(engine) as server:
        client = await Client.connect(server.url)
        await client.send(CHAT, {"model": "m", "stream": True})
        await promptly(script.begun)
        client.abort()
        await promptly(script.left)


async def test_a_client_that_leaves_in_the_middle_of_its_request() -> None:
    async with Engine() as engine, edge(engine) as server:
        client = await Client.connect(server.url)
        client.writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 100\r\n\r\n" + b"x" * 50)
        await until(lambda: server.state.buffered_bytes == 50)
        client.abort()
        await until(lambda: not server.state.connections)
        assert server.state.buffered_bytes == 0
        assert engine.received == []


async def test_a_client_that_leaves_with_requests_queued() -> None:
    script = Lasting()
    async with Engine(script) as engine, edge(engine) as server:
        client = await Client.connect(server.url)
        for _ in range(5):
            await client.send(CHAT, {"model": "m"})
        await promptly(script.begun)
        await until(lambda: server.state.buffered_bytes == 5 * len(b'{"model": "m"}'))
        client.abort()
        await promptly(script.left)
        await until(lambda: server.state.buffered_bytes == 0)
        assert len(engine.received) == 1


async def test_a_client_that_leaves_while_its_body_is_parsed_in_a_thread() -> None:
    async with Engine() as engine, edge(engine) as server:
        client = await Client.connect(server.url)
        await client.send(CHAT, {"model": "m", "messages": [{"role": "user", "content": "x " * 2**20}]})
        client.abort()
        await until(lambda: not server.state.connections and handlers() == 0)
        await _usable(server, engine)


async def test_cancelling_one_id_leaves_an_id_that_begins_alike() -> None:
    scripts = {"a": Lasting(EVENTS[0]), "a1": Lasting(EVENTS[0])}
    wires: dict[str, Wire] = {}

    async def by_id(request: Received, wire: Wire) -> None:
        name = request.header("x-request-id") or ""
        wires[name] = wire
        await scripts[name](request, wire)

    async with Engine(by_id) as engine, edge(engine) as server:
        clients = {}
        for name in scripts:
            clients[name] = client = await Client.connect(server.url)
            await client.send(CHAT, {"model": "m", "stream": True}, f"X-Request-Id: {name}")
            await client.head()
            assert await client.chunk() == EVENTS[0]
        clients["a"].abort()
        await promptly(scripts["a"].left)
        assert not scripts["a1"].left.is_set()
        await wires["a1"].chunk(EVENTS[1])
        await wires["a1"].chunk(b"")
        assert [await clients["a1"].chunk() for _ in range(2)] == [EVENTS[1], b""]
        clients["a1"].close()


async def test_two_clients_with_one_id_are_two_requests() -> None:
    script = Lasting(EVENTS[0])
    async with Engine(script) as engine, edge(engine) as server:
        clients = [await Client.connect(server.url) for _ in range(2)]
        for client in clients:
            await client.send(CHAT, {"model": "m", "stream": True}, "X-Request-Id: same")
            await client.head()
            assert await client.chunk() == EVENTS[0]
        clients[0].abort()
        await until(lambda: sum(m.load.requests for m in server.registry.members.values()) == 1)
        await script.wire.chunk(EVENTS[1])
        assert await clients[1].chunk() == EVENTS[1]
        clients[1].abort()


async def test_an_engine_is_not_blamed_for_clients_that_leave() -> None:
    script = Lasting()
    async with Engine(script) as engine, edge(engine, breaker={"failures": 1}) as server:
        for number in range(4):
            client = await Client.connect(server.url)
            await client.send(CHAT, {"model": "m"})
            await until(lambda expected=number + 1: len(engine.received) == expected)  # type: ignore[misc]
            client.abort()
        await _usable(server, engine)
        assert server.metrics.upstream_errors.total() == 0
