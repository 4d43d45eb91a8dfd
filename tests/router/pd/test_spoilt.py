"""A worker that has fetched KV after its lease gets no request until it is reset or restarted."""

from __future__ import annotations

import asyncio
import json
import math
from time import monotonic
from typing import Any

import pytest

from kvroute.loadtests.mock_engine import MockEngine
from kvroute.router.knowledge import NO_PROMPT, Prompt
from kvroute.router.pd import resetting
from kvroute.router.pd.streams import MAX_WRONG, Streams
from kvroute.router.server import GatewayServer
from kvroute.router.workers import Member, State
from kvroute.types import KeyMode, PromptKeys
from tests.kit import Client, Engine, Received, Script, Wire, ask, until
from tests.router.pd.kit import (
    COMPLETIONS,
    HANDED,
    NEVER_MARKED,
    Bench,
    bench,
    completed,
    prefilled,
    right,
    scripted,
)
from tests.router.pd.pairs import member

LEASE_S = 0.3
SPOILS = {"handoff_delay": 2 * LEASE_S}
"""A plain answer whose KV is fetched when it is another's."""
BODY = {"model": "m", "prompt": "x", "max_tokens": 7}


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resetting, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(resetting, "LAST_PAUSE_S", 0.04)


def short(decode: int, **more: Any) -> Any:
    """Mock engines with a short lease, and a gateway that knows it."""
    mock = {"kv_lease_s": LEASE_S, **more.pop("mock", {})}
    return bench("nixl", 1, decode, mock=mock, pd={"kv_lease_s": LEASE_S}, clean=False, **more)


def member_of(server: GatewayServer, engine: Engine | MockEngine) -> Member:
    return next(
        one
        for one in server.registry.members.values()
        if one.endpoint.url == engine.url and one.state is not State.DRAINING
    )


def spoil(server: GatewayServer, engine: Engine | MockEngine) -> Member:
    member = member_of(server, engine)
    server._pd.spoilt(member, math.inf, NO_PROMPT)
    return member


async def spoilt(one: Bench) -> MockEngine:
    """A request that spoils whoever decodes it first, and is answered by another."""
    for engine in one.decode:
        engine.faults.set({**SPOILS, "times": 1})
        engine.faults = one.decode[0].faults
    assert right(await one.ask())
    (worst,) = [engine for engine in one.decode if engine.pd_books.totals["wrong_text"]]
    return worst


async def test_without_a_reset_its_requests_are_kept_from_what_lies_there() -> None:
    """It is not in development mode."""
    async with short(2, mock={"development": False}) as one:
        worst = await spoilt(one)
        await until(lambda: member_of(one.server, worst).state is State.READY)
        assert one.count("resets", "absent") >= 1
        assert one.count("resets", "salted") == 1
        received = worst.journal.totals["received"]
        for echo in (False, True):  # split, and whole
            assert [(await one.ask(echo=echo, stream=echo)).status for _ in range(4)] == [200] * 4
        assert [right(await one.ask()) for _ in range(4)] == [True] * 4
        assert worst.journal.totals["received"] > received
        legs = [json.loads(request.body) for _, request in list(worst.journal.requests)[received:]]
        assert {True, False} == {"kv_transfer_params" in leg for leg in legs}
        salts = {leg.get("cache_salt") for leg in legs if leg["model"] == "mock"}
        assert len(salts) == 1
        assert None not in salts
        await worst.restart(0.3)  # a probe finds nobody
        await until(lambda: member_of(one.server, worst).state is State.READY)
        received = worst.journal.totals["received"]
        assert [right(await one.ask()) for _ in range(4)] == [True] * 4
        legs = [json.loads(request.body) for _, request in list(worst.journal.requests)[received:]]
        assert legs
        assert not any("cache_salt" in leg for leg in legs)


