"""Responses as engines write them, well and badly: what a client gets of them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from asyncio import AbstractEventLoop
from collections.abc import Callable

import pytest
import uvloop

from kvroute.router.server import url_of
from tests.kit import CHAT, HANG_S, Client, Engine, Received, Wire, ask, gateway, until
from tests.router.edge import edge, raw

OK = b"HTTP/1.1 200 OK\r\n"
PLAIN = OK + b"Content-Length: 2\r\n\r\nhi"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n"
SILENT = {"decision_headers": False}


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (PLAIN, "OK"),
        (CHUNKED + b"\r\n", "OK"),
        (b"HTTP/1.1 200\r\nContent-Length: 2\r\n\r\nhi", ""),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nhi", "OK"),
        (b"HTTP/1.1 100 Continue\r\nX-Interim: 1\r\n\r\n" + PLAIN, "OK"),
        (b"HTTP/1.1 103 Early Hints\r\nLink: 1\r\n\r\n" * 3 + PLAIN, "OK"),
        (OK + b"Upgrade: h2c\r\nConnection: Upgrade\r\nContent-Length: 2\r\n\r\nhi", "OK"),
        # What follows a response is not part of it: another one, trailers, an empty line, garbage.
        (PLAIN + b"HTTP/1.1 404 Not Found\r\nX-Evil: 1\r\nContent-Length: 0\r\n\r\n", "OK"),
        (CHUNKED + b"X-Trailer: 1\r\n\r\n", "OK"),
        (PLAIN + b"\r\n", "OK"),
        (PLAIN + b"garbage", "OK"),
        (OK + b"Connection: close\r\nContent-Length: 2\r\n\r\nhi" + b"garbage", "OK"),
    ],
)
async def test_a_response_is_relayed_and_nothing_around_it(sent: bytes, reason: str) -> None:
    async with Engine(raw(sent)) as engine, edge(engine, **SILENT) as server:
        client = await Client.connect(server.url)
        answer = await client.ask("/x", b"{}")
        framing = ("transfer-encoding", "chunked") if b"chunked" in sent else ("Content-Length", "2")
        assert (answer.status, answer.headers, answer.body) == (200, [framing], b"hi")
        assert answer.raw.startswith(f"HTTP/1.1 200 {reason}\r\n".encode())
        engine.script = raw(CHUNKED + b"\r\n")
        assert (await client.ask("/y", b"{}")).body == b"hi"
        client.close()


@pytest.mark.parametrize("pieces", [(), (b"hi",), (b"hi", b" again")])
async def test_a_response_that_ends_with_the_connection(pieces: tuple[bytes, ...]) -> None:
    async def script(_request: Received, wire: Wire) -> None:
        await wire.send(OK + b"\r\n")
        for piece in pieces:
            await wire.send(piece)
            await asyncio.sleep(0.01)
        wire.close()

    async with Engine(script) as engine, edge(engine) as server:
        client = await Client.connect(server.url)
        for _ in range(2):
            answer = await client.ask("/x", b"{}")
            assert (answer.status, answer.body, answer.complete) == (200, b"".join(pieces), True)
            assert answer.header("transfer-encoding") == "chunked"
        client.close()


@pytest.mark.parametrize(
    ("sent", "code", "message"),
    [
        (b"SSH-2.0-OpenSSH\r\n", "bad_upstream_response", "Expected HTTP/"),
        (OK + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nhi", "bad_upstream_response", "Duplicate"),
        (OK + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n", "bad_upstream_response", "present"),
        (OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n", "bad_upstream_response", "transfer coding"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", "bad_upstream_response", "chunk size"),
        (OK + b"X-A: a\r\n b\r\n\r\n", "bad_upstream_response", "whitespace"),
        (OK + b"X-A: a\x00b\r\n\r\n", "bad_upstream_response", "Invalid header value"),
        (
            b"HTTP/1.1 101 Switching\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n",
            "bad_upstream_response",
            "101",
        ),
        (b"HTTP/1.1 000 Zero\r\nContent-Length: 2\r\n\r\nhi", "bad_upstream_response", "status 0"),
        (OK + b"X-Endless: " + b"a" * 600_000, "bad_upstream_response", "262144 bytes of head"),
    ],
    ids=lambda value: repr(value[:40]),
)
async def test_what_is_no_response_is_a_502(sent: bytes, code: str, message: str) -> None:
    async with Engine(raw(sent)) as engine, edge(engine) as server:
        answer = await ask(server.url, CHAT, b"{}")
        assert (answer.status, answer.code) == (502, code)
        assert message in answer.json()["error"]["message"]
        assert server.metrics.upstream_errors.value(engine.url, code) == 1


@pytest.mark.parametrize(
    ("sent", "code", "upstream_status"),
    [
        (b"", "upstream_reset", None),
        (OK + b"Content-", "upstream_reset", None),
        (OK + b"Content-Length: 2\r\n\r\n", "upstream_died", 200),
        (b"HTTP/1.1 500 X\r\nTransfer-Encoding: chunked\r\n\r\n", "upstream_died", 500),
        (b"HTTP/1.1 100 Continue\r\n\r\n", "upstream_died", 100),
    ],
)
async def test_an_engine_that_closes_before_its_first_byte(
    sent: bytes, code: str, upstream_status: int | None
) -> None:
    async with Engine(raw(sent, close=True)) as engine, edge(engine) as server:
        answer = await ask(server.url, CHAT, b"{}")
        assert (answer.status, answer.code) == (502, code)
        assert answer.json()["error"].get("upstream_status") == upstream_status
        assert answer.json()["error"]["type"] == "upstream_error"


async def test_a_large_head_within_the_limit_passes() -> None:
    sent = OK + b"X-A: " + b"a" * 100_000 + b"\r\nContent-Length: 2\r\n\r\nhi"
    async with Engine(raw(sent)) as engine, edge(engine) as server:
        answer = await ask(server.url, CHAT, b"{}")
        assert (answer.status, len(answer.header("x-a") or "")) == (200, 100_000)


@pytest.mark.parametrize("size", [1, 5])
async def test_a_head_may_come_in_any_pieces(size: int) -> None:
    sent = b"HTTP/1.1 103 Hints\r\nLink: 1\r\n\r\n" + CHUNKED + b"\r\n"

    async def script(_request: Received, wire: Wire) -> None:
        for at in range(0, len(sent), size):
            await wire.send(sent[at : at + size])
            await asyncio.sleep(0)

    async with Engine(script) as engine, edge(engine) as server:
        for _ in range(3):
            assert (await ask(server.url, CHAT, b"{}")).body == b"hi"
        assert engine.received[-1].connection == engine.received[0].connection


async def test_an_answer_that_does_not_wait_for_the_request_body() -> None:
    """The engine reads nothing of a body that no socket buffer can hold."""
    connections: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        head = await reader.readuntil(b"\r\n\r\n")
        body = b'{"data":[{"id":"m"}]}' if head.startswith(b"GET") else b"no"
        status = b"200 OK" if head.startswith(b"GET") else b"413 Too Large"
        writer.write(b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))
        if head.startswith(b"GET"):
            writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0, limit=2**16)
    url = url_of(listener.sockets[0])
    async with edge(workers=[url], ready=False) as server:
        await until(lambda: all(m.state.value == "ready" for m in server.registry.members.values()))
        answer = await ask(server.url, CHAT, b'{"a":"' + b"x" * 2**24 + b'"}')
        assert (answer.status, answer.body) == (413, b"no")
        for writer in connections:
            writer.transport.abort()
    listener.close()


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_connect_that_is_given_up_leaves_nothing(loop_factory: Callable[[], AbstractEventLoop]) -> None:
    async def scenario() -> None:
        async with Engine() as engine, edge(engine) as server:
            (member,) = server.registry.members.values()
            for number in range(60):
                connecting = asyncio.ensure_future(member.pool.connect())
                for _ in range(number % 6):
                    await asyncio.sleep(0)
                await asyncio.sleep(number % 5 * 1e-4)
                connecting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    (await connecting).close()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(scenario())


async def test_a_connection_with_an_upload_left_on_it_is_not_kept() -> None:
    """An engine that answers 413 before it has read the body leaves the rest of it in our write buffer."""

    over = asyncio.Event()

    async def early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"GET /" in head:
            cards = b'{"data":[{"id":"m"}]}'
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(cards), cards))
        else:
            writer.write(b"HTTP/1.1 413 X\r\ncontent-length: 2\r\n\r\n{}")
            await writer.drain()
            await over.wait()  # neither reads on nor closes
        writer.close()

    listener = await asyncio.start_server(early, "127.0.0.1", 0, limit=2**16)
    url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    quiet = {"interval_s": 60, "metrics_interval_s": 60}  # a probe would take the connection, and end it
    limits = {"first_byte_s": 2 * HANG_S}
    async with (
        listener,
        gateway(ready=False, workers=[url], timeouts=limits, health=quiet) as server,
    ):
        (member,) = server.registry.members.values()
        await until(lambda: member.state == "ready")
        for _ in range(2):
            started = time.monotonic()
            answer = await ask(server.url, CHAT, {"model": "m", "prompt": "x" * 32_000_000})
            assert (answer.status, answer.body) == (413, b"{}")
            assert time.monotonic() - started < HANG_S
        over.set()


async def test_a_worker_that_calls_its_length_hop_by_hop_does_not_unframe_its_answer() -> None:
    head = b"HTTP/1.1 200 OK\r\nconnection: content-length, x-a\r\nx-a: 1\r\ncontent-length: 2\r\n\r\n"
    script = raw(head + b"ok")
    async with Engine(script) as engine, edge(engine) as server:
        client = await Client.connect(server.url)
        for _ in range(2):
            answer = await client.ask(CHAT, {"model": "m"})
            assert (answer.status, answer.body, answer.header("x-a")) == (200, b"ok", None)
        client.close()


async def test_trailers_without_end_are_cut() -> None:
    async def flood(_request: Received, wire: Wire) -> None:
        await wire.start_stream()
        await wire.chunk(b"data: 1\n\n")
        await wire.send(b"0\r\n")
        for _ in range(200):
            await wire.send(b"x-t: " + b"a" * 8000 + b"\r\n")

    async with Engine(flood) as engine, edge(engine, timeouts={"idle_s": 2}) as server:
        answer = await ask(server.url, CHAT, {"model": "m", "stream": True})
        assert answer.body.startswith(b"data: 1\n\n")
        assert b"bad_upstream_response" in answer.body
