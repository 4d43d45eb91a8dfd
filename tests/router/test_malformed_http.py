"""No HTTP request, or one that two servers could read in two ways: refused, never forwarded."""

from __future__ import annotations

import asyncio

import pytest

from tests.kit import CHAT, Client, Engine, ask, until
from tests.router.edge import EVENTS, Lasting, edge, promptly

POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
# A request inside the first one's body, for a server that reads the framing the other way.
HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: g\r\n\r\n"

SHAPES = {
    "length and chunks": POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "chunks and length": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n" + HIDDEN,
    "two lengths": POST + b"Content-Length: 2\r\nContent-Length: 40\r\n\r\n{}" + HIDDEN,
    "one length twice": POST + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
    "a list of lengths": POST + b"Content-Length: 2, 2\r\n\r\n{}",
    "a negative length": POST + b"Content-Length: -2\r\n\r\n{}",
    "a signed length": POST + b"Content-Length: +2\r\n\r\n{}",
    "a hexadecimal length": POST + b"Content-Length: 0x2\r\n\r\n{}",
    "a length that overflows": POST + b"Content-Length: 99999999999999999999999\r\n\r\n{}",
    "an empty length": POST + b"Content-Length: \r\n\r\n{}",
    "a space before the colon": POST + b"Content-Length : 2\r\n\r\n{}",
    "a chunk size of letters": CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n",
    "a negative chunk size": CHUNKED + b"-2\r\n{}\r\n0\r\n\r\n",
    "a chunk size with 0x": CHUNKED + b"0x2\r\n{}\r\n0\r\n\r\n",
    "a chunk size that overflows": CHUNKED + b"fffffffffffffffff\r\n{}\r\n0\r\n\r\n",
    "a chunk longer than its size": CHUNKED + b"2\r\n{}X\r\n0\r\n\r\n",
    "a chunk size ended by LF": CHUNKED + b"2\n{}\r\n0\r\n\r\n",
    "an unknown coding": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "two codings": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "chunked and identity": POST
    + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    "a vertical tab": POST + b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
    "a folded header": POST + b"X-A: a\r\n b\r\nContent-Length: 2\r\n\r\n{}",
    "NUL in a value": POST + b"X-A: a\x00b\r\nContent-Length: 2\r\n\r\n{}",
    "NUL in a name": POST + b"X\x00A: b\r\nContent-Length: 2\r\n\r\n{}",
    "CR in a value": POST + b"X-A: a\rX-B: b\r\nContent-Length: 2\r\n\r\n{}",
    "LF line ends": b"POST /x HTTP/1.1\nHost: g\nContent-Length: 2\n\n{}",
    "a line without colon": POST + b"XA\r\nContent-Length: 2\r\n\r\n{}",
    "an empty name": POST + b": a\r\nContent-Length: 2\r\n\r\n{}",
    "an unknown method": b"FOO /x HTTP/1.1\r\nHost: g\r\n\r\n",
    "a method in lower case": b"get /x HTTP/1.1\r\nHost: g\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": bytes.fromhex("16030100f8010000f40303") + bytes(40),
    "HTTP/9.9": b"GET /x HTTP/9.9\r\nHost: g\r\n\r\n",
    "NUL in the target": b"GET /x\x00y HTTP/1.1\r\nHost: g\r\n\r\n",
    "a space in the target": b"GET /x y HTTP/1.1\r\nHost: g\r\n\r\n",
    "a target without slash": b"GET x HTTP/1.1\r\nHost: g\r\n\r\n",
    "* for GET": b"GET * HTTP/1.1\r\nHost: g\r\n\r\n",
    "another scheme": b"GET ftp://a/x HTTP/1.1\r\nHost: g\r\n\r\n",
    "CONNECT": b"CONNECT a:443 HTTP/1.1\r\nHost: g\r\n\r\n",
    "garbage": bytes(range(256)) * 4,
}


@pytest.mark.parametrize("data", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("pieces", [1, 0], ids=["whole", "byte by byte"])
async def test_is_refused_closed_and_forgotten(data: bytes, pieces: int) -> None:
    async with Engine() as engine, edge(engine) as server:
        client = await Client.connect(server.url)
        for at in range(0, len(data), len(data) if pieces else 1):
            client.writer.write(data[at : at + (len(data) if pieces else 1)])
            await asyncio.sleep(0)
        answer = await client.receive()
        error = answer.json()["error"]
        assert answer.status == 400
        assert (error["type"], error["code"]) == ("invalid_request_error", "malformed_request")
        assert error["message"]
        assert answer.header("connection") == "close"
        assert await client.reader.read() == b"", "one answer, then the end"
        client.close()
        assert engine.received == [], "nothing of it reaches an engine"
        assert (await ask(server.url, CHAT, {"model": "m"})).status == 200


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (SHAPES["length and chunks"], "Transfer-Encoding can't be present with Content-Length"),
        (SHAPES["two lengths"], "Duplicate Content-Length"),
        (SHAPES["an unknown method"], "Invalid method encountered"),
        (SHAPES["two codings"], "the only transfer coding accepted in a request is chunked"),
        (SHAPES["another scheme"], "request target must be a path or an http URL"),
        (SHAPES["CONNECT"], "CONNECT is not accepted"),
    ],
)
async def test_the_answer_says_what_is_wrong(data: bytes, message: str) -> None:
    async with Engine() as engine, edge(engine) as server:
        client = await Client.connect(server.url)
        client.writer.write(data)
        answer = await client.receive()
        client.close()
        assert message in answer.json()["error"]["message"]


async def test_a_good_request_is_answered_before_the_bad_one_behind_it() -> None:
    script = Lasting()
    async with Engine(script) as engine, edge(engine) as server:
        client = await Client.connect(server.url)
        await client.send(CHAT, {"model": "m"})
        await promptly(script.begun)
        client.writer.write(b"BAD\r\n\r\n" + HIDDEN)
        await script.wire.answer(200, b"good")
        assert (await client.receive()).body == b"good"
        assert (await client.receive()).status == 400
        assert await client.reader.read() == b""
        client.close()
        assert len(engine.received) == 1


async def test_nothing_piles_up_behind_a_refusal() -> None:
    script = Lasting(EVENTS[0])
    async with Engine(script) as engine, edge(engine, limits={"body_bytes": 1000}) as server:
        client = await Client.connect(server.url)
        await client.send(CHAT, {"model": "m", "stream": True})
        await promptly(script.begun)
        client.writer.write(POST + b"Content-Length: 2000\r\n\r\n" + bytes(2000) + HIDDEN * 50_000)
        await client.writer.drain()
        (connection,) = server.state.connections
        await until(lambda: connection._requests.error is not None)
        await asyncio.sleep(0.05)
        assert len(connection._requests._headers) < 10
        await script.wire.chunk(b"")
        assert (await client.receive()).body == EVENTS[0]
        assert (await client.receive()).code == "body_too_large"
        client.close()


async def test_half_a_request_does_not_hold_up_others() -> None:
    async with Engine() as engine, edge(engine) as server:
        halves = [await Client.connect(server.url) for _ in range(20)]
        for client in halves:
            client.writer.write(POST + b"Content-Length: 10\r\n\r\n{")
        await until(lambda: server.state.buffered_bytes == 20)
        assert (await ask(server.url, CHAT, {"model": "m"})).status == 200
        for client in halves:
            client.abort()