async def test_a_salt_is_the_client_s_own_one_s_too_and_new_each_time() -> None:
    script, _ = resets((404, b"{}"))
    async with Engine(prefilled()) as p, Engine(script) as d, scripted([p], [d]) as server:
        member = member_of(server, d)
        seen: list[str] = []
        for _ in range(2):
            spoil(server, d)
            await until(lambda: member.state is State.READY)
            for own in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a"}):
                assert (await ask(server.url, COMPLETIONS, {**BODY, **own})).status == 200
                seen.append(d.received[-1].json()["cache_salt"])
                assert p.received[-1].json().get("cache_salt") == own.get("cache_salt")
        assert len(set(seen)) == 6
        assert seen[1] == seen[3]


@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [
        ("/v1/messages", {"model": "m", "messages": [], "max_tokens": 2}, ()),
        ("/v1/embeddings", {"model": "m", "input": "x"}, ()),
        ("/unknown", {"model": "m"}, ()),
        (COMPLETIONS, {**BODY, "top_p": float("nan")}, ()),
        (COMPLETIONS, BODY, ("Content-Digest: sha-256=:x:",)),
    ],
)
async def test_what_cannot_be_kept_from_it_is_not_sent_there(
    path: str, body: dict[str, Any], headers: tuple[str, ...]
) -> None:
    script, _ = resets((404, b"{}"))
    async with Engine(prefilled()) as p, Engine(script) as d, scripted([p], [d]) as server:
        member = spoil(server, d)
        await until(lambda: member.state is State.READY)
        answer = await ask(server.url, path, body, *headers)
        assert (answer.status, answer.code) == (503, "spoilt_cache")
        asked_for = [each for each in d.received if each.target == path and each.json()["model"] == "m"]
        assert asked_for == []
        assert (await ask(server.url, "/tokenize", BODY)).status == 200


async def test_what_cannot_be_kept_from_it_costs_no_retry() -> None:
    script, _ = resets((404, b"{}"))
    once = {"attempts": 1}
    async with (
        Engine(prefilled()) as p,
        Engine(script) as d,
        Engine(completed()) as other,
        scripted([p], [d, other], retry=once) as server,
    ):
        member = spoil(server, d)
        await until(lambda: member.state is State.READY)
        body = {"model": "m", "messages": [], "max_tokens": 2}
        for _ in range(4):
            assert (await ask(server.url, "/v1/messages", body)).status == 200
        assert len([each for each in other.received if each.target == "/v1/messages"]) == 4


async def test_an_engine_that_has_no_salt_either_stays_out_until_it_is_another_process() -> None:
    script, asked = resets((404, b"{}"))
    async with Engine(prefilled()) as p, Engine(script) as d:
        workers = [
            {"url": p.url, "role": "prefill"},
            {"url": d.url, "role": "decode", "engine": "openai"},
        ]
        async with scripted([p], [d], workers=workers) as server:
            member = spoil(server, d)
            await until(lambda: len(asked) >= 3)
            assert member.state is State.SPOILT
            await d.stop()
            await until(lambda: member.was_refused)
            await d.start()
            await until(
                lambda: member_of(server, d).state is State.READY and member_of(server, d) is not member
            )
            assert (await ask(server.url, COMPLETIONS, BODY)).status == 200


async def test_it_is_back_once_its_cache_is_reset() -> None:
    async with short(2) as one:
        worst = await spoilt(one)
        await until(lambda: member_of(one.server, worst).state is State.READY)
        received = worst.journal.totals["received"]
        assert [right(await one.ask()) for _ in range(6)] == [True] * 6
        assert worst.journal.totals["received"] > received
        assert one.count("resets", "reset") == 1


async def test_kv_on_its_way_only_delays_the_reset() -> None:
    """vLLM 0.32 answers 500 to a reset meanwhile."""
    async with short(1) as one:
        (engine,) = one.decode
        engine.faults.set({"handoff_delay": 0.2})
        client = await one.begin(prompt=[1, 2, 3])
        await until(lambda: bool(engine.scheduler.receiving))
        member = spoil(one.server, engine)
        await until(lambda: member.state is State.READY)
        assert one.count("resets", "failed") >= 1
        assert one.count("resets", "reset") == 1
        client.close()


def resets(*answers: tuple[int, bytes]) -> tuple[Script, list[bytes]]:
    """A decode engine that answers resets with these, one after the other, the last one for good."""
    left = list(answers)
    asked: list[bytes] = []

    async def script(request: Received, wire: Wire) -> None:
        if request.target.startswith("/reset_prefix_cache"):
            asked.append(request.body)
            status, body = left.pop(0) if len(left) > 1 else left[0]
            await wire.answer(status, body)
        else:
            await completed()(request, wire)

    return script, asked


