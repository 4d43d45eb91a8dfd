"""The mock engine's shared storage: what one engine has computed, the other reads."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from kvroute.loadtests.mock_engine import MockFleet
from tests.kit import until
from tests.loadtests.pd_kit import BLOCK, PROMPT, Legs, check, options, pd, right_text, text

WHOLE = len(PROMPT) // BLOCK * BLOCK


@pytest.fixture
async def fleet() -> AsyncIterator[MockFleet]:
    async with MockFleet(options("shared-storage")) as fleet:
        yield fleet
        check(fleet)


@pytest.fixture
async def legs(fleet: MockFleet) -> AsyncIterator[Legs]:
    async with Legs(fleet) as legs:
        yield legs


@pytest.mark.parametrize("restart", [False, True])
async def test_decode_reads_what_prefill_has_stored(fleet: MockFleet, legs: Legs, restart: bool) -> None:
    await legs.post(0, max_tokens=1)
    assert not fleet.engines[0].scheduler.held
    if restart:
        await fleet.engines[0].restart()
    answer = await legs.post(1)
    assert text(answer) == right_text()
    assert answer.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": WHOLE}
    assert pd(fleet.engines[1])["received_tokens"] == WHOLE


async def test_a_prompt_is_found_whole_or_not_at_all(fleet: MockFleet, legs: Legs) -> None:
    await legs.post(0, max_tokens=1)
    assert text(await legs.post(1, prompt=PROMPT[: 3 * BLOCK])) == right_text(PROMPT[: 3 * BLOCK])
    assert text(await legs.post(1, cache_salt="s")) == right_text()
    await legs.post(0, prompt=[5] * BLOCK, max_tokens=1)
    assert text(await legs.post(1, prompt=[5] * BLOCK)) == right_text([5] * BLOCK)
    assert pd(fleet.engines[1])["received_tokens"] == 0


async def test_a_consumer_does_not_store_nor_a_producer_read(fleet: MockFleet, legs: Legs) -> None:
    await legs.post(1)
    assert fleet.engines[1].scheduler.clear()
    await legs.post(1)
    assert pd(fleet.engines[1])["received_tokens"] == 0
    await legs.post(0, max_tokens=1)
    assert fleet.engines[0].scheduler.clear()
    await legs.post(0, max_tokens=1)
    assert pd(fleet.engines[0])["received_tokens"] == 0


async def test_decode_before_prefill_is_over_breaks_the_order(fleet: MockFleet, legs: Legs) -> None:
    filler = legs.begin(0, "ttft=60", prompt=[1] * 60 * BLOCK, max_tokens=BLOCK)
    await until(lambda: len(fleet.engines[0].live) == 1)
    task = legs.begin(0, max_tokens=1)
    await until(lambda: fleet.engines[0].waiting == 1)
    assert text(await legs.post(1)) == right_text()
    assert pd(fleet.engines[1])["order_violations"] == 1
    await legs.leave(filler)
    await task


async def test_on_the_clock() -> None:
    async with MockFleet(options("shared-storage", speed=100.0)) as fleet, Legs(fleet) as legs:
        await legs.post(0, max_tokens=1)
        assert text(await legs.post(1)) == right_text()
        assert pd(fleet.engines[1])["received_tokens"] == WHOLE
        assert fleet.engines[0].scheduler.cache.used_ratio == 0
