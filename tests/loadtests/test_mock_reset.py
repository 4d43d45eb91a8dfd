"""A reset of the prefix cache as vLLM 0.32 answers it: while requests run, and while KV is on its way."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvroute.loadtests.mock_engine import MockEngine, MockFleet
from tests.kit import until
from tests.loadtests.pd_kit import Legs, check, options, right_text, text

RESET = "/reset_prefix_cache"
RUNNING = RESET + "?reset_running_requests=true"


async def reset(legs: Legs, engine: MockEngine, path: str) -> tuple[int, Any]:
    answer = await legs.client.post(engine.url + path)
    return answer.status_code, answer.json() if answer.status_code == 200 else None


@pytest.mark.parametrize("speed", [math.inf, 100.0])
async def test_requests_that_run_stand_in_its_way_or_are_computed_again(speed: float) -> None:
    async with MockFleet(options("nixl", speed=speed)) as fleet, Legs(fleet) as legs:
        engine = fleet.engines[1]
        assert text(await legs.post(1)) == right_text()
        assert await reset(legs, engine, RESET) == (200, {"success": True})
        assert engine.scheduler.cache.resident_blocks == 0
        runs = legs.begin(1, "gap=0.05" if speed == math.inf else "", max_tokens=300)
        await until(lambda: bool(engine.scheduler.decoding))
        assert await reset(legs, engine, RESET) == (200, {"success": False})
        assert engine.scheduler.cache.resident_blocks > 0
        assert await reset(legs, engine, RUNNING) == (200, {"success": True})
        assert engine.scheduler.totals.preemptions == 1
        if speed != math.inf:
            assert text(await runs) == right_text(max_tokens=300)
        else:
            await legs.leave(runs)
        await until(lambda: not engine.live)
        check(fleet)


async def test_kv_on_its_way_makes_a_reset_of_all_fail() -> None:
    async with MockFleet(options("nixl")) as fleet, Legs(fleet) as legs:
        engine = fleet.engines[1]
        params = await legs.prefill()
        fetches = legs.begin(1, "handoff_delay=0.2", kv_transfer_params=params)
        await until(lambda: bool(engine.scheduler.receiving))
        assert await reset(legs, engine, RESET) == (200, {"success": False})
        assert (await reset(legs, engine, RUNNING))[0] == 500
        assert text(await fetches) == right_text()
        assert await reset(legs, engine, RUNNING) == (200, {"success": True})
        check(fleet)


async def test_there_is_none_but_in_development_mode() -> None:
    async with MockFleet(options("nixl", development=False)) as fleet, Legs(fleet) as legs:
        for path in (RESET, RUNNING):
            assert (await reset(legs, fleet.engines[1], path))[0] == 404
        assert (await legs.client.get(fleet.urls[1] + "/server_info?config_format=json")).status_code == 404
