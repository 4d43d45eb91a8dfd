"""A decode worker that is asked first: it does all, declines, or gives a stream up in the middle."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from kvroute.config_pd import PdConfig
from kvroute.router.errors import Failure, GatewayError
from kvroute.router.pd.asking import MAX_LOOKED_AT_BYTES, GivingUp
from kvroute.router.pd.connectors.decode_first import DecodeFirstConnector
from kvroute.router.server import GatewayServer
from tests.kit import Answer, Engine, Received, Script, Wire, ask
from tests.router.pd.kit import COMPLETIONS, completed, scripted

ASKED = {"model": "m", "prompt": "x", "max_tokens": 9}
DONE = b"data: [DONE]\n\n"


def event(text: str = "", finish: str | None = None) -> bytes:
    body = {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


GIVES_UP = event(finish="cache_threshold")


def streaming(reads: Sequence[bytes], length: bool = False) -> Script:
    """To the leg with a threshold, read by read; to others all at once, and right."""

    async def script(request: Received, wire: Wire) -> None:
        if request.json().get("cache_hit_threshold") in (0, None):
            await wire.answer(200, event("right") + DONE, content_type="text/event-stream")
            return
        if length:
            await wire.answer(200, b"".join(reads), content_type="text/event-stream")
            return
        await wire.start_stream()
        for read in reads:
            await wire.chunk(read)
            await asyncio.sleep(0.01)  # so that they are reads, and not one
        await wire.chunk(b"")

    return script


async def prefill(_request: Received, wire: Wire) -> None:
    await wire.answer(200, b'{"choices":[{"text":"a","finish_reason":"length"}]}')


async def streamed(
    reads: Sequence[bytes], decode: int = 1, *, length: bool = False
) -> tuple[Answer, GatewayServer, list[Received]]:
    async with Engine(prefill) as p, Engine(streaming(reads, length)) as one, Engine(completed()) as two:
        two.script = streaming([event("right"), DONE])
        workers = [one, two][:decode]
        async with scripted([p], workers, "decode-first") as server:
            answer = await ask(server.url, COMPLETIONS, {**ASKED, "stream": True})
            return answer, server, p.received


BEFORE = [event("a"), event("b")]


@pytest.mark.parametrize(
    "rest",
    [
        [GIVES_UP, DONE],
        [GIVES_UP + DONE],
        [GIVES_UP[:40], GIVES_UP[40:] + DONE],
        [GIVES_UP[:-1], GIVES_UP[-1:], DONE],
        [event("c")[:9], event("c")[9:] + GIVES_UP],
    ],
)
async def test_a_stream_that_is_given_up_ends_in_an_error_and_not_as_if_it_were_over(
    rest: list[bytes],
) -> None:
    answer, server, prefilled = await streamed(BEFORE + rest)
    assert answer.status == 200
    assert b"cache_threshold" not in answer.body
    assert DONE not in answer.body
    *events, last = answer.body.removesuffix(b"\n\n").split(b"\n\n")
    assert [each + b"\n\n" for each in events[:2]] == BEFORE
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "given_up"
    assert prefilled == []
    assert server._pd.books.pd_metrics.failures.value("decode", "given_up") == 1


async def test_one_that_is_given_up_before_anything_was_passed_on_is_another_worker_s() -> None:
    """Its tokens and its end came in one read, or with a length."""
    for length in (False, True):
        for _ in range(2):  # whoever is asked first
            answer, *_ = await streamed([b"".join([*BEFORE, GIVES_UP, DONE])], 2, length=length)
            assert (answer.status, answer.body) == (200, event("right") + DONE)


async def test_one_that_only_speaks_of_it_passes_byte_for_byte() -> None:
    said = [
        event('"finish_reason": "cache_threshold"'),
        b'data: {"cache_threshold":1,"choices":[{"text":"x","finish_reason":null}]}\n\n',
        b": cache_threshold\n\n",
        b'data: "cache_threshold"\n\n',
        event("b", "stop"),
        DONE,
        b"data: a rest that is no event",
    ]
    answer, server, _ = await streamed(said)
    assert answer.body == b"".join(said)
    assert server._pd.books.pd_metrics.failures.total() == 0


def test_wherever_a_read_ends_the_same_comes_out() -> None:
    connector, stream = DecodeFirstConnector(PdConfig()), b"".join([*BEFORE, GIVES_UP, DONE])
    for at in range(len(stream) + 1):
        faults: list[GatewayError] = []
        one = GivingUp(connector, faults.append)
        out = one.feed(stream[:at]) + one.feed(stream[at:]) + one.end()
        assert out == b"".join(BEFORE)
        assert [fault.failure for fault in faults] == [Failure.GIVEN_UP]


def test_what_has_no_events_is_not_kept_for_ever() -> None:
    one = GivingUp(DecodeFirstConnector(PdConfig()), lambda _error: None)
    out = sum(len(one.feed(b"x" * 2**16)) for _ in range(64))
    assert out > 64 * 2**16 - MAX_LOOKED_AT_BYTES - 2**17


@pytest.mark.parametrize(
    ("more", "path"),
    [({"echo": True}, COMPLETIONS), ({"n": 2}, COMPLETIONS), ({"prompt": ["x", "y"], "n": 2}, COMPLETIONS)],
)
async def test_a_request_that_is_not_split_may_not_be_declined(more: dict[str, Any], path: str) -> None:
    """Nobody would do its prefill: the engine's own threshold may be above 0."""
    async with Engine(prefill) as p, Engine(completed()) as d, scripted([p], [d], "decode-first") as server:
        assert (await ask(server.url, path, {**ASKED, **more})).status == 200
        assert [each.json() for each in d.received] == [{**ASKED, **more, "cache_hit_threshold": 0}]
        assert p.received == []


async def test_an_answer_of_the_first_leg_has_its_own_count_of_cached_tokens() -> None:
    """Not that of a prefill of an attempt before it."""
    usage = {"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 3}}}
    asked: list[float] = []

    async def decode(request: Received, wire: Wire) -> None:
        asked.append(request.json()["cache_hit_threshold"])
        if len(asked) == 1:
            await wire.answer(200, b'{"choices":[{"finish_reason":"cache_threshold"}]}')
        elif len(asked) == 2:
            wire.reset()
        else:
            own = {"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}}
            await completed(**own)(request, wire)

    async def found(_request: Received, wire: Wire) -> None:
        await wire.answer(200, json.dumps({"choices": [{"finish_reason": "length"}], **usage}).encode())

    async with (
        Engine(found) as p,
        Engine(decode) as one,
        Engine(decode) as two,
        scripted([p], [one, two], "decode-first") as server,
    ):
        answer = await ask(server.url, COMPLETIONS, ASKED)
        assert asked == [0.8, 0, 0.8]
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 8


async def test_a_signed_body_is_not_touched() -> None:
    async with Engine(prefill) as p, Engine(completed()) as d, scripted([p], [d], "decode-first") as server:
        body = json.dumps(ASKED).encode()
        assert (await ask(server.url, COMPLETIONS, body, "Content-Digest: sha-256=:x:")).status == 200
        assert [each.body for each in d.received] == [body]
