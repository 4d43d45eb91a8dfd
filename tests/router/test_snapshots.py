"""What a gateway knew before it stopped: from its file or from Redis, checked with the engines."""

from __future__ import annotations

import math
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from kvroute.loadtests.mock_engine import MockFleet, MockOptions
from tests.kit import until
from tests.redis import redis_server
from tests.router.test_exact import Side, side

BODIES = [{"model": "mock", "prompt": [*range(n, n + 320)], "max_tokens": 1} for n in range(0, 4000, 400)]
ENGINES = MockOptions(engines=2, speed=math.inf, kv_events=True, kv_event_replay_batches=2)
"""They forget what they told, so that no replay could bring it all back."""


def counts(this: Side) -> dict[str, int]:
    snapshots = this.server.snapshots
    assert snapshots is not None
    return dict(snapshots.counts)


async def learn(this: Side) -> dict[str, int]:
    """Prompt -> confirmed tokens in all, once every one is confirmed."""
    for body in BODIES:
        await this.send("/v1/completions", body)
        await this.learned(body, 320)
    return await known(this)


async def known(this: Side) -> dict[str, int]:
    found = {}
    for body in BODIES:
        confirmed = await this.confirmed("/v1/completions", body)
        found.update({f"{url} {body['prompt'][0]}": tokens for url, tokens in confirmed.items()})
    return found


@pytest.mark.parametrize("engines_restart", [False, True])
async def test_a_restarted_gateway_is_exact_again(tmp_path: Path, engines_restart: bool) -> None:
    fields: dict[str, Any] = {"conductor": {"snapshot_file": tmp_path / "index"}}
    async with MockFleet(ENGINES) as fleet:
        async with side(fleet=fleet, **fields) as first:
            before = await learn(first)
            assert sum(before.values()) == 320 * len(BODIES)
        if engines_restart:
            for engine in fleet.engines:
                await engine.restart()
        async with side(fleet=fleet, **fields) as second:
            assert counts(second) == {"restored": 2}
            assert await known(second) == (dict.fromkeys(before, 0) if engines_restart else before)


async def test_a_replica_on_a_fresh_machine_takes_what_another_left_in_redis() -> None:
    async with redis_server() as redis, MockFleet(ENGINES) as fleet:
        fields: dict[str, Any] = {"redis": {"url": redis.url}}
        async with side(fleet=fleet, **fields) as first:
            before = await learn(first)
        async with side(fleet=fleet, **fields) as second:
            assert counts(second) == {"restored": 2}
            assert await known(second) == before


async def test_a_snapshot_that_is_none_is_refused_and_the_gateway_learns_anew(tmp_path: Path) -> None:
    path = tmp_path / "index"
    path.write_bytes(b"no snapshot at all")
    async with side(conductor={"snapshot_file": path}) as this:
        assert counts(this) == {"refused_foreign": 1}
        await learn(this)
        await until(this.exact)


@pytest.mark.parametrize("place", ["no such directory", "no temporary directory"])
async def test_no_place_for_a_snapshot_fails_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    async with AsyncExitStack() as stack:
        if place == "no such directory":
            fields: dict[str, Any] = {"conductor": {"snapshot_file": tmp_path / "none" / "index"}}
        else:
            redis = await stack.enter_async_context(redis_server())
            fields = {"redis": {"url": redis.url}}
            monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
        async with side(engines=1, **fields) as this:
            assert counts(this) == {"failed": 1}
            worker, _ = await this.send("/v1/completions", BODIES[0])
            await this.learned(BODIES[0], 320)
            assert worker == this.fleet.urls[0]
