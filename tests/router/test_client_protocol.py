"""Requests that arrive in other ways than one plain message after another."""

from __future__ import annotations

import asyncio

import pytest

from tests.kit import Client, Engine, Received, Wire, until
from tests.router.edge import edge


async def test_a_chunked_request_is_forwarded_with_its_length_and_without_its_trailers() -> None:
    async with Engine() as engine, edge(engine) as server:
        client = await Client.connect(server.url)
        client.writer.write(
            b"POST /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\nTrailer: X-T\r\n\r\n"
            b"3;ext=1\r\nabc\r\nA\r\n0123456789\r\n0\r\nX-T: 1\r\nAuthorization: Bearer z\r\n\r\n"
        )
        assert (await client.receive()).status == 200
        client.close()
        assert engine.received[0].body == b"abc0123456789"
        assert engine.received[0].header("content-length") == "13"
        assert len(engine.received[0].headers) == 3, "Host, X-Request-Id, Content-Length"


async def test_an_expectation_is_answered_by_the_gateway() -> None:
    async with Engine() as engine, edge(engine, limits={"body_bytes": 10}) as server:
        client = await Client.connect(server.url)
        client.writer.write(b"POST /x HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n")
        assert (await client.head())[0] == 100
        client.writer.write(b"12345")
        assert (await client.receive()).status == 200
        assert engine.received[0].body == b"12345"
        assert engine.received[0].header("expect") is None
        client.writer.write(b"POST /x HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 11\r\n\r\n")
        assert (await client.head())[0] == 413
        client.close()


@pytest.mark.parametrize(
    "framing", [b"Content-Length: 2\r\n\r\n{}", b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"]
)
@pytest.mark.parametrize("pieces", [True, False])
async def test_a_declined_upgrade_does_not_lose_the_body(framing: bytes, pieces: bool) -> None:
    head = (
        b"POST /x HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n"
    )
    async with Engine() as engine, edge(engine) as server:
        client = await Client.connect(server.url)
        for piece in (head[:40], head[40:] + framing[:20], framing[20:]) if pieces else (head + framing,):
            client.writer.write(piece)
            await asyncio.sleep(0.01)
        assert (await client.receive()).status == 200
        assert engine.received[0].body == b"{}"
        assert len(engine.received[0].headers) == 3, "Host, X-Request-Id, Content-Length"
        assert (await client.ask("/y", b"again")).status == 200, "the connection goes on"
        client.close()


async def test_pipelined_requests_are_answered_in_order() -> None:
    async def script(request: Received, wire: Wire) -> None:
        await wire.answer(200, request.body)

    async with Engine(script) as engine, edge(engine) as server:
        client = await Client.connect(server.url)
        for number in range(10):
            await client.send("/x", b"%d" % number)
        assert [(await client.receive()).body for _ in range(10)] == [b"%d" % number for number in range(10)]
        client.close()


async def test_too_many_pipelined_requests_are_refused_after_those_taken() -> None:
    released = asyncio.Event()

    async def script(request: Received, wire: Wire) -> None:
        await released.wait()
        await wire.answer(200, request.body)

    async with Engine(script) as engine, edge(engine) as server:
        client = await Client.connect(server.url)
        for number in range(20):
            await client.send("/x", b"%d" % number)
        await until(lambda: server.state.buffered_bytes == len("0123456789") + 2 * len("0123456"))
        released.set()
        answers = [await client.receive() for _ in range(18)]
        assert [answer.body for answer in answers[:17]] == [b"%d" % number for number in range(17)]
        assert (answers[17].status, answers[17].code) == (429, "overloaded")
        assert await client.reader.read() == b""
        client.close()


async def test_a_client_of_http_1_0() -> None:
    async with Engine() as engine, edge(engine) as server:
        client = await Client.connect(server.url)
        client.writer.write(b"GET /x HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        answer = await client.receive()
        assert (answer.status, answer.body, answer.header("connection")) == (200, b'{"ok":true}', "close")
        assert await client.reader.read() == b""
        client.close()