async def test_meanwhile_nobody_decodes_and_readiness_says_so() -> None:
    script, asked = resets((500, b"{}"))
    async with Engine(prefilled()) as p, Engine(script) as d, scripted([p], [d]) as server:
        member = spoil(server, d)
        answer = await ask(server.url, "/readyz", method="GET")
        assert (answer.status, answer.json()["workers"]) == (503, {"ready": 1, "spoilt": 1})
        answer = await ask(server.url, COMPLETIONS, BODY)
        assert (answer.status, answer.code) == (503, "no_worker")
        metrics = (await ask(server.url, "/metrics", method="GET")).body
        assert b'kvroute_workers{state="spoilt"} 1' in metrics
        assert p.received == []
        await until(lambda: len(asked) >= 3)
        assert member.state is State.SPOILT


@pytest.mark.parametrize(
    ("answers", "counted"),
    [
        ([(200, b'{"success": false}'), (200, b'{"success": true}')], {"refused": 1, "reset": 1}),
        ([(409, b"{}"), (200, b"")], {"refused": 1, "reset": 1}),
        ([(500, b"x"), (503, b""), (200, b'{"success":true}')], {"failed": 2, "reset": 1}),
    ],
)
async def test_it_is_asked_until_it_says_that_it_is_reset(
    answers: list[tuple[int, bytes]], counted: dict[str, int]
) -> None:
    script, asked = resets(*answers)
    async with Engine(prefilled()) as p, Engine(script) as d, scripted([p], [d]) as server:
        member = spoil(server, d)
        await until(lambda: member.state is State.READY)
        assert len(asked) == len(answers)
        counter = server._pd.books.pd_metrics.resets
        assert {result: counter.value(result) for (result,) in counter.values} == counted
        assert (await ask(server.url, COMPLETIONS, BODY)).status == 200


async def test_an_older_engine_s_word_counts_only_once_it_is_idle() -> None:
    """It says 200 whether its cache was reset or not, which requests that run prevent."""
    script, asked = resets((200, b""))
    async with Engine(prefilled()) as p, Engine(script) as d, scripted([p], [d]) as server:
        member = member_of(server, d)
        lease = server.registry.charge(member, 0.0)
        spoil(server, d)
        await until(lambda: len(asked) >= 3)
        assert member.state is State.SPOILT
        lease.release()
        await until(lambda: member.state is State.READY)


async def test_what_spoils_it_during_a_reset_needs_another_one() -> None:
    asked = 0

    async def decode(request: Received, wire: Wire) -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            spoil(server, d)
        await wire.answer(200, b'{"success":true}')

    async with Engine(prefilled()) as p, Engine(decode) as d, scripted([p], [d]) as server:
        member = spoil(server, d)
        await until(lambda: member.state is State.READY)
        assert asked == 2


async def test_what_spoils_it_in_the_moment_of_its_cure_is_cured_too() -> None:
    asked = 0

    async def decode(_request: Received, wire: Wire) -> None:
        nonlocal asked
        asked += 1
        await wire.answer(200, b'{"success":true}')

    async with Engine(prefilled()) as p, Engine(decode) as d, scripted([p], [d]) as server:
        again = [None]

        def cured(member: Member) -> None:
            if member.state is State.READY and again:
                again.clear()
                spoil(server, d)

        server.registry.on_change(cured)
        member = spoil(server, d)
        await until(lambda: asked == 2 and member.state is State.READY)
        await until(lambda: not server._pd._resets._tasks)


async def test_kv_meant_for_it_goes_to_another_decode_worker() -> None:
    async with short(2, health=NEVER_MARKED, mock={"development": False}) as one:
        one.prefill[0].faults.set({"ttft": 0.1})
        client = await one.begin()
        await until(lambda: bool(one.prefill[0].live))
        (chosen,) = [each for each in one.decode if member_of(one.server, each).requests]
        spoil(one.server, chosen)
        assert right(await client.receive())
        client.close()
        assert chosen.journal.totals["received"] == 0
        assert one.prefill[0].journal.totals["received"] == 1
        assert one.count("retries", "decode", "spoilt_cache") == 1


