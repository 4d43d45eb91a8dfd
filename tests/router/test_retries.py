"""Another worker is asked while nothing has reached the client, within attempts and budget; never later."""

from __future__ import annotations

import asyncio
import json

import pytest

from kvroute.config_groups import WorkerConfig
from tests.kit import CHAT, Engine, Received, Script, Wire, answer_ok, ask, until
from tests.router.edge import EVENTS, Lasting, edge, raw, stream

BODY = {"model": "m", "stream": True}
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
STEADY = {"failures": 10_000}


def status(code: int, body: bytes = b'{"detail":"engine says"}', *headers: str) -> Script:
    async def script(_request: Received, wire: Wire) -> None:
        await wire.answer(code, body, *headers)

    return script


@pytest.mark.parametrize(
    ("reason", "script"),
    [
        ("upstream_reset", raw(b"", close=True)),
        ("upstream_reset", raw(b"HTTP/1.1 200 OK\r\nContent-", close=True)),
        ("upstream_died", raw(HEAD, close=True)),
        ("upstream_died", raw(b"HTTP/1.1 100 Continue\r\n\r\n", close=True)),
        ("bad_upstream_response", raw(b"SSH-2.0-OpenSSH_9.6\r\n")),
        ("bad_upstream_response", raw(HEAD + b"zz\r\n")),
        ("status_429", status(429)),
        ("status_500", status(500)),
        ("status_502", status(502)),
        ("status_503", status(503)),
    ],
)
async def test_a_failure_before_the_first_byte_goes_unnoticed(reason: str, script: Script) -> None:
    async with (
        Engine(script, keeps_probes=False) as bad,
        Engine(stream(*EVENTS)) as good,
        edge(bad, good, breaker=STEADY) as server,
    ):
        for _ in range(4):
            answer = await ask(server.url, CHAT, BODY)
            assert (answer.status, answer.body) == (200, b"".join(EVENTS))
            assert answer.header("x-kvroute-worker") == good.url
        assert len(good.received) == 4
        assert len(bad.received) >= 2
        assert dict(server.metrics.retries.values) == {(reason,): len(bad.received)}


async def test_a_worker_that_refuses_connections_is_passed_over() -> None:
    async with (
        Engine() as bad,
        Engine() as good,
        edge(bad, good, health={"interval_s": 60}, breaker=STEADY) as server,
    ):
        await bad.stop()
        answers = [await ask(server.url, CHAT, BODY) for _ in range(4)]
        assert {answer.status for answer in answers} == {200}
        assert server.metrics.retries.value("connect_refused") >= 2


async def test_the_last_worker_s_own_answer_is_passed_on() -> None:
    engines = [Engine(status(503, b"no %d" % number, "Retry-After: 7")) for number in range(3)]
    async with engines[0], engines[1], engines[2], edge(*engines, breaker=STEADY) as server:
        answer = await ask(server.url, CHAT, BODY)
        assert (answer.status, answer.header("retry-after")) == (503, "7")
        assert [len(engine.received) for engine in engines] == [1, 1, 1]
        asked = [engine.url for engine in engines]
        assert answer.body == b"no %d" % asked.index(answer.header("x-kvroute-worker") or "")
        assert dict(server.metrics.retries_denied.values) == {("attempts",): 1}


@pytest.mark.parametrize("code", [400, 401, 403, 404, 408, 422, 501, 504])
async def test_other_statuses_are_answers(code: int) -> None:
    async with Engine(status(code)) as one, Engine(status(code)) as two, edge(one, two) as server:
        answer = await ask(server.url, CHAT, BODY)
        assert (answer.status, answer.body) == (code, b'{"detail":"engine says"}')
        assert answer.header("content-type") == "application/json"
        assert len(one.received) + len(two.received) == 1


@pytest.mark.parametrize("code", [429, 500])
async def test_a_status_is_passed_on_unchanged_where_there_is_no_other_worker(code: int) -> None:
    async with Engine(status(code, b"x", "Retry-After: 13")) as engine, edge(engine) as server:
        answer = await ask(server.url, CHAT, BODY)
        assert (answer.status, answer.body, answer.header("retry-after")) == (code, b"x", "13")
        assert dict(server.metrics.retries_denied.values) == {("no_other_worker",): 1}


