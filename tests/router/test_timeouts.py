"""Every phase has its own time limit, status and code."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator

import pytest

from tests.kit import CHAT, Client, Engine, Received, Script, Wire, ask, until
from tests.router.edge import EVENTS, PROMPTLY_S, Lasting, edge, first_chunk, promptly, raw

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@contextlib.contextmanager
def deaf(port: int) -> Iterator[None]:
    """A port whose queue of connections is full, so that a connect gets no answer."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(0)
        for _ in range(4):
            queued = stack.enter_context(socket.socket())
            queued.setblocking(False)
            queued.connect_ex(("127.0.0.1", port))
        yield


async def test_a_connect_that_is_not_answered() -> None:
    async with Engine() as engine:
        options = {"timeouts": {"connect_s": 0.2}, "health": {"interval_s": 60, "models_interval_s": 60}}
        async with edge(engine, **options) as server:
            await engine.stop()
            with deaf(engine.port):
                started = time.monotonic()
                answer = await ask(server.url, CHAT, b"{}")
                assert (answer.status, answer.code) == (504, "connect_timeout")
                assert 0.2 <= time.monotonic() - started < PROMPTLY_S


async def test_a_client_may_leave_while_its_worker_is_being_connected() -> None:
    limits = {"connect_s": 60}
    async with Engine() as engine, edge(engine, health={"interval_s": 60}, timeouts=limits) as server:
        await engine.stop()
        with deaf(engine.port):
            client = await Client.connect(server.url)
            await client.send(CHAT, b"{}")
            await until(lambda: sum(m.load.requests for m in server.registry.members.values()) == 1)
            client.abort()
            await until(lambda: sum(m.load.requests for m in server.registry.members.values()) == 0)


async def test_a_connect_that_is_refused() -> None:
    async with Engine() as engine, edge(engine, health={"interval_s": 60}) as server:
        await engine.stop()
        answer = await ask(server.url, CHAT, b"{}")
        assert (answer.status, answer.code) == (502, "connect_refused")


@pytest.mark.parametrize(
    ("script", "upstream_status"),
    [
        (Lasting(), None),
        (raw(HEAD), 200),
        (raw(b"HTTP/1.1 100 Continue\r\n\r\n"), 100),
        (raw(b"HTTP/1.1 200 OK\r\nContent-"), None),
    ],
)
@pytest.mark.parametrize(
    ("timeouts", "code", "message"),
    [
        (
            {"first_byte_s": 0.2},
            "first_byte_timeout",
            "worker sent no body byte within timeouts.first_byte_s",
        ),
        ({"total_s": 0.2}, "total_timeout", "timeouts.total_s passed"),
    ],
)
async def test_no_first_byte_in_time(
    script: Script, upstream_status: int | None, timeouts: dict[str, float], code: str, message: str
) -> None:
    async with Engine(script) as engine, edge(engine, timeouts=timeouts) as server:
        started = time.monotonic()
        answer = await ask(server.url, CHAT, {"model": "m", "stream": True})
        assert 0.2 <= time.monotonic() - started < PROMPTLY_S
        error = answer.json()["error"]
        assert (answer.status, error["code"], error["type"]) == (504, code, "timeout_error")
        assert error["message"] == message
        assert error.get("upstream_status") == upstream_status
        engine.script = raw(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        assert (await ask(server.url, CHAT, b"{}")).status == 200


async def test_a_plain_body_that_stalls_is_broken_off() -> None:
    async def script(_request: Received, wire: Wire) -> None:
        await wire.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
        await wire.eof()

    async with Engine(script) as engine, edge(engine, timeouts={"idle_s": 0.2}) as server:
        answer = await ask(server.url, CHAT, b"{}")
        assert (answer.status, answer.body, answer.complete) == (200, b"half", False)
        assert server.metrics.upstream_errors.value(engine.url, "idle_timeout") == 1


async def test_a_body_that_keeps_coming_is_not_idle() -> None:
    async def script(_request: Received, wire: Wire) -> None:
        await wire.start_stream()
        for piece in EVENTS * 5:
            await wire.chunk(piece)
            await asyncio.sleep(0.05)
        await wire.chunk(b"")

    async with Engine(script) as engine, edge(engine, timeouts={"idle_s": 1.0}) as server:
        answer = await ask(server.url, CHAT, b"{}")
        assert (answer.body, answer.complete) == (b"".join(EVENTS * 5), True)


async def test_a_hung_engine_holds_up_only_its_own_requests() -> None:
    hung = Lasting()
    async with Engine(hung) as bad, Engine() as good, edge(bad, good) as server:
        asking = [asyncio.ensure_future(ask(server.url, CHAT, b"{}")) for _ in range(20)]
        await until(lambda: sum(task.done() for task in asking) == 10)
        assert (await asyncio.wait_for(ask(server.url, "/livez", method="GET"), PROMPTLY_S)).status == 200
        done, waiting = await asyncio.wait(asking, timeout=0)
        assert len(done) == len(good.received) == 10
        assert {task.result().status for task in done} == {200}
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


# --- the client's side -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "part", [b"G", b"GET /x HTTP/1.1\r\nHost:", b"POST /x HTTP/1.1\r\nContent-Length: 10\r\n\r\n12345"]
)
async def test_a_request_that_does_not_arrive_in_time(part: bytes) -> None:
    async with Engine() as engine, edge(engine, timeouts={"request_s": 0.2}) as server:
        client = await Client.connect(server.url)
        client.writer.write(part)
        answer = await asyncio.wait_for(client.receive(), PROMPTLY_S)
        assert (answer.status, answer.code) == (408, "request_timeout")
        assert answer.json()["error"]["message"] == "request did not arrive in 0.2 s"
        assert answer.header("connection") == "close"
        assert server.state.buffered_bytes == 0
        client.close()
        assert (await ask(server.url, CHAT, b"{}")).status == 200


async def test_dripping_bytes_does_not_extend_the_time_of_a_request() -> None:
    async with Engine() as engine, edge(engine, timeouts={"request_s": 0.3}) as server:
        client = await Client.connect(server.url)
        client.writer.write(b"POST /x HTTP/1.1\r\nContent-Length: 1000\r\n\r\n")
        answering = asyncio.ensure_future(client.receive())
        started = time.monotonic()
        while not answering.done():
            client.writer.write(b"x")
            await asyncio.wait([answering], timeout=0.05)
        assert answering.result().status == 408
        assert 0.3 <= time.monotonic() - started < PROMPTLY_S
        client.close()


@pytest.mark.parametrize("requests", [0, 1])
async def test_an_idle_connection_of_a_client_is_closed_without_a_word(requests: int) -> None:
    async with Engine() as engine, edge(engine, timeouts={"client_idle_s": 0.2}) as server:
        client = await Client.connect(server.url)
        for _ in range(requests):
            assert (await client.ask(CHAT, b"{}")).status == 200
        assert await asyncio.wait_for(client.reader.read(), PROMPTLY_S) == b""
        client.close()
        await until(lambda: not server.state.connections)


async def test_a_connection_waiting_for_a_slow_answer_is_not_idle() -> None:
    script = Lasting(EVENTS[0])
    limits = {"client_idle_s": 0.1, "request_s": 0.1, "client_stall_s": 0.1}
    async with Engine(script) as engine, edge(engine, timeouts=limits) as server:
        client = await first_chunk(server, CHAT, {"model": "m", "stream": True})
        await asyncio.sleep(0.4)
        await script.wire.chunk(EVENTS[1])
        assert await client.chunk() == EVENTS[1]
        client.abort()
        await promptly(script.left)
