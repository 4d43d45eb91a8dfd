"""The mock engine's tiers over HTTP and ZMQ, and an index that follows them."""

from __future__ import annotations

import asyncio
import math
import random
from array import array
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
import zmq
import zmq.asyncio

from kvroute.conductor.events.apply import Applier
from kvroute.conductor.events.batches import Batch
from kvroute.conductor.events.decode import decode
from kvroute.conductor.index import Holder, PrefixIndex
from kvroute.conductor.keys import Namespace, token_keys
from kvroute.conductor.tiers.registry import WRITE_BACKS
from kvroute.loadtests.mock_engine import MockFleet, MockOptions
from kvroute.loadtests.mock_engine.block_keys import block_keys, root_key
from kvroute.loadtests.mock_engine.engine import MockEngine
from tests.kit import HANG_S


async def batches_told(client: httpx.AsyncClient) -> list[list[bytes]]:
    """All batches since the engine started, as frames, by its replay socket."""
    source = (await client.get("/kv_event_sources")).json()["0"]
    batches = []
    with zmq.asyncio.Context.instance().socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(source["replay_endpoint"])
        await dealer.send_multipart([b"", bytes(8)])
        while True:
            frames = await asyncio.wait_for(dealer.recv_multipart(), HANG_S)
            if frames[-2] == b"\xff" * 8:
                return batches
            batches.append(frames[-3:])


async def everything_told(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    """All events since the engine started."""
    batches = await batches_told(client)
    return [event for frames in batches for event in msgspec.msgpack.decode(frames[-1])[1]]


async def cached(client: httpx.AsyncClient, letter: str, blocks: int) -> int:
    """Cached tokens that the engine reports for a prompt of so many blocks and a little more."""
    body = {"prompt": letter * (64 * blocks + 4), "max_tokens": 1}
    reply = await client.post("/v1/completions", json=body)
    return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def options(**more: Any) -> MockOptions:
    return MockOptions(speed=math.inf, kv_events=True, kv_blocks=12, cpu_blocks=40, **more)


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with MockFleet(options()) as fleet, httpx.AsyncClient(base_url=fleet.urls[0]) as client:
        yield client


async def test_hits_below_the_gpu_show_in_usage_metrics_and_the_truth(client: httpx.AsyncClient) -> None:
    assert [await cached(client, letter, 10) for letter in "ab"] == [0, 0]
    left = (await client.get("/debug")).json()["kv"]
    assert len(left["lower_tiers"]["CPU"]["hashes"]) == left["lower_tiers"]["CPU"]["stored"] == 20
    assert await cached(client, "a", 10) == 160
    truth = (await client.get("/debug")).json()
    found = truth["tokens"]
    assert found["prefill_cached"] + found["prefill_loaded"] == 160
    assert found["prefill_loaded"] > 0
    metrics = (await client.get("/metrics")).text
    values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line.startswith("vllm:"))
    hits = {name.partition("{")[0]: float(value) for name, value in values.items() if "prefix_cache" in name}
    assert hits["vllm:external_prefix_cache_hits_total"] == found["prefill_loaded"]
    assert hits["vllm:prefix_cache_hits_total"] == found["prefill_cached"]
    asked = hits["vllm:prefix_cache_queries_total"] - hits["vllm:prefix_cache_hits_total"]
    assert hits["vllm:external_prefix_cache_queries_total"] == asked


async def test_events_of_a_tier_come_by_hash_after_those_of_the_gpu(client: httpx.AsyncClient) -> None:
    await cached(client, "a", 3)
    gpu, cpu = await everything_told(client)
    assert (gpu["medium"], gpu["type"]) == ("GPU", "BlockStored")
    assert cpu == {
        "type": "BlockStored",
        "block_hashes": gpu["block_hashes"],
        "parent_block_hash": None,
        "token_ids": [],
        "block_size": 16,
        "lora_id": None,
        "lora_name": None,
        "medium": "CPU",
    }


