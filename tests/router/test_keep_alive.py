"""Connections are reused on both sides, and one that went stale costs neither a request nor a reputation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from kvroute.router.server import GatewayServer
from tests.kit import CHAT, Client, Engine, Received, Wire, answer_ok, ask, until
from tests.router.edge import EVENTS, Lasting, edge, promptly, raw, stream

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
UNPROBED = {"interval_s": 60, "models_interval_s": 60, "metrics_interval_s": 60}
"""A probe takes a connection of the pool, or leaves one there."""
STEADY = {"failures": 1, "open_s": 60}


def _blame(server: GatewayServer) -> tuple[float, float, float]:
    metrics = server.metrics
    return metrics.stale.total(), metrics.retries.total(), metrics.upstream_errors.total()


def _second_on_a_connection(then: Callable[[Wire], object]) -> Callable[[Received, Wire], object]:
    """Answers the first request of every connection; does `then` at the second."""
    seen: set[int] = set()

    async def script(request: Received, wire: Wire) -> None:
        if request.connection in seen:
            then(wire)
        else:
            seen.add(request.connection)
            await wire.answer(200, b"hi")

    return script


async def test_requests_share_one_connection_on_either_side() -> None:
    async with Engine() as engine, edge(engine, health=UNPROBED) as server:
        client = await Client.connect(server.url)
        for _ in range(20):
            answer = await client.ask(CHAT, {"model": "m"})
            assert (answer.status, answer.header("connection")) == (200, None)
        client.close()
        assert len({request.connection for request in engine.received}) == 1


async def test_eight_clients_of_twenty_requests_each_are_all_served() -> None:
    async with Engine(stream(*EVENTS)) as engine, edge(engine, health=UNPROBED) as server:

        async def work() -> None:
            client = await Client.connect(server.url)
            for _ in range(20):
                answer = await client.ask(CHAT, {"model": "m", "stream": True})
                assert (answer.status, answer.body) == (200, b"".join(EVENTS))
            client.close()

        await asyncio.gather(*(work() for _ in range(8)))
        assert len(engine.received) == 160
        assert len({request.connection for request in engine.received}) <= 8


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_a_stale_connection_is_replaced_once_and_nobody_blamed(how: str) -> None:
    script = _second_on_a_connection(Wire.close if how == "close" else Wire.reset)
    async with Engine(script) as engine, edge(engine, breaker=STEADY, health=UNPROBED) as server:  # type: ignore[arg-type]
        for number in range(5):
            answer = await ask(server.url, CHAT, {"number": number})
            assert (answer.status, answer.body) == (200, b"hi")
        # Every request but the first met a stale connection, and its bytes went out again unchanged.
        assert [request.json()["number"] for request in engine.received] == [0, 1, 1, 2, 2, 3, 3, 4, 4]
        assert _blame(server) == (4, 0, 0)


async def test_a_fresh_connection_that_closes_is_a_failure() -> None:
    fresh = Engine(raw(b"", close=True), keeps_probes=False)
    async with fresh as engine, edge(engine, breaker={"failures": 99}, health=UNPROBED) as server:
        answer = await ask(server.url, CHAT, b"{}")
        assert (answer.status, answer.code) == (502, "upstream_reset")
        assert len(engine.received) == 1
        assert _blame(server) == (0, 0, 1)


async def test_a_request_is_resent_only_once() -> None:
    async with Engine(raw(OK)) as engine, edge(engine, health=UNPROBED) as server:
        await ask(server.url, CHAT, b"{}")
        engine.script = raw(b"", close=True)
        answer = await ask(server.url, CHAT, b"{}")
        assert (answer.status, answer.code) == (502, "upstream_reset")
        assert len(engine.received) == 3
        assert _blame(server) == (1, 0, 1)


async def test_a_reused_connection_that_closes_within_a_response_is_a_failure() -> None:
    async with Engine(raw(OK)) as engine, edge(engine, health=UNPROBED) as server:
        await ask(server.url, CHAT, b"{}")
        engine.script = raw(b"HTTP/1.1 200 O", close=True)
        answer = await ask(server.url, CHAT, b"{}")
        assert (answer.status, answer.code) == (502, "upstream_reset")
        assert len(engine.received) == 2


async def test_an_engine_that_dies_on_a_reused_connection_is_replaced_by_another() -> None:
    async with Engine() as dying, Engine() as other, edge(dying, other, health=UNPROBED) as server:
        for _ in range(2):
            await ask(server.url, CHAT, b"{}")
        await dying.stop()
        for _ in range(4):
            answer = await ask(server.url, CHAT, b"{}")
            assert (answer.status, answer.header("x-kvroute-worker")) == (200, other.url)


async def test_an_engine_that_closes_at_idle_costs_no_request() -> None:
    async def script(_request: Received, wire: Wire) -> None:
        await wire.answer(200, b"{}")
        asyncio.get_running_loop().call_later(len(engine.received) % 5 * 0.002, wire.close)

    async with Engine(script) as engine, edge(engine, breaker=STEADY, health=UNPROBED) as server:
        client = await Client.connect(server.url)
        for number in range(60):
            assert (await client.ask(CHAT, b"{}")).status == 200
            await asyncio.sleep(number % 7 * 0.001)
        client.close()
        assert _blame(server)[1:] == (0, 0)


async def test_idle_connections_are_closed_before_the_engine_would() -> None:
    async with (
        Engine() as engine,
        edge(engine, timeouts={"upstream_keep_alive_s": 0.2}, health=UNPROBED) as server,
    ):
        await ask(server.url, CHAT, b"{}")
        (member,) = server.registry.members.values()
        assert member.pool.open_connections >= 1
        await until(lambda: member.pool.open_connections == 0)
        await ask(server.url, CHAT, b"{}")
        assert engine.received[0].connection != engine.received[1].connection
        assert _blame(server) == (0, 0, 0)


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nhi",
        OK + OK,
        OK + b"garbage",
    ],
)
async def test_a_connection_is_not_reused_after(head: bytes) -> None:
    async with Engine(raw(head)) as engine, edge(engine, health=UNPROBED) as server:
        for _ in range(3):
            assert (await ask(server.url, CHAT, b"{}")).body == b"hi"
        assert len({request.connection for request in engine.received}) == 3
        assert _blame(server) == (0, 0, 0)


async def test_an_idle_connection_that_speaks_is_closed() -> None:
    async with (
        Engine() as engine,
        edge(engine, timeouts={"upstream_keep_alive_s": 300}, health=UNPROBED) as server,
    ):
        await ask(server.url, CHAT, b"{}")
        (member,) = server.registry.members.values()
        assert member.pool.open_connections == 1
        for wire in engine.wires:
            wire.writer.write(b"HTTP/1.1 408 Timeout\r\nContent-Length: 0\r\n\r\n")
        await until(lambda: member.pool.open_connections == 0)
        assert (await ask(server.url, CHAT, b"{}")).body == b'{"ok":true}'


async def test_requests_per_worker_are_bounded() -> None:
    script = Lasting()
    async with (
        Engine(script) as engine,
        edge(engine, limits={"requests_per_worker": 3}, health=UNPROBED) as server,
    ):
        clients = [await Client.connect(server.url) for _ in range(3)]
        for client in clients:
            await client.send(CHAT, b"{}")
        await until(lambda: len(engine.received) == 3)
        (member,) = server.registry.members.values()
        answer = await ask(server.url, CHAT, b"{}")
        assert (answer.status, answer.code, answer.header("retry-after")) == (429, "overloaded", "1")
        assert member.pool.open_connections == 3
        clients[0].abort()
        await promptly(script.left)
        engine.script = answer_ok
        await until(lambda: member.load.requests == 2)
        assert (await ask(server.url, CHAT, b"{}")).status == 200
        for client in clients:
            client.abort()


async def test_requests_in_flight_are_bounded() -> None:
    script = Lasting()
    async with Engine(script) as engine, edge(engine, limits={"requests": 2}, health=UNPROBED) as server:
        clients = [await Client.connect(server.url) for _ in range(2)]
        for client in clients:
            await client.send(CHAT, b"{}")
        await until(lambda: len(engine.received) == 2)
        answer = await ask(server.url, CHAT, b"{}")
        assert (answer.status, answer.code, answer.header("retry-after")) == (429, "overloaded", "1")
        assert (await ask(server.url, "/readyz", method="GET")).status == 200
        for client in clients:
            client.abort()


async def test_a_client_that_asks_to_close_is_obliged() -> None:
    async with Engine() as engine, edge(engine, health=UNPROBED) as server:
        client = await Client.connect(server.url)
        answer = await client.ask(CHAT, b"{}", "Connection: close")
        assert (answer.status, answer.header("connection")) == (200, "close")
        assert await client.reader.read() == b""
        client.close()