@pytest.mark.parametrize("fields", [{}, {"echo": True}])
@pytest.mark.parametrize("development", [False, True])
async def test_an_answer_that_had_not_begun_there_is_another_worker_s(
    fields: dict[str, Any], development: bool
) -> None:
    """Split or whole, and were the cache reset by then: it may stand on the wrong KV."""
    async with short(2, health=NEVER_MARKED, mock={"development": development}) as one:
        for engine in one.decode:
            engine.faults.set({"ttft": 0.1, "times": 1})
            engine.faults = one.decode[0].faults
        client = await one.begin(prompt=[5, 6, 7], max_tokens=1, stream=True, **fields)
        await until(lambda: any(engine.live for engine in one.decode))
        (first,) = [engine for engine in one.decode if engine.live]
        spoil(one.server, first)
        if development:
            await until(lambda: member_of(one.server, first).state is State.READY)
        answer = await client.receive()
        client.close()
        assert answer.status == 200
        assert answer.complete
        assert sum(engine.journal.totals["received"] for engine in one.decode) == 2


async def test_kv_of_a_prefill_over_a_spoilt_cache_is_not_handed_over() -> None:
    """It may be a worker for both."""
    asked: list[Engine] = []

    def prefill(engine: Engine) -> Script:
        async def script(request: Received, wire: Wire) -> None:
            if request.target != COMPLETIONS:
                await wire.answer(404, b"{}")
                return
            asked.append(engine)
            if len(asked) == 1:
                spoil(server, engine)
            params = {**HANDED, "remote_request_id": str(len(asked))}
            await prefilled(kv_transfer_params=params)(request, wire)

        return script

    async with Engine() as one, Engine() as two, Engine(completed()) as d:
        one.script, two.script = prefill(one), prefill(two)
        async with scripted([one, two], [d], health=NEVER_MARKED) as server:
            assert (await ask(server.url, COMPLETIONS, BODY)).status == 200
            assert len(set(map(id, asked))) == 2
            legs = [each.json() for each in d.received if each.json()["model"] == "m"]
            assert [leg["kv_transfer_params"]["remote_request_id"] for leg in legs] == ["2"]
            await until(lambda: len(d.received) == 2)
            released = [each.json() for each in d.received if each.json()["model"] != "m"]
            assert [leg["kv_transfer_params"]["remote_request_id"] for leg in released] == ["1"]


@pytest.mark.parametrize(
    ("policy", "began", "asked", "goes_on"),
    [
        ("prefix_affinity", "after", "one two three " * 40 + "end", False),
        ("prefix_affinity", "before", "one two three " * 40 + "end", True),
        ("prefix_affinity", "after", "four five six " * 40, True),
        ("round_robin", "after", "four five six " * 40, False),
    ],
)
async def test_a_stream_that_may_stand_on_the_wrong_kv_is_broken_off(
    policy: str, began: str, asked: Any, goes_on: bool
) -> None:
    """Of a plain answer that takes longer than its lease, which others overtake."""
    late, on = asyncio.Event(), asyncio.Event()
    expired = "vllm:nixl_num_kv_expired_reqs_total{} 1.0\n"

    async def decode(request: Received, wire: Wire) -> None:
        if not request.target.startswith(COMPLETIONS) or request.json()["model"] != "m":
            await wire.answer(404, b"{}")
        elif request.json().get("stream"):
            await wire.start_stream()
            await wire.chunk(b'data: {"choices":[{"text":"a"}]}\n\n')
            await on.wait()
            await wire.chunk(b"data: [DONE]\n\n")
            await wire.chunk(b"")
        else:
            await late.wait()
            await completed()(request, wire)

    async with (
        Engine(prefilled()) as p,
        Engine(decode) as d,
        scripted([p], [d], pd={"kv_lease_s": LEASE_S}, health=NEVER_MARKED, policy=policy) as server,
    ):
        plain, stream = await Client.connect(server.url), await Client.connect(server.url)
        whole = {**BODY, "prompt": "one two three " * 40}
        if began == "after":
            await plain.send(COMPLETIONS, whole)
            await until(lambda: len(d.received) == 1)
            await asyncio.sleep(LEASE_S)
        await stream.send(COMPLETIONS, {**BODY, "prompt": asked, "stream": True})
        assert (await stream.head())[0] == 200
        await stream.chunk()
        if began == "before":
            await plain.send(COMPLETIONS, whole)
            await until(lambda: len(d.received) == 2)
            await asyncio.sleep(LEASE_S)
        p.metrics = expired
        late.set()
        answer = await plain.receive()
        assert (answer.status, answer.code) == (502, "handoff_expired")
        on.set()
        said = await stream.chunk()
        assert said == b"data: [DONE]\n\n" if goes_on else b'"code":"spoilt_cache"' in said
        plain.close()
        stream.close()
        await until(lambda: not server._pd.streams._by_member)


