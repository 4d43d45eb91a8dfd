"""Requests that are well-formed HTTP and still no good: exact answers, and the process goes on."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import AsyncIterator

import pytest

from kvroute.router import client as client_side
from kvroute.router.server import GatewayServer
from tests.kit import CHAT, Answer, Client, Engine, ask, until
from tests.router.edge import edge

NOT_JSON = "the body is not valid JSON: "
DEEP = b'{"model":' * 100_000
OBJECT = "a JSON object is expected"


async def _usable(server: GatewayServer) -> None:
    answer = await ask(server.url, CHAT, {"model": "m"})
    assert (answer.status, answer.body) == (200, b'{"ok":true}')


async def _refused(body: bytes, status: int, message: str, param: str | None = None) -> None:
    async with Engine() as engine, edge(engine) as server:
        client = await Client.connect(server.url)
        answer = await client.ask(CHAT, body)
        error = answer.json()["error"]
        assert answer.status == status
        assert error["message"].startswith(message), error
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert engine.received == []
        assert (await client.ask(CHAT, {"model": "m"})).status == 200, "the connection stays usable"
        client.close()
        await _usable(server)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", NOT_JSON),
        (b'{"model": "m",}', NOT_JSON),
        (b"model=m", NOT_JSON),
        (b'{"model": "\xff\xfe"}', NOT_JSON),
        (b"\x00\x01\x02", NOT_JSON),
        (b'{"model": ' + b"9" * 5000 + b"}", NOT_JSON),
        (b'{"model": "m"} trailing', NOT_JSON),
        (DEEP, "the body is nested too deeply; " + OBJECT),
        (b"[]", "the body is an array; " + OBJECT),
        (b"null", "the body is null; " + OBJECT),
        (b'"text"', "the body is a string; " + OBJECT),
        (b"1", "the body is a number; " + OBJECT),
        (b"x" * 300_000, NOT_JSON),  # parsed in a thread
    ],
    ids=lambda value: repr(value[:24]),
)
async def test_a_body_that_is_no_json_object(body: bytes, message: str) -> None:
    await _refused(body, 400, message)


@pytest.mark.parametrize(
    ("model", "kind"),
    [(1, "a number"), (True, "a boolean"), ([], "an array"), ({}, "an object")],
)
async def test_a_model_of_another_type(model: object, kind: str) -> None:
    body = json.dumps({"model": model}).encode()
    await _refused(body, 400, f"model is {kind}; a string is expected", "model")


async def test_a_model_nobody_serves() -> None:
    await _refused(b'{"model":"x"}', 404, "The model `x` does not exist. Known models: m", "model")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b'{"model":null}',
        b'{"model":"m","messages":"x","n":"many","stream":[],"tools":0}',
        b'{"model":"m","messages":[1,null,{"role":2,"content":{"a":[]}}]}',
        b'{"model":"m","a":NaN,"b":1e999,"c":"\\ud800","model":"m"}',
        '{"model":"m","näme":"🏔"}'.encode("utf-16"),
    ],
)
async def test_what_can_be_routed_is_left_to_the_engine(body: bytes) -> None:
    async with Engine() as engine, edge(engine) as server:
        assert (await ask(server.url, CHAT, body)).status == 200
        assert engine.received[0].body == body


# --- sizes -------------------------------------------------------------------------------------


async def _upload(server: GatewayServer, pieces: AsyncIterator[bytes], *headers: str) -> Answer:
    """Write everything, as a simple client does, and only then look at the answer."""
    client = await Client.connect(server.url)
    head = "\r\n".join(["POST /v1/chat/completions HTTP/1.1", "Host: g", *headers, "", ""])
    client.writer.write(head.encode())
    async for piece in pieces:
        client.writer.write(piece)
        await client.writer.drain()
    answer = await client.receive()
    assert await client.reader.read() == b""
    client.close()
    return answer


async def _pieces(piece: bytes, count: int, pause_s: float = 0.0) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield piece
        await asyncio.sleep(pause_s)


async def test_a_body_of_100_mb_is_refused_and_the_client_gets_to_know() -> None:
    async with Engine() as engine, edge(engine) as server:
        answer = await _upload(server, _pieces(b"x" * 10**6, 100), "Content-Length: 100000000")
        assert (answer.status, answer.code) == (413, "body_too_large")
        assert answer.json()["error"]["message"] == "request body is over 67108864 bytes (limits.body_bytes)"
        assert answer.header("connection") == "close"
        assert server.state.buffered_bytes == 0
        assert engine.received == []
        await _usable(server)


async def test_a_chunked_body_over_the_limit_is_refused() -> None:
    async with Engine() as engine, edge(engine, limits={"body_bytes": 10**6}) as server:
        chunk = b"186a0\r\n" + b"x" * 10**5 + b"\r\n"
        answer = await _upload(server, _pieces(chunk, 40), "Transfer-Encoding: chunked")
        assert (answer.status, answer.code) == (413, "body_too_large")
        await _usable(server)


async def test_a_slow_upload_is_read_to_its_end_so_that_the_answer_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_side, "LINGER_S", 1.0)
    async with Engine() as engine, edge(engine, limits={"body_bytes": 10**6}) as server:
        answer = await _upload(server, _pieces(b"x" * 2 * 10**5, 10, pause_s=0.15), "Content-Length: 2000000")
        assert answer.status == 413


async def test_reading_on_after_a_refusal_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_side, "MAX_LINGER_S", 0.2)
    async with Engine() as engine, edge(engine, limits={"body_bytes": 10**6}) as server:
        client = await Client.connect(server.url)
        client.writer.write(b"POST / HTTP/1.1\r\nContent-Length: 2000000\r\n\r\n")
        assert (await client.receive()).status == 413
        await until(lambda: client.writer.write(b"x") is None and not server.state.connections)
        client.close()


@pytest.mark.parametrize("size", [256 * 2**10, 256 * 2**10 + 1, 14 * 2**20])
async def test_a_large_body_is_forwarded_byte_for_byte(size: int) -> None:
    start, end = b'{"model":"m","image":"', b'"}'
    body = start + b"A" * (size - len(start) - len(end)) + end
    async with Engine() as engine, edge(engine, policy="prefix_affinity") as server:
        assert (await ask(server.url, CHAT, body)).status == 200
        assert engine.received[0].body == body


async def test_bodies_held_at_once_are_bounded() -> None:
    async with Engine() as engine, edge(engine, limits={"buffered_bytes": 150_000}) as server:
        first = await Client.connect(server.url)
        first.writer.write(b"POST / HTTP/1.1\r\nContent-Length: 200000\r\n\r\n" + b"x" * 100_000)
        await until(lambda: server.state.buffered_bytes == 100_000)
        answer = await ask(server.url, CHAT, b"x" * 60_000)
        assert (answer.status, answer.code, answer.header("retry-after")) == (429, "overloaded", "1")
        assert server.state.buffered_bytes == 100_000
        first.abort()
        await until(lambda: server.state.buffered_bytes == 0)
        await _usable(server)


_TOO_LARGE = "request head is over 65536 bytes (limits.header_bytes)"


@pytest.mark.parametrize(
    "head",
    [
        b"GET /x HTTP/1.1\r\nX-Giant: " + b"a" * 100_000 + b"\r\n\r\n",
        b"GET /x HTTP/1.1\r\n" + b"".join(b"X-%d: a\r\n" % number for number in range(10_000)) + b"\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /x HTTP/1.1\r\nX-Endless: " + b"a" * 300_000,
        b"GET /x HTTP/1.1\r\n" + b"a" * 300_000,
        b"POST /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"X: " + b"a" * 400_000,
        b"POST /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"X: a\r\n" * 70_000,
        b"POST /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"a" * 400_000,
    ],
    ids=["one", "many", "target", "endless value", "endless name", "trailer", "trailers", "chunk extension"],
)
async def test_a_head_over_the_limit_is_refused(head: bytes) -> None:
    async with Engine() as engine, edge(engine) as server:
        client = await Client.connect(server.url)
        for at in range(0, len(head), 50_000):
            client.writer.write(head[at : at + 50_000])
            await client.writer.drain()
            await asyncio.sleep(0)
        answer = await client.receive()
        client.close()
        assert (answer.status, answer.code) == (431, "headers_too_large")
        assert answer.json()["error"]["message"] == _TOO_LARGE
        assert engine.received == []
        await _usable(server)


async def test_a_large_body_does_not_count_as_head() -> None:
    async with Engine() as engine, edge(engine) as server:
        headers = [f"X-{number}: {'a' * 100}" for number in range(400)]
        answer = await ask(server.url, CHAT, b'{"a":"' + b"x" * 300_000 + b'"}', *headers)
        assert answer.status == 200
        assert len(engine.received[0].headers) > 400


async def test_connections_over_the_limit_are_told() -> None:
    async with Engine() as engine, edge(engine, limits={"connections": 2}) as server:
        clients = [await Client.connect(server.url) for _ in range(2)]
        await until(lambda: len(server.state.connections) == 2)
        third = await Client.connect(server.url)
        answer = await third.receive()
        assert (answer.status, answer.header("retry-after")) == (429, "1")
        assert await third.reader.read() == b""
        assert (await clients[0].ask(CHAT, {"model": "m"})).status == 200
        for client in (*clients, third):
            client.close()


@pytest.mark.parametrize("name", ["\ud800", "a\nb: c", "\x00"])
async def test_a_model_name_that_is_no_text_gets_an_answer(name: str) -> None:
    async with Engine() as engine, edge(engine) as server:
        answer = await ask(server.url, CHAT, json.dumps({"model": name}).encode())
        assert (answer.status, answer.code) == (404, "model_not_found")
        assert "Known models: m" in answer.json()["error"]["message"]


async def test_a_body_in_tiny_pieces_weighs_what_it_counts() -> None:
    async with Engine() as engine, edge(engine) as server:
        client = await Client.connect(server.url)
        client.writer.write(b"POST /v1/x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        tracemalloc.start()
        try:
            for _ in range(20):
                client.writer.write(b"2\r\nab\r\n" * 10_000)
                await client.writer.drain()
            await until(lambda: server.state.buffered_bytes == 400_000)
            held = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert held < 3 * 2**20
        client.writer.write(b"0\r\n\r\n")
        assert (await client.receive()).status == 200
        assert engine.received[0].body == b"ab" * 200_000
        client.close()
