"""An engine that fails after its first byte: a typed error where one fits, else a body visibly broken."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.kit import CHAT, Answer, Client, Engine, Received, Script, Wire, ask, gateway
from tests.router.edge import EVENTS, Lasting, at_rest, edge, promptly, raw, send_reset, stream

BODY = {"model": "m", "stream": True}
DIED = "worker closed the connection in the middle of its response (200)"


def _last_event(answer: Answer) -> dict[str, object]:
    assert answer.body.endswith(b"\n\n")
    last = answer.body.splitlines()[-2]
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert isinstance(error, dict)
    return error


@pytest.mark.parametrize("pieces", [EVENTS[:1], EVENTS[:3], [b"data: 1\r\n\r\n"], [b": ping\n\n"]])
async def test_death_between_events_ends_the_stream_with_an_error_event(pieces: list[bytes]) -> None:
    async with Engine(stream(*pieces, end=False)) as engine, edge(engine) as server:
        answer = await ask(server.url, CHAT, BODY)
        assert answer.status == 200
        assert answer.complete
        assert answer.body.startswith(b"".join(pieces))
        assert b"[DONE]" not in answer.body
        assert _last_event(answer) == {
            "message": "worker closed the connection in the middle of its response (200)",
            "type": "upstream_error",
            "param": None,
            "code": "upstream_died",
            "upstream_status": 200,
        }
        assert server.metrics.upstream_errors.value(engine.url, "upstream_died") == 1


@pytest.mark.parametrize(
    "pieces", [[b"data: half"], [EVENTS[0], b"data: {"], [b"data: 1\n"], ["é".encode()[:1]]]
)
async def test_death_within_an_event_breaks_the_body(pieces: list[bytes]) -> None:
    async with Engine(stream(*pieces, end=False)) as engine, edge(engine) as server:
        answer = await ask(server.url, CHAT, BODY)
    assert answer.status == 200
    assert not answer.complete
    assert answer.body == b"".join(pieces)


@pytest.mark.parametrize("kind", ["json", "sse"])
async def test_death_within_a_body_of_known_length_breaks_it(kind: str) -> None:
    content_type = {"json": "application/json", "sse": "text/event-stream"}[kind]
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\nContent-Length: 1000\r\n\r\n".encode()
    async with Engine(raw(head + b"data: 1\n\n", close=True)) as engine, edge(engine) as server:
        answer = await ask(server.url, CHAT, BODY)
    assert not answer.complete
    assert answer.body == b"data: 1\n\n", "an event of ours would count towards the length"


async def test_no_event_is_added_to_a_compressed_stream() -> None:
    async def script(_request: Received, wire: Wire) -> None:
        await wire.start_stream("content-encoding: gzip")
        await wire.chunk(b"\x1f\x8b\n\n")
        await asyncio.sleep(0.02)
        wire.reset()

    async with Engine(script) as engine, edge(engine) as server:
        answer = await ask(server.url, CHAT, BODY)
    assert not answer.complete
    assert answer.body == b"\x1f\x8b\n\n"


async def test_a_reset_breaks_a_body_that_ends_with_the_connection() -> None:
    async def script(_request: Received, wire: Wire) -> None:
        await wire.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\npartial")
        await asyncio.sleep(0.02)
        send_reset(wire)

    async with Engine(script) as engine, edge(engine) as server:
        answer = await ask(server.url, CHAT, BODY)
    assert not answer.complete
    assert answer.body == b"partial"


async def test_an_http_1_0_client_sees_a_broken_body_as_a_reset() -> None:
    async with Engine(stream(b"data: half", end=False)) as engine, edge(engine) as server:
        client = await Client.connect(server.url)
        client.writer.write(b"GET /x HTTP/1.0\r\n\r\n")
        with pytest.raises(ConnectionResetError):
            await client.reader.read(-1)
        client.close()


async def test_malformed_chunks_after_the_first_byte() -> None:
    async def script(request: Received, wire: Wire) -> None:
        await wire.start_stream()
        await wire.chunk(EVENTS[0])
        await asyncio.sleep(0.02)
        await wire.send(b"zz\r\n")
        await wire.eof()

    async with Engine(script) as engine, edge(engine) as server:
        answer = await ask(server.url, CHAT, BODY)
        assert _last_event(answer)["code"] == "bad_upstream_response"


@pytest.mark.parametrize(
    ("timeouts", "code"), [({"idle_s": 0.2}, "idle_timeout"), ({"total_s": 0.4}, "total_timeout")]
)
async def test_a_stream_that_stalls_is_ended_by_the_clock(timeouts: dict[str, float], code: str) -> None:
    script = Lasting(EVENTS[0])
    async with Engine(script) as engine, edge(engine, timeouts=timeouts) as server:
        answer = await ask(server.url, CHAT, BODY)
        assert answer.complete
        assert (_last_event(answer)["code"], _last_event(answer)["type"]) == (code, "timeout_error")
        await promptly(script.left)


@pytest.mark.parametrize("die", [stream(EVENTS[0], EVENTS[1], end=False), stream(b"data: half", end=False)])
async def test_there_is_no_second_attempt_after_the_first_byte(die: Script) -> None:
    async with Engine(die) as first, Engine() as second, gateway(first, second) as server:
        answers = [await ask(server.url, CHAT, BODY) for _ in range(2)]
        broken = next(answer for answer in answers if answer.header("x-kvroute-worker") == first.url)
        assert broken.body.startswith((EVENTS[0] + EVENTS[1], b"data: half"))
        assert (len(first.received), len(second.received)) == (1, 1)
        assert server.metrics.retries.total() == 0
        await at_rest(server)


async def test_the_connection_of_a_client_survives_an_error_event_but_not_a_broken_body() -> None:
    async with Engine(stream(EVENTS[0], end=False)) as engine, edge(engine) as server:
        client = await Client.connect(server.url)
        assert _last_event(await client.ask(CHAT, BODY))["code"] == "upstream_died"
        engine.script = stream(b"data: half", end=False)
        assert not (await client.ask(CHAT, BODY)).complete
        assert await client.reader.read() == b""
        client.close()


@pytest.mark.parametrize(
    ("target", "error"),
    [
        ("/v1/messages", {"type": "error", "error": {"type": "upstream_error", "message": DIED}}),
        ("/v1/responses?x=1", {"type": "error", "code": "upstream_died", "message": DIED, "param": None}),
    ],
)
async def test_the_error_event_is_of_the_api_that_was_called(target: str, error: dict[str, object]) -> None:
    async with Engine(stream(b"event: ping\ndata: {}\n\n", end=False)) as engine, edge(engine) as server:
        answer = await ask(server.url, target, BODY)
        assert answer.complete
        name, data, _ = answer.body.removeprefix(b"event: ping\ndata: {}\n\n").split(b"\n", 2)
        assert (name, json.loads(data.removeprefix(b"data: "))) == (b"event: error", error)
