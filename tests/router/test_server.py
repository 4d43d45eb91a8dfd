"""The life of a gateway: ports, probes of it, limits, and the phases of its end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable

import pytest

from kvroute.listening import CannotListen
from kvroute.router.server import GatewayServer, running
from kvroute.router.workers import State
from tests.kit import CHAT, HANG_S, Client, Engine, Received, Wire, ask, fast_config, gateway, until
from tests.process import serve

from .probed import Held, member_of

BODY = {"model": "m", "stream": True}


def streaming(events: int, gap_s: float) -> Callable[[Received, Wire], Awaitable[None]]:
    async def script(_request: Received, wire: Wire) -> None:
        await wire.start_stream()
        for number in range(events):
            await wire.chunk(b"data: %d\n\n" % number)
            await asyncio.sleep(gap_s)
        await wire.chunk(b"data: [DONE]\n\n")
        await wire.chunk(b"")

    return script


async def opened(url: str) -> Client:
    """A stream whose first event is here."""
    client = await Client.connect(url)
    await client.send(CHAT, BODY)
    assert (await client.head())[0] == 200
    assert await client.chunk() == b"data: 0\n\n"
    return client


async def rest(client: Client) -> bytes:
    """What is left of a stream, up to its end or to where it broke off."""
    data = b""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while piece := await client.chunk():
            data += piece
        data += b"<end>"
    return data


# --- ready or not ----------------------------------------------------------------------------------


async def test_alive_from_the_start_and_ready_while_a_worker_is_usable() -> None:
    async with Engine(health=503) as engine, gateway(engine, ready=False) as server:
        assert (await ask(server.url, "/livez", method="GET")).json() == {"status": "alive"}
        answer = await ask(server.url, "/readyz", method="GET")
        assert (answer.status, answer.json()) == (
            503,
            {"status": "no usable worker", "workers": {"starting": 1}},
        )
        engine.health = 200
        member = member_of(server, engine)
        await until(lambda: member.state is State.READY)
        answer = await ask(server.url, "/readyz", method="GET")
        assert (answer.status, answer.json()) == (200, {"status": "ready", "workers": {"ready": 1}})
        assert (await ask(server.url, "/readyz", method="HEAD")).status == 200
        engine.health = 503
        await until(lambda: member.state is State.UNHEALTHY)
        assert (await ask(server.url, "/readyz", method="GET")).json()["workers"] == {"unhealthy": 1}
        server.registry.drain(member)
        answer = await ask(server.url, "/readyz", method="GET")
        assert (answer.status, answer.json()["workers"]) == (503, {"draining": 1})
        assert (await ask(server.url, "/livez", method="GET")).status == 200


# --- ports -----------------------------------------------------------------------------------------


async def test_a_taken_port_is_named_and_nothing_stays_open() -> None:
    async with gateway(admin={"enabled": True}) as server:
        port, admin_port = (int(url.rpartition(":")[2]) for url in (server.url, server.admin_url or ""))
        with pytest.raises(
            CannotListen, match=f"^port: cannot listen on 127.0.0.1:{port}: Address already in use"
        ):
            await GatewayServer(fast_config(port=port)).start()
        free = await unused_port()
        with pytest.raises(CannotListen, match=rf"^admin\.port: cannot listen on 127.0.0.1:{admin_port}: "):
            await GatewayServer(fast_config(port=free, admin={"enabled": True, "port": admin_port})).start()
    async with running(fast_config(port=free)) as server:
        assert server.url.endswith(f":{free}")


async def unused_port() -> int:
    async with Engine() as engine:
        return engine.port


async def test_an_address_that_is_not_ours_is_named() -> None:
    with pytest.raises(CannotListen, match=r"^port: cannot listen on 192\.0\.2\.1:\d+: "):
        await GatewayServer(fast_config(host="192.0.2.1")).start()
    with pytest.raises(CannotListen, match=r"^host: cannot resolve 'no\.such\.invalid'"):
        await GatewayServer(fast_config(host="no.such.invalid")).start()


# --- limits ----------------------------------------------------------------------------------------


async def test_requests_over_the_limit_are_told_to_come_back() -> None:
    held = Held()
    async with Engine(script=held) as engine, gateway(engine, limits={"requests": 3}) as server:
        requests = [asyncio.create_task(ask(server.url, CHAT, {"model": "m"})) for _ in range(3)]
        await until(lambda: held.count == 3)
        refused = await ask(server.url, CHAT, {"model": "m"})
        assert (refused.status, refused.code, refused.header("retry-after")) == (429, "overloaded", "1")
        assert "limits.requests" in refused.json()["error"]["message"]
        assert (await ask(server.url, "/livez", method="GET")).status == 200
        held.release()
        assert {answer.status for answer in await asyncio.gather(*requests)} == {200}
        assert (await ask(server.url, CHAT, {"model": "m"})).status == 200


async def test_connections_over_the_limit_are_answered_and_closed() -> None:
    async with Engine() as engine, gateway(engine, limits={"connections": 2}) as server:
        clients = [await Client.connect(server.url) for _ in range(2)]
        for client in clients:
            assert (await client.ask(CHAT, {"model": "m"})).status == 200
        third = await Client.connect(server.url)
        answer = await third.receive()
        assert (answer.status, answer.code, answer.header("connection")) == (429, "overloaded", "close")
        assert await third.reader.read() == b""
        third.close()
        clients.pop().close()
        await until(lambda: len(server.state.connections) == 1)
        assert (await ask(server.url, CHAT, {"model": "m"})).status == 200
        clients.pop().close()


# --- shutdown --------------------------------------------------------------------------------------


async def test_not_ready_yet_serving_and_asking_clients_to_leave() -> None:
    async with Engine() as engine:
        server = GatewayServer(fast_config(engine, shutdown={"keep_serving_s": 0.5}))
        await server.start()
        await until(lambda: server.registry.usable)
        kept = await Client.connect(server.url)
        assert (await kept.ask(CHAT, {"model": "m"})).header("connection") is None
        stopping = asyncio.create_task(server.stop())
        await asyncio.sleep(0)
        answer = await ask(server.url, "/readyz", method="GET")
        assert (answer.status, answer.json()["status"]) == (503, "draining")
        assert (await ask(server.url, "/livez", method="GET")).status == 200
        last = await kept.ask(CHAT, {"model": "m"})
        assert (last.status, last.header("connection")) == (200, "close")
        assert await kept.reader.read() == b""
        kept.close()
        assert (await ask(server.url, CHAT, {"model": "m"})).status == 200
        assert not stopping.done()
        await stopping
        with pytest.raises(ConnectionRefusedError):
            await Client.connect(server.url)


async def test_streams_may_end_and_idle_connections_may_not_wait() -> None:
    async with Engine(script=streaming(5, 0.05)) as engine:
        server = GatewayServer(fast_config(engine, shutdown={"drain_s": 2 * HANG_S}))
        await server.start()
        await until(lambda: server.registry.usable)
        idle = await Client.connect(server.url)
        await idle.ask("/livez", method="GET")
        stream = await opened(server.url)
        started = time.monotonic()
        stopping = asyncio.create_task(server.stop())
        assert await idle.reader.read() == b""
        assert (await rest(stream)).endswith(b"data: 4\n\ndata: [DONE]\n\n<end>")
        await stopping
        assert time.monotonic() - started < HANG_S, "no longer than the last stream"
        idle.close()
        stream.close()


async def test_what_is_left_after_the_drain_is_cut_and_not_passed_off_as_whole() -> None:
    async with Engine(script=streaming(1, 3600)) as engine:
        server = GatewayServer(fast_config(engine, shutdown={"drain_s": 0.2}))
        await server.start()
        await until(lambda: server.registry.usable)
        member = member_of(server, engine)
        stream = await opened(server.url)
        started = time.monotonic()
        await server.stop()
        assert 0.2 <= time.monotonic() - started < HANG_S
        assert b"<end>" not in await rest(stream)
        assert (member.state, member.load.requests) == (State.GONE, 0)
        await engine.wires[engine.received[-1].connection - 1].eof()
        stream.close()


async def test_an_admin_client_in_the_middle_of_a_request_does_not_hold_up_the_end() -> None:
    async with Engine() as engine:
        server = GatewayServer(fast_config(engine, admin={"enabled": True}, shutdown={"drain_s": 0.2}))
        await server.start()
        assert server.admin_url is not None
        client = await Client.connect(server.admin_url)
        client.writer.write(b"POST /admin/workers HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
        await client.writer.drain()
        assert (await ask(server.admin_url, "/livez", method="GET")).status == 200
        async with asyncio.timeout(HANG_S):
            await server.stop()
        client.close()


async def test_sigterm_under_traffic_costs_no_request() -> None:
    async with (
        Engine(script=streaming(15, 0.1)) as engine,
        serve(
            "--worker",
            engine.url,
            KVROUTE_SHUTDOWN__KEEP_SERVING_S="1",
            KVROUTE_SHUTDOWN__DRAIN_S="10",
            KVROUTE_HEALTH__INTERVAL_S="0.1",
        ) as serving,
    ):
        await until(lambda: any(event.get("state") == "ready" for event in serving.events))
        in_service = True
        endings: list[bytes] = []

        async def balancer() -> None:
            nonlocal in_service
            while (await ask(serving.url, "/readyz", method="GET")).status == 200:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            await asyncio.sleep(0.3)  # it takes a while until it is heard of everywhere
            in_service = False

        async def users() -> None:
            requests = []
            while in_service:
                requests.append(asyncio.create_task(one()))
                await asyncio.sleep(0.1)
            endings.extend(await asyncio.gather(*requests))

        async def one() -> bytes:
            client = await opened(serving.url)
            data = await rest(client)
            client.close()
            return data

        long_streams = [await opened(serving.url) for _ in range(5)]
        using, balancing = asyncio.create_task(users()), asyncio.create_task(balancer())
        await asyncio.sleep(0.2)
        serving.signal()
        endings.extend(await asyncio.gather(*(rest(stream) for stream in long_streams)))
        await asyncio.gather(using, balancing)
        assert await serving.exit_status() == 0
        assert len(endings) >= 8
        assert all(ending.endswith(b"data: 14\n\ndata: [DONE]\n\n<end>") for ending in endings)
        for stream in long_streams:
            stream.close()
    phases = [event["phase"] for event in serving.events if "phase" in event]
    assert phases == ["not ready", "drain", "close"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_cuts_the_phases_short(number: signal.Signals) -> None:
    async with (
        Engine(script=streaming(1, 3600)) as engine,
        serve("--worker", engine.url, KVROUTE_SHUTDOWN__KEEP_SERVING_S="60") as serving,
    ):
        await until(lambda: any(event.get("state") == "ready" for event in serving.events))
        stream = await opened(serving.url)
        serving.signal(number)
        await until(lambda: any(event.get("phase") == "not ready" for event in serving.events))
        assert (await ask(serving.url, "/readyz", method="GET")).status == 503
        serving.signal(number)
        assert await serving.exit_status() == 0
        assert b"<end>" not in await rest(stream)
        await engine.wires[engine.received[-1].connection - 1].eof()
        stream.close()
    assert any(event["event"] == "second signal: closing at once" for event in serving.events)
