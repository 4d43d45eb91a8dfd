"""KV that grew too old before the only decode worker came to it: one fresh prefill, for the same worker."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvroute.loadtests.mock_engine import Faults
from kvroute.router.workers import State
from tests.kit import Client, Engine, Received, Wire, until
from tests.router.pd.kit import COMPLETIONS, NEVER_MARKED, Bench, bench, completed, prefilled, right, scripted

LEASE_S = 0.5
LATE = {"handoff_delay": 4 * LEASE_S}
STREAM = {"model": "m", "prompt": "x", "max_tokens": 7, "stream": True}


def short(decode: int, **more: Any) -> Any:
    pd = {"kv_lease_s": LEASE_S, **more.pop("pd", {})}
    return bench("nixl", 1, decode, mock={"kv_lease_s": 30.0}, pd=pd, health=NEVER_MARKED, **more)


def asked(one: Bench) -> list[int]:
    return [engine.journal.totals["received"] for engine in (*one.prefill, *one.decode)]


async def test_it_is_done_there_once_more() -> None:
    async with short(1) as one:
        one.decode[0].faults.set({**LATE, "times": 1})
        assert right(await one.ask(stream=True))
        assert asked(one) == [2, 2]
        assert one.count("expired", "wait") == 1
        assert one.count("retries", "decode", "decode_timeout") == 1
        assert one.decode[0].journal.totals["aborted"] == 1
        await until(lambda: one.released() == {"released": 1, "pulled": 1})


async def test_it_is_done_there_only_once_more() -> None:
    async with short(1, retry={"attempts": 9}) as one:
        one.decode[0].faults.set(LATE)
        answer = await one.ask(stream=True)
        assert (answer.status, answer.code) == (504, "decode_timeout")
        assert asked(one) == [2, 2]
        await until(lambda: one.released() == {"released": 2})


async def test_another_decode_worker_goes_before() -> None:
    async with short(2) as one:
        for engine in one.decode:
            engine.faults.set({**LATE, "times": 1})
            engine.faults = one.decode[0].faults
        assert right(await one.ask(stream=True))
        assert asked(one) == [2, 1, 1]


async def test_another_one_that_then_fails_is_not_asked_again() -> None:
    async with short(2, clean=False, retry={"attempts": 9}) as one:
        for engine in one.decode:
            engine.faults.set({**LATE, "times": 1})
            engine.faults = one.decode[0].faults
        client = await one.begin(stream=True)
        await until(lambda: sum(asked(one)[1:]) == 1)
        first, second = sorted(one.decode, key=lambda engine: -engine.journal.totals["received"])
        second.faults = Faults().merged({"close_at": 0})
        answer = await client.receive()
        client.close()
        assert answer.status == 502
        legs = [[request.body for _, request in engine.journal.requests] for engine in (first, second)]
        assert [sum(b'"model":"mock"' in body for body in each) for each in legs] == [1, 1]
        second.faults = Faults()


async def test_what_is_late_for_another_reason_is_not_done_there_again() -> None:
    async with short(1, pd={"kv_lease_s": 30.0, "decode_timeout_s": 0.2}) as one:
        one.decode[0].faults.set({"ttft": 0.4, "times": 1})
        answer = await one.ask(stream=True)
        assert (answer.status, answer.code) == (504, "decode_timeout")
        assert asked(one) == [1, 1]


async def test_all_of_it_is_within_the_request_s_own_time() -> None:
    async with short(1, timeouts={"total_s": 1.5 * LEASE_S}) as one:
        one.decode[0].faults.set(LATE)
        answer = await one.ask(stream=True)
        assert (answer.status, answer.code) == (504, "total_timeout")
        assert asked(one) == [2, 2]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("expired", "status"), [(0, 200), (1, 502)])
async def test_an_answer_is_not_used_where_the_first_leg_may_have_fetched_after_all(
    expired: int, status: int, whole: bool
) -> None:
    """The worker has not told of its end before the lease was over."""
    legs: list[Received] = []
    late = asyncio.Event()

    async def decode(request: Received, wire: Wire) -> None:
        if request.target != COMPLETIONS:
            await wire.answer(404, b"{}")  # no reset
            return
        if request.json()["model"] == "m":
            legs.append(request)
            if len(legs) == 1:
                await wire.eof()
                return
            await late.wait()
        await completed()(request, wire)

    async def prefill(request: Received, wire: Wire) -> None:
        if whole and legs:
            await wire.answer(422, b"{}")
        else:
            await prefilled()(request, wire)

    async with (
        Engine(prefill) as p,
        Engine(decode) as d,
        scripted([p], [d], pd={"kv_lease_s": LEASE_S}, health=NEVER_MARKED) as server,
    ):
        client = await Client.connect(server.url)
        await client.send(COMPLETIONS, STREAM)
        await until(lambda: len(legs) == 2)
        assert ("kv_transfer_params" in legs[1].json()) is not whole
        p.metrics = f"vllm:nixl_num_kv_expired_reqs_total{{}} {expired}.0\n"
        await asyncio.sleep(0.25 * LEASE_S)  # the first lease is over, and 0.8 of the second one is not
        late.set()
        answer = await client.receive()
        client.close()
        assert answer.status == status
        member = next(one for one in server.registry.members.values() if one.endpoint.url == d.url)
        assert member.state is (State.SPOILT if expired else State.READY)
