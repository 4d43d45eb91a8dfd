"""Engines under random traffic whose events are lost, repeated, swapped, late, spoilt and begin anew.

Once it is quiet the index is what the engines hold: nothing more, and nothing less unless it says so.
"""

from __future__ import annotations

import asyncio
import gc
import math
import random
import time
from typing import Any

import pytest

from kvroute.conductor.events import EventFeed, FeedLimits
from kvroute.conductor.index import Holder, PrefixIndex
from kvroute.loadtests.mock_engine import MockFleet, MockOptions
from kvroute.loadtests.mock_engine.faults import Faults
from kvroute.types import KeyMode, PromptKeys, Trust
from tests.conductor.storm import MODEL, Driven, Prompts, known, our_keys
from tests.kit import HANG_S, until

LIMITS = FeedLimits(verify_s=0.1, replay_timeout_s=0.2, retry_s=0.03, waiting_batches=64, parked_s=5.0)
BLOCK = 4
HOLDERS = [Holder("w", 0), Holder("w", 1)]


def storm_faults(dice: random.Random, shape: dict[str, Any]) -> Faults:
    return Faults(
        event_drop=dice.choice((0, 0.1, 0.3)),
        event_duplicate=dice.choice((0, 0.2)),
        event_reorder=dice.choice((0, 0.2)),
        event_malformed=dice.choice((0, 0.05)),
        event_delay=dice.choice((0, 0, 0.01)),
        no_replay=dice.random() < 0.15,
        **shape,
    )


async def storm(seed: int, steps: int) -> None:
    dice = random.Random(seed)
    shape = {name: dice.random() < 0.4 for name in ("event_arrays", "event_digests", "event_pages")}
    options = MockOptions(
        engines=2,
        seed=seed,
        speed=math.inf,
        kv_events=True,
        block_size_tokens=dice.choice((1, BLOCK)),
        kv_blocks=dice.choice((40, 120)),
        kv_event_replay_batches=dice.choice((6, 10_000, 10_000)),
        adapters=("ad1",),
    )
    index = PrefixIndex(2**24, time.monotonic)
    base_bytes = index.bytes_used
    feed = EventFeed(index, limits=LIMITS)
    try:
        async with MockFleet(options) as fleet:
            ranks = [Driven(engine, BLOCK) for engine in fleet.engines]
            for rank in ranks:
                rank.engine.faults = Faults(**shape)
            room = options.capacity_blocks * options.block_size_tokens // BLOCK
            prompts = Prompts(dice, BLOCK, blocks=room // 4)
            late = dice.randrange(steps // 3)
            for step in range(steps):
                if step == late:
                    sources = [
                        type(rank.source)(rank.source.endpoint, rank.source.replay_endpoint, dp_rank=number)
                        for number, rank in enumerate(ranks)
                    ]
                    feed.follow("w", sources, MODEL, min_block_tokens=BLOCK)
                rank = dice.choice(ranks)
                rank.run(prompts.draw(), output=dice.randrange(1, 3 * BLOCK))
                if step % 20 == 0:
                    rank.engine.faults = storm_faults(dice, shape)
                if dice.random() < 0.01:
                    rank.clear()
                if dice.random() < 2 / steps:
                    await rank.engine.restart(dice.choice((0, 0.05)))
                if dice.random() < 0.3:
                    await asyncio.sleep(dice.choice((0, 0.001, 0.005)))
            for rank in ranks:
                rank.run(prompts.draw(), output=1)  # a cleared cache is told with the next step
            await quiet(feed, ranks, shape)
            incomplete = agree(index, feed, ranks, dice, prompts, f"seed {seed}")
            for rank in ranks:
                rank.clear()
                for _ in range(5):
                    rank.run(prompts.draw(), output=1)
            await quiet(feed, ranks, shape)
            assert agree(index, feed, ranks, dice, prompts, f"seed {seed}, cleared") == 0, incomplete
            assert feed.trust("w") is Trust.EXACT
            index.check_integrity()
        feed.unfollow("w")
        while index.sweep():
            pass
        assert index.entries == 0
        assert index.bytes_used <= base_bytes * 2 + 4096, f"seed {seed}"
    finally:
        await feed.close()


async def quiet(feed: EventFeed, ranks: list[Driven], shape: dict[str, Any]) -> None:
    """No more faults, and everything said has arrived."""
    for rank in ranks:
        rank.engine.faults = Faults(**shape)

    def arrived() -> bool:
        health = feed.health("w")
        assert health is not None
        return all(
            holder.last_seq == rank.last_seq and not holder.waiting and "disconnected" not in holder.reasons
            for holder, rank in zip(health.holders, ranks, strict=True)
        )

    async with asyncio.timeout(HANG_S):
        while True:
            await until(arrived, 10.0)
            await feed.settled("w")
            if arrived():  # else a check of what was missed has begun in the meantime
                return


def agree(
    index: PrefixIndex, feed: EventFeed, ranks: list[Driven], dice: random.Random, prompts: Prompts, what: str
) -> int:
    """How many ranks are not complete, and say so; every other equals its engine."""
    health = feed.health("w")
    assert health is not None
    incomplete = 0
    for rank, holder, row in zip(ranks, HOLDERS, health.holders, strict=True):
        truth, found = rank.truth(), known(index, holder)
        assert found <= truth, f"{what}: phantoms {len(found - truth)} of {holder}, {row}"
        if row.trust is Trust.EXACT:
            assert found == truth, f"{what}: {len(truth - found)} missing of {holder}, {row}"
        else:
            incomplete += 1
        for _ in range(20):
            keys = our_keys(prompts.draw(), BLOCK)
            lookup = index.lookup({BLOCK: PromptKeys(KeyMode.TOKENS, keys, BLOCK, len(keys) * BLOCK)})
            tokens = max((match.gpu_tokens for match in lookup if match.holder == holder), default=0)
            real = rank.cached_tokens(keys)
            assert tokens <= real if row.trust is not Trust.EXACT else tokens == real, what
    return incomplete


@pytest.mark.parametrize("seed", range(10))
async def test_after_the_storm_the_index_is_what_the_engines_hold(seed: int) -> None:
    await storm(seed, steps=100)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 130))
async def test_after_a_long_storm(seed: int) -> None:
    await storm(seed, steps=3000)
    gc.collect()
