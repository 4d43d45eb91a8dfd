"""Streams reach the client as the engine wrote them: every byte, at once, with nothing kept on the way."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.kit import CHAT, HANG_S, Client, Engine, Received, Wire, ask
from tests.router.edge import DONE, EVENTS, edge, event, first_chunk, resident_bytes, stream

USAGE = {"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}
USAGE_EVENT = b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\n"
ARGUMENTS = event('{"city": "Zürich 東京 🏔"}')


def _split(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


@pytest.mark.parametrize(
    "text",
    [b"".join(EVENTS), ARGUMENTS, "data: é東🏔\r\n\r\n".encode(), b"data: \xff\xfe\n\n", b"\r\r: x\r\r"],
)
@pytest.mark.parametrize("size", [1, 3, 10**6])
async def test_bytes_are_relayed_whatever_the_chunk_borders(text: bytes, size: int) -> None:
    whole = text + DONE
    async with Engine(stream(*_split(whole, size))) as engine, edge(engine) as server:
        answer = await ask(server.url, CHAT, {"model": "m", "stream": True})
    assert (answer.status, answer.body, answer.complete) == (200, whole, True)
    assert answer.header("content-type") == "text/event-stream"


@pytest.mark.parametrize("size", [1, 7, 10**6])
async def test_usage_is_read_whatever_the_chunk_borders(size: int) -> None:
    whole = b"".join(EVENTS) + USAGE_EVENT + DONE
    async with Engine(stream(*_split(whole, size))) as engine, edge(engine) as server:
        answer = await ask(server.url, CHAT, {"model": "m", "stream": True})
        assert answer.body == whole
        metrics = server.metrics
        counted = (metrics.prompt_tokens, metrics.completion_tokens, metrics.cached_tokens)
        assert [each.value() for each in counted] == [9, 5, 4]


@pytest.mark.parametrize("asked", [None, True, False])
async def test_the_usage_chunk_comes_exactly_when_the_client_asked_for_it(asked: bool | None) -> None:
    body = {"model": "m", "stream": True}
    if asked is not None:
        body["stream_options"] = {"include_usage": asked}  # type: ignore[assignment]

    async def script(request: Received, wire: Wire) -> None:
        wanted = request.json().get("stream_options", {}).get("include_usage")
        await stream(*EVENTS, *([USAGE_EVENT] if wanted else []), DONE)(request, wire)

    async with Engine(script) as engine, edge(engine) as server:
        answer = await ask(server.url, CHAT, body)
        assert engine.received[0].json() == body
    assert (USAGE_EVENT in answer.body) is bool(asked)


async def test_each_chunk_is_forwarded_before_the_engine_sends_the_next() -> None:
    seen = asyncio.Semaphore(0)

    async def script(_request: Received, wire: Wire) -> None:
        await wire.start_stream()
        for piece in EVENTS:
            await wire.chunk(piece)
            await asyncio.wait_for(seen.acquire(), HANG_S)
        await wire.chunk(b"")

    async with Engine(script) as engine, edge(engine) as server:
        client = await Client.connect(server.url)
        await client.send(CHAT, {"model": "m", "stream": True})
        await client.head()
        for piece in EVENTS:
            assert await client.chunk() == piece
            seen.release()
        assert await client.chunk() == b""
        client.close()


@pytest.mark.parametrize(
    "error",
    [
        b'data: {"error":{"message":"oom","code":500}}\n\n',
        b'data: {"object":"error","message":"oom"}\n\n',
        b'event: error\ndata: {"type":"error"}\n\n',
    ],
)
async def test_an_error_event_of_the_engine_is_relayed_and_counted(error: bytes) -> None:
    whole = EVENTS[0] + error + DONE
    async with Engine(stream(EVENTS[0], error, DONE)) as engine, edge(engine) as server:
        answer = await ask(server.url, CHAT, {"model": "m", "stream": True})
        assert (answer.status, answer.body, answer.complete) == (200, whole, True)
        assert server.metrics.upstream_errors.value(engine.url, "in_band_error") == 1


async def test_text_that_only_looks_like_an_error_is_none() -> None:
    pieces = [event('data: {"error": 1}\n\nevent: error'), DONE]
    async with Engine(stream(*pieces)) as engine, edge(engine) as server:
        await ask(server.url, CHAT, {"model": "m", "stream": True})
        assert server.metrics.upstream_errors.total() == 0


async def test_a_stream_without_a_blank_line_is_not_kept() -> None:
    piece, count = b"x" * 2**16, 1024  # 64 MiB

    async def script(_request: Received, wire: Wire) -> None:
        await wire.start_stream()
        for _ in range(count):
            await wire.chunk(piece)
        await wire.chunk(b"")

    async with Engine(script) as engine, edge(engine) as server:
        client = await first_chunk(server, CHAT, {"model": "m", "stream": True})
        received, start, peak = 0, resident_bytes(), 0
        while data := await client.chunk():
            received += len(data)
            if received % 2**20 < len(data):
                peak = max(peak, resident_bytes())
        client.close()
        assert 2**26 - 2**20 < received < 2**26
        assert peak - start < 6 * 2**20, "the client's and the engine's own buffers are in it too"


async def test_one_stream_is_not_held_up_by_another_that_is_silent() -> None:
    silent = asyncio.Event()

    async def script(request: Received, wire: Wire) -> None:
        await wire.start_stream()
        await wire.chunk(EVENTS[0])
        if request.json().get("n") == 1:
            await silent.wait()
        await wire.chunk(b"")

    async with Engine(script) as engine, edge(engine) as server:
        waiting = await first_chunk(server, CHAT, {"model": "m", "stream": True, "n": 1})
        for _ in range(20):
            assert (await ask(server.url, CHAT, {"model": "m", "stream": True})).body == EVENTS[0]
        silent.set()
        assert await waiting.chunk() == b""
        waiting.close()


async def test_a_stream_to_an_http_1_0_client_ends_with_the_connection() -> None:
    async with Engine(stream(*EVENTS, DONE)) as engine, edge(engine) as server:
        client = await Client.connect(server.url)
        client.writer.write(b"POST /v1/completions HTTP/1.0\r\nContent-Length: 13\r\n\r\n" + b'{"model":"m"}')
        answer = await client.receive()
        client.close()
    assert answer.header("transfer-encoding") is None
    assert answer.header("connection") == "close"
    assert answer.body == b"".join(EVENTS) + DONE
