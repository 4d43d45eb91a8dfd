"""The mock engine heeds what a request says of its KV: what to offload, load and pull, and whose it is."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from kvroute.loadtests.mock_engine import MockFleet, MockOptions
from kvroute.loadtests.mock_engine.kv_hints import NO_HINTS, KvHints, read_hints
from kvroute.loadtests.mock_engine.routes import truth
from tests.kit import HANG_S

BLOCK = 16
PROMPT = list(range(100, 100 + 10 * BLOCK))
"""Ten full blocks."""


@pytest.fixture
async def fleet() -> AsyncIterator[MockFleet]:
    options = MockOptions(engines=2, speed=math.inf, kv_blocks=16, cpu_blocks=200)
    async with MockFleet(options) as fleet:
        yield fleet
        for engine in fleet.engines:
            assert engine.tiers is not None
            assert not engine.tiers._kept_out
            assert not engine.tiers._not_loaded
            engine.scheduler.check_integrity()


async def ask(
    fleet: MockFleet, engine: int, prompt: list[int], faults: str = "", **fields: Any
) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 1, **fields}
    async with httpx.AsyncClient(base_url=fleet.urls[engine], timeout=HANG_S, trust_env=False) as client:
        return await client.post("/v1/completions", json=body, headers={"x-mock-fault": faults})


async def cached(fleet: MockFleet, engine: int, prompt: list[int], **fields: Any) -> int:
    answer = await ask(fleet, engine, prompt, **fields)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def below(fleet: MockFleet, engine: int = 0) -> int:
    """Blocks in the CPU tier."""
    return len(truth(fleet.engines[engine])["kv"]["lower_tiers"]["CPU"]["hashes"])


async def push_out(fleet: MockFleet) -> None:
    """Fill the first engine's GPU with something else."""
    await cached(fleet, 0, [9] * 15 * BLOCK, kv_transfer_params={"max_offload_tokens": 0})


@pytest.mark.parametrize(
    ("params", "blocks"),
    [
        (None, 10),
        ({}, 10),
        ({"max_offload_tokens": 0}, 0),
        ({"max_offload_tokens": 3 * BLOCK + 15}, 3),
        ({"max_offload_tokens": True}, 10),
        ({"max_offload_tokens": -1}, 10),
    ],
)
async def test_only_so_many_tokens_go_below(fleet: MockFleet, params: object, blocks: int) -> None:
    await cached(fleet, 0, PROMPT, kv_transfer_params=params)
    assert below(fleet) == blocks
    assert truth(fleet.engines[0])["kv"]["resident_blocks"] == 10


async def test_what_is_not_to_be_loaded_is_computed(fleet: MockFleet) -> None:
    await cached(fleet, 0, PROMPT)
    await push_out(fleet)
    assert await cached(fleet, 0, PROMPT, kv_transfer_params={"max_load_tokens": 0}) == 0
    await push_out(fleet)
    assert (
        await cached(fleet, 0, PROMPT) == 9 * BLOCK
    )  # the last block holds the token that is always computed


def source(fleet: MockFleet, engine: int, id: str = "t1") -> dict[str, Any]:
    port = fleet.engines[engine].port
    return {"remote_kv_source": {"kv_request_id": id, "remote_host": "127.0.0.1", "remote_port": port}}


async def test_a_pull_brings_what_the_peer_holds_below(fleet: MockFleet) -> None:
    await cached(fleet, 1, PROMPT, kv_transfer_params={"max_offload_tokens": 6 * BLOCK})
    assert await cached(fleet, 0, PROMPT, kv_transfer_params=source(fleet, 1)) == 6 * BLOCK
    assert [entry.pulled_tokens for entry in fleet.engines[0].journal.entries.values()] == [6 * BLOCK]
    assert await cached(fleet, 0, [*PROMPT[: 6 * BLOCK], *[7] * 40], kv_transfer_params=source(fleet, 1)) == (
        6 * BLOCK
    )
    assert list(fleet.engines[0].journal.entries.values())[-1].pulled_tokens == 0  # all of it was here


async def test_an_unknown_peer_or_half_a_source_is_no_pull(fleet: MockFleet) -> None:
    await cached(fleet, 1, PROMPT)
    for params in (
        {"remote_kv_source": {"kv_request_id": "x", "remote_host": "127.0.0.1", "remote_port": 1}},
        source(fleet, 1, id=""),
        {"remote_kv_source": "peer"},
    ):
        assert await cached(fleet, 0, PROMPT[:64] + [len(str(params))] * 64, kv_transfer_params=params) == 0
        fleet.engines[0].scheduler.clear()


async def test_a_pull_can_be_late_and_can_fail(fleet: MockFleet) -> None:
    await cached(fleet, 1, PROMPT)
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    answer = await ask(fleet, 0, PROMPT, "pull_delay=0.1", kv_transfer_params=source(fleet, 1))
    assert answer.status_code == 200
    assert loop.time() - started_s >= 0.1
    answer = await ask(fleet, 0, PROMPT, "pull_fail", kv_transfer_params=source(fleet, 1))
    assert answer.status_code == 500
    assert (await ask(fleet, 0, PROMPT, "pull_fail")).status_code == 200


async def test_the_truth_shows_hints_and_closed_sessions(fleet: MockFleet) -> None:
    async with httpx.AsyncClient(base_url=fleet.urls[0], timeout=HANG_S, trust_env=False) as client:
        await client.post("/v1/completions", json={"prompt": "a", "priority": 0, "session_id": "s"})
        assert (await client.post("/close_session", json={"session_id": "s"})).status_code == 200
        assert (await client.post("/close_session", json={"session": "s"})).status_code == 400
        debug = (await client.get("/debug")).json()
    assert [entry["hints"] for entry in debug["requests"]["outcomes"].values()] == [
        {"priority": 0, "session_id": "s"}
    ]
    assert debug["closed_sessions"] == ["s"]


def test_hints_of_other_types_are_not_given() -> None:
    assert read_hints({}) is NO_HINTS
    odd = {"kv_transfer_params": [1], "priority": "high", "session_id": 5}
    assert read_hints(odd) == NO_HINTS
    params = {"max_load_tokens": 0, "remote_kv_source": {"remote_port": "x"}}
    assert read_hints({"kv_transfer_params": params}) == KvHints(max_load_tokens=0)