async def test_a_full_tier_tells_what_it_drops(client: httpx.AsyncClient) -> None:
    for letter in "abcde":
        await cached(client, letter, 10)
    held: set[int] = set()
    for event in await everything_told(client):
        if event["medium"] == "CPU":
            change = held.update if event["type"] == "BlockStored" else held.difference_update
            change(event["block_hashes"])
    truth = (await client.get("/debug")).json()["kv"]["lower_tiers"]["CPU"]
    assert held == set(truth["hashes"])
    assert (len(held), truth["evicted"]) == (40, 10)


async def test_a_reset_empties_the_tier_as_well(client: httpx.AsyncClient) -> None:
    await cached(client, "a", 3)
    await client.post("/reset_prefix_cache")
    assert await cached(client, "a", 3) == 0
    kinds = [(event["type"], event.get("medium")) for event in await everything_told(client)]
    both = [("BlockStored", "GPU"), ("BlockStored", "CPU")]
    assert kinds == [*both, ("AllBlocksCleared", None), *both]


async def test_a_silent_tier_helps_and_says_nothing() -> None:
    silent = options(tier_events=False)
    async with MockFleet(silent) as fleet, httpx.AsyncClient(base_url=fleet.urls[0]) as client:
        hits = [await cached(client, letter, 10) for letter in "aba"]
        told = await everything_told(client)
    assert hits == [0, 0, 160]
    assert {event["medium"] for event in told} == {"GPU"}


async def test_a_restart_forgets_the_tiers() -> None:
    async with MockFleet(options()) as fleet, httpx.AsyncClient(base_url=fleet.urls[0]) as client:
        await cached(client, "a", 10)
        await fleet.engines[0].restart()
        assert await cached(client, "a", 10) == 0


def contiguous(keys: list[int], held: set[int]) -> int:
    return next((count for count, key in enumerate(keys) if key not in held), len(keys)) * 16


def truth(engine: MockEngine, ids: list[int]) -> tuple[int, int, int]:
    """Contiguous tokens in the GPU, in GPU or CPU, and anywhere."""
    keys = block_keys(array("I", ids), 16, root_key(engine.hash_seed, None, None))
    below = engine.scheduler.below
    assert below is not None
    held = set(engine.scheduler.cache.keys())
    tokens = [contiguous(keys, held)]
    for tier in below.tiers:
        held |= set(tier.keys())
        tokens.append(contiguous(keys, held))
    return tokens[0], tokens[1], tokens[2]


@pytest.mark.parametrize("write", WRITE_BACKS.names)
async def test_an_index_that_follows_the_events_knows_every_tier_exactly(write: str) -> None:
    seed = 13
    rng = random.Random(seed)
    roots = [f"{name} " * rng.randint(20, 200) for name in range(6)]
    prompts = [rng.choice(roots) + f"{rng.randrange(20)} " * rng.randint(0, 120) for _ in range(80)]
    index, holder, namespace = PrefixIndex(2**24, lambda: 0.0), Holder("w"), Namespace(model="mock")
    applier = Applier(index, holder, namespace, block_tokens=16)
    small = MockOptions(
        speed=math.inf, kv_events=True, kv_blocks=40, cpu_blocks=50, cpu_write=write, disk_blocks=25
    )
    async with MockFleet(small) as fleet, httpx.AsyncClient(base_url=fleet.urls[0]) as client:
        for prompt in prompts:
            body = {"prompt": prompt, "max_tokens": rng.randint(1, 20)}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        for frames in await batches_told(client):
            batch = decode(frames)
            assert isinstance(batch, Batch)
            applier.apply(batch, 0.0)
        index.check_integrity()
        engine = fleet.engines[0]
        below = engine.scheduler.below
        assert below is not None
        sizes = (len(list(engine.scheduler.cache.keys())), *map(len, below.tiers))
        assert index.blocks.held(index.slot(holder))[:3] == sizes, f"seed {seed}"
        assert applier.reasons == ()
        found = 0
        for prompt in prompts:
            ids = (await client.post("/tokenize", json={"prompt": prompt})).json()["tokens"]
            matches = index.lookup({16: token_keys(ids, namespace.root("ids"), 16)})
            told = [(each.gpu_tokens, each.gpu_cpu_tokens, each.confirmed_tokens) for each in matches]
            assert (told or [(0, 0, 0)]) == [truth(engine, ids)], f"seed {seed}"
            found += bool(matches)
    assert found > 10, f"seed {seed}"