async def test_statuses_to_retry_are_configured() -> None:
    async with (
        Engine(status(418)) as one,
        Engine(status(500)) as two,
        edge(one, two, retry={"statuses": [418]}, breaker=STEADY) as server,
    ):
        answers = [await ask(server.url, CHAT, BODY) for _ in range(2)]
        assert [answer.status for answer in answers] == [500, 500]


async def test_attempts_are_limited() -> None:
    engines = [Engine(raw(b"", close=True), keeps_probes=False) for _ in range(4)]
    async with (
        engines[0],
        engines[1],
        engines[2],
        engines[3],
        edge(*engines, retry={"attempts": 2}, breaker=STEADY) as server,
    ):
        answer = await ask(server.url, CHAT, BODY)
        assert (answer.status, answer.code) == (502, "upstream_reset")
        assert sum(len(engine.received) for engine in engines) == 2


async def test_the_budget_limits_retries_over_all_requests() -> None:
    async with (
        Engine(raw(b"", close=True), keeps_probes=False) as one,
        Engine(raw(b"", close=True), keeps_probes=False) as two,
    ):
        budget = {"budget_ratio": 0.0, "budget_burst": 3}
        async with edge(one, two, retry=budget, breaker=STEADY) as server:
            for _ in range(10):
                assert (await ask(server.url, CHAT, BODY)).status == 502
            assert len(one.received) + len(two.received) == 13
            assert server.metrics.retries_denied.value("budget") == 7


async def test_a_slow_worker_is_not_helped_by_a_second_one() -> None:
    async with (
        Engine(Lasting()) as one,
        Engine(Lasting()) as two,
        edge(one, two, timeouts={"first_byte_s": 0.2}) as server,
    ):
        answer = await ask(server.url, CHAT, BODY)
        assert (answer.status, answer.code) == (504, "first_byte_timeout")
        assert len(one.received) + len(two.received) == 1
        assert dict(server.metrics.retries_denied.values) == {("timeout",): 1}


async def test_the_body_is_whole_in_every_attempt() -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "é" * 2**18}]}).encode()
    async with Engine(status(503)) as bad, Engine() as good, edge(bad, good) as server:
        for _ in range(2):
            assert (await ask(server.url, CHAT, body)).status == 200
        assert bad.received
        assert {each.body for each in (*bad.received, *good.received)} == {body}


async def test_the_request_id_of_the_client_is_kept_over_attempts() -> None:
    async with Engine(status(503)) as bad, Engine() as good, edge(bad, good) as server:
        for _ in range(2):
            await ask(server.url, CHAT, BODY, "X-Request-Id: mine")
        assert bad.received
        assert {each.header("x-request-id") for each in (*bad.received, *good.received)} == {"mine"}


async def test_load_is_charged_to_the_worker_of_the_attempt_only() -> None:
    script = Lasting()

    async def fail_first(request: Received, wire: Wire) -> None:
        await wire.answer(503, b"")

    async with Engine(fail_first) as bad, Engine(script) as good, edge(bad, good) as server:
        asking = [asyncio.ensure_future(ask(server.url, CHAT, BODY)) for _ in range(2)]
        await until(lambda: len(good.received) == 2)
        loads = {m.endpoint.url: m.load.requests for m in server.registry.members.values()}
        assert loads == {bad.url: 0, good.url: 2}
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        good.script = answer_ok


async def test_the_last_answer_passes_while_a_worker_ramps_up() -> None:
    """A retry takes its next choice before it lets go of what it has: slow start must not come between."""
    busy = raw(b"HTTP/1.1 429 X\r\nretry-after: 9\r\ncontent-length: 2\r\n\r\n{}")
    async with (
        Engine(busy) as one,
        Engine(busy) as two,
        edge(one, health={"slow_start_s": 60}, retry={"budget_burst": 1000}) as server,
    ):
        server.registry.add(WorkerConfig(url=two.url))
        await until(lambda: len(server.registry.members) == 2)
        await until(lambda: all(m.state == "ready" for m in server.registry.members.values()))
        for _ in range(60):
            answer = await ask(server.url, CHAT, BODY)
            assert (answer.status, answer.header("retry-after")) == (429, "9")
        assert len(one.received) == len(two.received) == 60
        assert server.metrics.retries.total() == 60
