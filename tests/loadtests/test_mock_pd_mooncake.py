"""The mock engine's Mooncake side: two requests that meet by a transfer id, in either order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from kvroute.loadtests.mock_engine import MockFleet
from tests.kit import until
from tests.loadtests.pd_kit import PROMPT, Legs, check, options, pd, right_text, text
from tests.loadtests.virtual_time import run_virtually

ID = "xfer-1"


@pytest.fixture
async def fleet() -> AsyncIterator[MockFleet]:
    async with MockFleet(options("mooncake")) as fleet:
        yield fleet
        check(fleet)


@pytest.fixture
async def legs(fleet: MockFleet) -> AsyncIterator[Legs]:
    async with Legs(fleet) as legs:
        yield legs


def to_prefill(id: str = ID, **more: Any) -> dict[str, Any]:
    params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": id}
    return {"max_tokens": 1, "kv_transfer_params": params | more}


def to_decode(fleet: MockFleet, id: str = ID, **more: Any) -> dict[str, Any]:
    params = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_bootstrap_addr": fleet.urls[0],
        "remote_engine_id": fleet.engines[0].pd.engine_id,
        "transfer_id": id,
    }
    return {"kv_transfer_params": params | more}


def freed(fleet: MockFleet) -> dict[str, int]:
    """How holds ended, and that no block is kept."""
    section = pd(fleet.engines[0])
    assert section["held"]["blocks"] == 0
    return {why: count for why, count in section["released_by"].items() if count}


async def waits(fleet: MockFleet, engine: int = 1, requests: int = 1) -> None:
    """Until decode requests wait for their KV."""
    await until(lambda: len(fleet.engines[engine].scheduler.receiving) == requests)


async def test_the_bootstrap_server_knows_the_engine(fleet: MockFleet, legs: Legs) -> None:
    answer = (await legs.client.get(fleet.urls[0] + "/query")).json()
    assert answer["0"]["engine_id"] == fleet.engines[0].pd.engine_id
    assert (await legs.client.get(fleet.urls[1] + "/query")).status_code == 404
    before = answer["0"]["engine_id"]
    await fleet.engines[0].restart()
    assert (await legs.client.get(fleet.urls[0] + "/query")).json()["0"]["engine_id"] != before


async def test_prefill_first(fleet: MockFleet, legs: Legs) -> None:
    leg = await legs.post(0, **to_prefill())
    assert "kv_transfer_params" not in leg.json()
    assert pd(fleet.engines[0])["stranded_blocks"] == 6
    answer = await legs.post(1, **to_decode(fleet))
    assert text(answer) == right_text()
    assert answer.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": len(PROMPT)}
    assert freed(fleet) == {"pulled": 1}
    assert fleet.engines[1].scheduler.totals.prefill_tokens == 0


async def test_decode_first(fleet: MockFleet, legs: Legs) -> None:
    task = legs.begin(1, **to_decode(fleet))
    await waits(fleet)
    assert (await legs.post(0, **to_prefill())).status_code == 200
    assert text(await task) == right_text()
    assert freed(fleet) == {"pulled": 1}


async def test_many_at_once(fleet: MockFleet, legs: Legs) -> None:
    prompts = [[seed] * 40 for seed in range(8)]
    tasks = [legs.begin(1, prompt=one, **to_decode(fleet, f"x{i}")) for i, one in enumerate(prompts)]
    others = [legs.begin(0, prompt=one, **to_prefill(f"x{i}")) for i, one in enumerate(prompts)]
    assert [text(one) for one in await asyncio.gather(*tasks)] == [right_text(one) for one in prompts]
    await asyncio.gather(*others)
    assert freed(fleet) == {"pulled": 8}


def test_a_stale_engine_id_waits_for_its_own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        of = options("mooncake", kv_lease_s=480.0, kv_load_failure="fail")
        async with MockFleet(of) as fleet, Legs(fleet) as legs:
            legs.client.timeout = httpx.Timeout(1000)
            body = to_decode(fleet)
            await fleet.engines[0].restart()
            begun_s = asyncio.get_running_loop().time()
            answer = await legs.post(1, **body)
            assert asyncio.get_running_loop().time() - begun_s == pytest.approx(480, abs=1)
            assert answer.status_code == 500
            # One that waits for a prefill request that never comes does so too.
            begun_s = asyncio.get_running_loop().time()
            assert (await legs.post(1, **to_decode(fleet))).status_code == 500
            assert asyncio.get_running_loop().time() - begun_s == pytest.approx(480, abs=1)
            await legs.post(0, **to_prefill("late"))
            await asyncio.sleep(481)
            assert freed(fleet) == {"expired": 1}

    run_virtually(main(), monkeypatch)


async def test_a_stale_engine_id_waits_though_the_kv_is_there(fleet: MockFleet, legs: Legs) -> None:
    await legs.post(0, **to_prefill())
    task = legs.begin(1, **to_decode(fleet, remote_engine_id="of another life"))
    await waits(fleet)
    assert pd(fleet.engines[0])["stranded_blocks"] == 6
    await legs.leave(task)
    await until(lambda: not fleet.engines[1].live)
    assert pd(fleet.engines[0])["stranded_blocks"] == 6, "nobody was told"


def test_a_lease_does_not_run_during_the_push(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with MockFleet(options("mooncake", kv_lease_s=5.0)) as fleet, Legs(fleet) as legs:
            await legs.post(0, **to_prefill())
            assert text(await legs.post(1, "handoff_delay=9", **to_decode(fleet))) == right_text()
            assert freed(fleet) == {"pulled": 1}

    run_virtually(main(), monkeypatch)


async def test_two_decodes_of_one_transfer_are_loud(fleet: MockFleet, legs: Legs) -> None:
    await legs.post(0, **to_prefill())
    tasks = [legs.begin(1, "handoff_delay=0.1", **to_decode(fleet)) for _ in range(2)]
    await until(lambda: pd(fleet.engines[0])["repeated_ids"] == [ID])
    done, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    assert text(done.pop().result()) == right_text()
    await legs.leave(left.pop())


async def test_nobody_at_the_bootstrap_address_is_a_failed_load(fleet: MockFleet, legs: Legs) -> None:
    for address in ("http://127.0.0.1:1", "x:y", fleet.urls[1]):
        answer = await legs.post(1, **to_decode(fleet, remote_bootstrap_addr=address))
        assert text(answer) == right_text()
    assert pd(fleet.engines[1])["failed_loads"] == 3


async def test_a_decode_client_that_leaves_has_what_comes_freed(fleet: MockFleet, legs: Legs) -> None:
    task = legs.begin(1, **to_decode(fleet))
    await waits(fleet)
    await legs.leave(task)
    await until(lambda: not fleet.engines[1].live)
    await legs.post(0, **to_prefill())
    assert freed(fleet) == {"released": 1}


async def test_a_decode_client_that_leaves_during_the_push_frees(fleet: MockFleet, legs: Legs) -> None:
    await legs.post(0, **to_prefill())
    task = legs.begin(1, "handoff_delay=60", **to_decode(fleet))
    await waits(fleet)
    await legs.leave(task)
    await until(lambda: not fleet.engines[1].live)
    assert freed(fleet) == {"released": 1}


async def test_a_decode_engine_that_rejects_frees_before_and_after(fleet: MockFleet, legs: Legs) -> None:
    await legs.post(0, **to_prefill("a"))
    assert (await legs.post(1, model="nobody", **to_decode(fleet, "a"))).status_code == 404
    assert freed(fleet) == {"released": 1}
    assert (await legs.post(1, model="nobody", **to_decode(fleet, "b"))).status_code == 404
    await legs.post(0, **to_prefill("b"))
    assert freed(fleet) == {"released": 2}


async def test_a_decode_engine_that_dies_leaves_the_lease_running(fleet: MockFleet, legs: Legs) -> None:
    await legs.post(0, **to_prefill())
    task = legs.begin(1, "handoff_delay=60", **to_decode(fleet))
    await waits(fleet)
    await fleet.engines[1].restart()
    await asyncio.gather(task, return_exceptions=True)
    assert pd(fleet.engines[0])["stranded_blocks"] == 6
    assert next(iter(fleet.engines[0].scheduler.held)) is not None
    assert text(await legs.post(1, **to_decode(fleet))) == right_text()
    assert freed(fleet) == {"pulled": 1}


async def test_a_prefill_client_that_leaves_hangs_the_decode(fleet: MockFleet, legs: Legs) -> None:
    p = fleet.engines[0]
    filler = legs.begin(0, "ttft=60", prompt=[1] * 960, max_tokens=16)
    await until(lambda: len(p.live) == 1)
    decode = legs.begin(1, **to_decode(fleet))
    await waits(fleet)
    prefill = legs.begin(0, **to_prefill())
    await until(lambda: p.waiting == 1)
    await legs.leave(prefill)
    await until(lambda: p.waiting == 0)
    await legs.leave(filler)
    assert not decode.done()
    await legs.leave(decode)


async def test_a_repeated_transfer_id_is_loud(fleet: MockFleet, legs: Legs) -> None:
    await legs.post(0, **to_prefill())
    await legs.post(0, **to_prefill())
    assert pd(fleet.engines[0])["repeated_ids"] == [ID]
    assert pd(fleet.engines[0])["held"]["blocks"] == 12
    assert text(await legs.post(1, **to_decode(fleet))) == right_text()
    assert pd(fleet.engines[0])["stranded_blocks"] == 6, "the engine has lost sight of the first"
    task = legs.begin(1, **to_decode(fleet))
    await waits(fleet)
    assert pd(fleet.engines[0])["repeated"] == 2
    await legs.leave(task)


async def test_the_kv_of_another_prompt_is_wrong_text(fleet: MockFleet, legs: Legs) -> None:
    await legs.post(0, prompt=PROMPT[::-1], **to_prefill())
    assert text(await legs.post(1, **to_decode(fleet))) != right_text()
    assert [item["why"] for item in pd(fleet.engines[1])["wrong_text_ids"]] == ["foreign"]


@pytest.mark.parametrize("engine", [0, 1])
async def test_the_wrong_role_ends_the_process(fleet: MockFleet, legs: Legs, engine: int) -> None:
    body = to_prefill() if engine else to_decode(fleet)
    with pytest.raises(httpx.TransportError):
        await legs.post(engine, **body)
    assert pd(fleet.engines[engine])["deaths"] == 1


async def test_a_prefill_without_transfer_id_keeps_nothing(fleet: MockFleet, legs: Legs) -> None:
    await legs.post(0, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    assert pd(fleet.engines[0])["held_total"] == 0
