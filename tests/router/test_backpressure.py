"""A slow reader slows its own engine, costs no memory and holds up nobody; one that stops is cut."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket

import pytest

from tests.kit import CHAT, Client, Engine, Received, Wire, ask, until
from tests.router.edge import edge, promptly, raw, resident_bytes

PIECE = os.urandom(2**16)
PIECES = 512  # 32 MiB: several times what the sockets in between can hold


class Torrent:
    """Sends 32 MiB as fast as they are taken."""

    def __init__(self) -> None:
        self.sent = 0
        self.ended = asyncio.Event()

    async def __call__(self, _request: Received, wire: Wire) -> None:
        try:
            await wire.start_stream()
            for _ in range(PIECES):
                await wire.chunk(PIECE)
                self.sent += 1
            await wire.chunk(b"")
        finally:
            self.ended.set()

    async def stalled(self) -> None:
        """Wait until nothing is taken any more."""
        before = -1
        while before != self.sent:
            before = self.sent
            await asyncio.sleep(0.1)


async def _narrow(url: str) -> Client:
    """A client whose socket and reader hold next to nothing."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**14)
    sock.setblocking(False)
    host, _, port = url.removeprefix("http://").rpartition(":")
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    return Client(*await asyncio.open_connection(sock=sock, limit=2**14))


async def _drain(client: Client) -> str:
    digest = hashlib.sha256()
    while data := await client.chunk():
        digest.update(data)
    return digest.hexdigest()


async def test_a_slow_reader_stalls_its_engine_and_nobody_else() -> None:
    script = Torrent()

    async def serve(request: Received, wire: Wire) -> None:
        await (wire.answer(200, b"quick") if request.target == "/quick" else script(request, wire))

    async with Engine(serve) as engine, edge(engine) as server:
        slow = await _narrow(server.url)
        resident = resident_bytes()
        await slow.send(CHAT, {"model": "m", "stream": True})
        await slow.head()
        await script.stalled()
        assert script.sent < PIECES // 2, "the rest is still with the engine"
        assert resident_bytes() - resident < 8 * 2**20
        for _ in range(10):
            assert (await ask(server.url, "/quick", b"{}")).body == b"quick"
        assert await _drain(slow) == hashlib.sha256(PIECE * PIECES).hexdigest()
        slow.close()


async def test_a_reader_that_stops_is_cut_and_its_engine_freed() -> None:
    script = Torrent()
    async with Engine(script) as engine, edge(engine, timeouts={"client_stall_s": 0.3}) as server:
        client = await _narrow(server.url)
        await client.send(CHAT, {"model": "m", "stream": True})
        await client.head()
        await script.stalled()
        await until(lambda: not server.state.connections)
        await promptly(script.ended)
        assert server.metrics.disconnects.value("streaming") == 1
        client.abort()


async def test_reading_on_in_time_is_enough() -> None:
    script = Torrent()
    async with Engine(script) as engine, edge(engine, timeouts={"client_stall_s": 0.5}) as server:
        client = await _narrow(server.url)
        await client.send(CHAT, {"model": "m", "stream": True})
        await client.head()
        for _ in range(5):
            taken = 0
            while taken < 2**21:
                taken += len(await client.chunk())
            await asyncio.sleep(0.2)
        assert len(server.state.connections) == 1
        assert not script.ended.is_set()
        client.abort()


async def test_an_engine_made_to_wait_is_not_idle() -> None:
    script = Torrent()
    async with Engine(script) as engine, edge(engine, timeouts={"idle_s": 0.2}) as server:
        client = await _narrow(server.url)
        await client.send(CHAT, {"model": "m", "stream": True})
        await client.head()
        await script.stalled()
        await asyncio.sleep(0.4)
        assert await _drain(client) == hashlib.sha256(PIECE * PIECES).hexdigest()
        client.close()


@pytest.mark.parametrize("then", ["nothing", "the next request", "the last request"])
async def test_a_reader_that_stops_after_the_engine_has_ended_is_cut(then: str) -> None:
    """The gateway holds the rest of a response, and so little of it that no engine had to be paused."""

    async def script(_request: Received, wire: Wire) -> None:
        await wire.answer(200, bytes(2**14))

    limits = {"client_stall_s": 0.3, "client_idle_s": 0.3}
    async with Engine(script) as engine, edge(engine, timeouts=limits) as server:
        client = await _narrow(server.url)
        client.reader._transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: len(server.state.connections) == 1)
        (connection,) = server.state.connections
        sock = connection.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**14)
        while not connection.transport.get_write_buffer_size():
            before = len(engine.received)
            await client.send(CHAT, b"{}")
            await until(lambda count=before: len(engine.received) > count and connection._task is None)  # type: ignore[misc]
        if then != "nothing":
            await client.send(CHAT, b"{}", *(["Connection: close"] if then == "the last request" else []))
        await until(lambda: not server.state.connections)
        client.abort()


async def test_a_reader_that_stops_with_the_next_response_waiting_is_cut() -> None:
    script = Torrent()
    async with Engine(script) as engine, edge(engine, timeouts={"client_stall_s": 0.3}) as server:
        client = await _narrow(server.url)
        client.reader._transport.pause_reading()  # type: ignore[attr-defined]

        async def serve(request: Received, wire: Wire) -> None:
            await (wire.answer(200, bytes(2**22)) if request.target == "/big" else script(request, wire))

        engine.script = serve
        await client.send("/big", b"{}")
        await client.send(CHAT, {"model": "m"})
        await until(lambda: not server.state.connections)
        client.abort()


async def test_pipelined_answers_do_not_pile_up_before_a_client_that_does_not_read() -> None:
    """Each answer fits one read, so no upstream is there to be paused: the next request has to wait."""
    script = raw(b"HTTP/1.1 200 OK\r\ncontent-length: 30000\r\n\r\n" + bytes(30_000))
    async with Engine(script) as engine, edge(engine) as server:
        client = await _narrow(server.url)
        client.reader._transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: len(server.state.connections) == 1)
        (connection,) = server.state.connections
        sock = connection.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**14)
        for _ in range(16):
            await client.send(CHAT, {"model": "m"})
        await until(lambda: len(engine.received) >= 2)
        await asyncio.sleep(0.5)  # time in which nothing more may come
        assert connection.transport.get_write_buffer_size() < 200_000
        client.reader._transport.resume_reading()  # type: ignore[attr-defined]
        for _ in range(16):
            assert len((await client.receive()).body) == 30_000
        client.close()