@pytest.mark.parametrize(("asked", "status"), [("one two three " * 40, 503), ("four five six " * 40, 200)])
async def test_an_answer_that_had_not_begun_is_lost_only_where_it_shares_the_prompt(
    asked: str, status: int
) -> None:
    """There is no other worker."""
    come = [asyncio.Event(), asyncio.Event()]

    async def decode(request: Received, wire: Wire) -> None:
        if not request.target.startswith(COMPLETIONS) or request.json()["model"] != "m":
            await wire.answer(404, b"{}")
            return
        await come[request.json()["user"]].wait()
        await completed()(request, wire)

    async with (
        Engine(prefilled()) as p,
        Engine(decode) as d,
        scripted(
            [p], [d], pd={"kv_lease_s": LEASE_S}, health=NEVER_MARKED, policy="prefix_affinity"
        ) as server,
    ):
        first, second = await Client.connect(server.url), await Client.connect(server.url)
        await first.send(COMPLETIONS, {**BODY, "prompt": "one two three " * 40 + "end", "user": 0})
        await until(lambda: len(d.received) == 1)
        await asyncio.sleep(LEASE_S)
        await second.send(COMPLETIONS, {**BODY, "prompt": asked, "user": 1})
        await until(lambda: len(d.received) == 2)
        p.metrics = "vllm:nixl_num_kv_expired_reqs_total{} 1.0\n"
        come[0].set()
        assert (await first.receive()).status == 502
        assert member_of(server, d).state is State.SPOILT
        p.metrics = "vllm:nixl_num_kv_expired_reqs_total{} 0.0\n"  # the second one's own was in time
        come[1].set()
        answer = await second.receive()
        assert answer.status == status
        first.close()
        second.close()
        await until(lambda: member_of(server, d).state is State.READY)
        assert not server._pd.streams.is_suspect(member_of(server, d), NO_PROMPT, monotonic())


def test_what_is_known_of_wrong_kv_is_bounded() -> None:
    streams, one = Streams(), member("http://d:1")
    for number in range(3 * MAX_WRONG):
        streams.break_off(one, 0.0, keyed(number))
    assert len(streams._wrong[one]) == MAX_WRONG + 1
    assert streams.is_suspect(one, keyed(-1), 0.0), "there may be more than is known"
    one.load.charge(0.0)  # somebody whom the worker was given before
    streams.cured(one, 5.0)
    assert [streams.is_suspect(one, keyed(2), chosen_s) for chosen_s in (4.0, 6.0)] == [True, False]
    streams.break_off(one, 0.0, keyed(1))
    assert [streams.is_suspect(one, keyed(number), 6.0) for number in (1, 2)] == [True, False]
    streams.cured(one, 7.0)
    for number in range(3 * MAX_WRONG):
        streams.break_off(one, 0.0, keyed(number))
        streams.cured(one, 8.0 + number)
    assert len(streams._wrong[one]) <= MAX_WRONG + 1
    streams.gone(one)
    assert not streams._wrong


def keyed(number: int) -> Prompt:
    keys = PromptKeys(KeyMode.BYTES, [number, 10**6 + number], 16, 32)
    return Prompt(({16: keys},), KeyMode.BYTES)
