"""A client leaves in each phase of a split request: both legs end, and no KV stays."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvroute.router.pd.service import HEARD_S
from tests.kit import HANG_S, Client, Engine, Received, Wire, answer_ok, until
from tests.loadtests.pd_kit import pd
from tests.router.pd.kit import COMPLETIONS, HANDED, Bench, bench, prefilled, scripted

ALL = ["nixl", "mooncake", "sglang", "shared-storage", "p2p-nccl"]
SEQUENTIAL = ["nixl", "shared-storage", "p2p-nccl"]
LONG = 600.0


def live(one: Bench) -> tuple[bool, bool]:
    """Whether prefill and decode engines have anything to do."""
    return any(engine.live for engine in one.prefill), any(engine.live for engine in one.decode)


async def leave(one: Bench, when: Callable[[], bool], *, stream: bool) -> None:
    """Ask, wait for a phase, and be gone."""
    client = await one.begin(stream=stream)
    await until(when)
    client.abort()
    await until(lambda: live(one) == (False, False))
    members = one.server.registry.members.values()
    await until(lambda: not any(member.requests for member in members))


@pytest.mark.parametrize("connector", ALL)
async def test_while_prefill_runs(connector: str) -> None:
    async with bench(connector, pd={"prefill_grace_s": 0.05}) as one:
        one.prefill[0].faults.set({"hang": True})
        both = connector not in SEQUENTIAL
        for stream in (False, True):
            await leave(one, lambda: live(one) == (True, both), stream=stream)
        assert one.prefill[0].journal.totals["aborted"] == 2
        assert one.decode[0].journal.totals["aborted"] == 2 * both
        assert one.server.metrics.disconnects.value("waiting") == 2


@pytest.mark.parametrize("connector", ALL)
async def test_while_the_kv_is_on_its_way(connector: str) -> None:
    async with bench(connector) as one:
        one.decode[0].faults.set({"handoff_delay": LONG})
        finished = connector != "sglang"  # whose prefill answers once its KV has moved
        count = 0

        def handed() -> bool:
            ended = one.prefill[0].journal.totals["finished"] == count
            held = pd(one.prefill[0])["held"]["requests"] == 1
            return live(one) == (not finished, True) and (ended if finished else held)

        for stream in (False, True):
            count += 1
            await leave(one, handed, stream=stream)
        assert one.decode[0].journal.totals["aborted"] == 2
        await one.idle()
        assert not {"pulled", "expired"} & one.released().keys()


@pytest.mark.parametrize("connector", ALL)
async def test_while_decode_runs(connector: str) -> None:
    async with bench(connector) as one:
        one.decode[0].faults.set({"hang_at": 2})
        client = await one.begin(stream=True)
        assert (await client.head())[0] == 200
        client.abort()
        await until(lambda: one.decode[0].journal.totals["aborted"] == 1)
        await until(lambda: live(one) == (False, False))
        assert one.server.metrics.disconnects.value("streaming") == 1
        if connector in ("nixl", "mooncake", "sglang"):
            assert one.released() == {"pulled": 1}


async def test_when_prefill_s_answer_is_there_and_decode_was_not_told() -> None:
    """Its KV is let go by a decode worker, which is told whose it is."""
    async with Engine(prefilled()) as p, Engine() as d, scripted([p], [d]) as server:
        (member,) = (one for one in server.registry.members.values() if one.endpoint.url == d.url)
        member.pool.take_idle = lambda: None  # type: ignore[method-assign]
        connect, waits = member.pool.connect, [True]

        async def connect_never() -> object:
            if waits:
                waits.clear()
                client.abort()
                await until(lambda: False)
            return await connect()

        member.pool.connect = connect_never  # type: ignore[method-assign, assignment]
        client = await Client.connect(server.url)
        await client.send(COMPLETIONS, {"model": "m", "prompt": "x"})
        await until(lambda: bool(d.received))
        assert d.received[0].json() == {
            "model": "kvroute-release",
            "prompt": "x",
            "max_tokens": 1,
            "kv_transfer_params": HANDED,
        }


async def test_when_prefill_s_answer_is_on_its_way() -> None:
    """What its worker had said by the time that it is told is heard out: only that names its KV."""
    asked = [False]

    async def prefill(request: Received, wire: Wire) -> None:
        asked[0] = True
        await wire.eof()
        wire.closed = True
        await prefilled()(request, wire)

    at_once: dict[str, Any] = {"prefill_grace_s": 0}
    async with Engine(prefill) as p, Engine() as d, scripted([p], [d], pd=at_once) as server:
        client = await Client.connect(server.url)
        await client.send(COMPLETIONS, {"model": "m", "prompt": "x"})
        await until(lambda: asked[0])
        client.abort()
        await until(lambda: bool(d.received))
        assert d.received[0].json()["kv_transfer_params"] == HANDED
        assert [one.json()["model"] for one in d.received] == ["kvroute-release"] * len(d.received)
        await until(lambda: not any(one.requests for one in server.registry.members.values()))


async def test_a_prefill_that_ends_soon_is_not_cut_off() -> None:
    """An engine that is told in the step that ends a prefill keeps the KV, and answers nobody."""
    asked, left = asyncio.Event(), asyncio.Event()

    async def prefill(request: Received, wire: Wire) -> None:
        asked.set()
        await left.wait()
        with pytest.raises(TimeoutError):
            await wire.eof(within_s=0.2)
        await prefilled()(request, wire)

    grace = {"prefill_grace_s": HANG_S}
    async with Engine(prefill) as p, Engine() as d, scripted([p], [d], pd=grace) as server:
        client = await Client.connect(server.url)
        await client.send(COMPLETIONS, {"model": "m", "prompt": "x"})
        await asked.wait()
        client.abort()
        await until(lambda: server.metrics.disconnects.value("waiting") == 1)
        left.set()
        await until(lambda: bool(d.received))
        assert d.received[0].json()["kv_transfer_params"] == HANDED
        assert len(p.received) == 1
        await until(lambda: not any(one.requests for one in server.registry.members.values()))


async def test_a_gateway_that_stops_gives_no_more_grace() -> None:
    asked = asyncio.Event()

    async def prefill(request: Received, wire: Wire) -> None:
        asked.set()
        await wire.eof()
        wire.closed = True
        await prefilled()(request, wire)

    grace = {"prefill_grace_s": HANG_S}
    async with Engine(prefill) as p, Engine() as d, scripted([p], [d], pd=grace) as server:
        client = await Client.connect(server.url)
        await client.send(COMPLETIONS, {"model": "m", "prompt": "x"})
        await asked.wait()
        client.abort()
        await until(lambda: len(server._pd.releaser) == 1)
        await server._pd.releaser.stop(HANG_S)
        assert d.received[0].json()["kv_transfer_params"] == HANDED
        assert len(server._pd.releaser) == 0


async def test_mooncake_s_kv_is_let_go_whether_prefill_was_over_or_not() -> None:
    """Its name is the gateway's own. An engine that hears of a client that left may be done already."""

    async def hang(request: Received, wire: Wire) -> None:
        if request.target == "/query":
            await wire.answer(200, b'{"0":{"engine_id":"e","worker_addr":{}}}')
        elif request.json()["model"] == "m":
            await wire.eof()

    async with Engine(hang) as p, Engine(hang) as d:
        workers = [
            {"url": p.url, "role": "prefill", "bootstrap_port": p.port},
            {"url": d.url, "role": "decode"},
        ]
        async with scripted([p], [d], "mooncake", workers=workers) as server:
            client = await Client.connect(server.url)
            await client.send(COMPLETIONS, {"model": "m", "prompt": "x"})
            await until(lambda: len(p.received) == 2 and len(d.received) == 1)
            client.abort()
            await until(lambda: len(d.received) == 2)
            leg, release = (one.json() for one in d.received)
            assert release["model"] == "kvroute-release"
            assert release["kv_transfer_params"] == leg["kv_transfer_params"]
            d.script = answer_ok


async def test_what_decode_may_be_fetching_is_let_go_once_it_has_heard_that_nobody_waits() -> None:
    """Blocks that are freed under its hands would stay in its cache with whatever is in them then."""

    async def hang(request: Received, wire: Wire) -> None:
        await (wire.eof() if request.json()["model"] == "m" else wire.answer(404, b"{}"))

    async with Engine(prefilled()) as p, Engine(hang) as d, scripted([p], [d]) as server:
        client = await Client.connect(server.url)
        await client.send(COMPLETIONS, {"model": "m", "prompt": "x"})
        await until(lambda: len(d.received) == 1)
        left_s = time.monotonic()
        client.abort()
        await until(lambda: len(d.received) >= 2)
        assert d.received[1].json()["kv_transfer_params"] == HANDED
        assert d.received[1].at_s - left_s >= 0.9 * HEARD_S
