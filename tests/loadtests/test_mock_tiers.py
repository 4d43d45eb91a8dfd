"""The tiers below the mock engine's GPU: what they hold, what a load takes, and what is told of it."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
import zmq
import zmq.asyncio

from kvroute.conductor.tiers.registry import WRITE_BACKS
from kvroute.loadtests.mock_engine import MockFleet, MockOptions
from kvroute.loadtests.mock_engine.block_cache import BlockCache
from kvroute.loadtests.mock_engine.loads import LoadQueue
from kvroute.loadtests.mock_engine.lower_tiers import make_lower_tiers
from kvroute.loadtests.mock_engine.scheduler import Scheduler
from kvroute.loadtests.mock_engine.sequences import Phase, Sequence
from kvroute.loadtests.mock_engine.steps import Outcome

BLOCK = 16
GIGABYTE_BLOCKS = 1e9 / (131_072 * BLOCK)
"""Blocks that a link of 1 GB/s brings in a second, with the default preset."""


class Bench:
    """A scheduler with tiers below, in virtual time."""

    def __init__(self, gpu_blocks: int, **options: object) -> None:
        self.options = MockOptions(kv_blocks=gpu_blocks, **options)  # type: ignore[arg-type]
        self.now_s = 0.0
        below = make_lower_tiers(self.options, lambda: self.now_s)
        assert below is not None
        self.below = below
        self.scheduler = Scheduler(BlockCache(gpu_blocks), self.options.step_speed, BLOCK, below=below)
        self.outcomes: list[Outcome] = []

    def step(self) -> bool:
        step = self.scheduler.step()
        if step is None:
            return False
        self.now_s += step.duration_s
        self.outcomes.append(self.scheduler.complete(step))
        self.scheduler.check_integrity()
        return True

    def run(self, *sequences: Sequence) -> float:
        """All of them to the end; virtual seconds it took."""
        start_s = self.now_s
        for sequence in sequences:
            self.scheduler.add(sequence)
        while self.step():
            pass
        return self.now_s - start_s

    def told(self) -> list[tuple[str, str, int]]:
        """Everything since the last call, in the order a publisher tells it."""
        events: list[tuple[str, str, int]] = []
        for outcome in self.outcomes:
            before, after = (
                [(each.medium, "stored" if each.stored else "removed", each.key) for each in changes]
                for changes in (outcome.demoted, outcome.offloaded)
            )
            events += before
            events += [("GPU", "removed", key) for key in outcome.removed]
            events += [
                ("GPU", "stored", key)
                for stored in outcome.stored
                for key in stored.sequence.keys[stored.start : stored.stop]
            ]
            events += after
        self.outcomes.clear()
        return events


def prompt(name: int, blocks: int, output: int = 1) -> Sequence:
    """A prompt of so many full blocks and a token more, whose keys are name * 1000 + 1, 2, ..."""
    return Sequence(str(name), blocks * BLOCK + 1, output, [name * 1000 + i + 1 for i in range(blocks)])


def test_what_the_gpu_evicted_is_loaded_instead_of_computed() -> None:
    bench = Bench(10, cpu_blocks=100, cpu_load_bytes_per_s=1e9)
    first, second, again = prompt(1, 8), prompt(2, 9), prompt(1, 8)
    bench.run(first)
    bench.run(second)
    assert bench.scheduler.cache.match(again.keys) == 0
    computed = bench.scheduler.totals.prefill_tokens
    took_s = bench.run(again)
    assert (first.cached_tokens, second.cached_tokens, again.cached_tokens) == (0, 0, 128)
    totals = bench.scheduler.totals
    assert (totals.cached_tokens, totals.loaded_tokens) == (0, 128)
    assert totals.prefill_tokens - computed == 1
    load_s = 8 / GIGABYTE_BLOCKS
    assert took_s == pytest.approx(load_s + bench.options.step_speed.step_s(1, 128.5, 0, 0))


def test_a_prefix_is_taken_from_the_gpu_first_and_then_from_below() -> None:
    bench = Bench(10, cpu_blocks=100)
    bench.run(prompt(1, 8))
    bench.run(prompt(2, 4))
    left = bench.scheduler.cache.match(prompt(1, 8).keys)
    assert 0 < left < 8
    again = prompt(1, 8)
    bench.run(again)
    totals = bench.scheduler.totals
    assert (totals.cached_tokens, totals.loaded_tokens) == (left * BLOCK, (8 - left) * BLOCK)
    assert again.cached_tokens == 128


def test_the_last_token_is_computed_though_all_blocks_lie_below() -> None:
    bench = Bench(10, cpu_blocks=100)
    keys = [1, 2, 3, 4]
    bench.run(Sequence("a", 64, 1, keys))
    bench.run(prompt(2, 9))
    again = Sequence("b", 64, 1, keys)
    bench.run(again)
    assert again.cached_tokens == 48


def test_others_run_while_one_loads_and_loads_wait_for_each_other() -> None:
    bench = Bench(40, cpu_blocks=200, cpu_load_bytes_per_s=1e9)
    bench.run(prompt(1, 8))
    bench.run(prompt(2, 8))
    bench.run(prompt(3, 38))
    one, two, other = prompt(1, 8), prompt(2, 8), prompt(4, 2, output=40)
    for sequence in (one, two, other):
        bench.scheduler.add(sequence)
    start_s, arrived = bench.now_s, {}
    while bench.step():
        for sequence in (one, two):
            if sequence.phase is not Phase.LOADING:
                arrived.setdefault(sequence.id, bench.now_s - start_s)
        if other.generated_tokens == 1:
            assert (one.phase, two.phase) == (Phase.LOADING, Phase.LOADING)
    step_s = bench.options.step_speed.step_s(64, 0, 1, 64)
    assert arrived["1"] == pytest.approx(8 / GIGABYTE_BLOCKS, abs=step_s)
    assert arrived["2"] == pytest.approx(16 / GIGABYTE_BLOCKS, abs=step_s)


def test_time_on_the_link_is_spent_once() -> None:
    loads = LoadQueue()
    one, two, three = (prompt(name, 1) for name in (1, 2, 3))
    for sequence in (one, two, three):
        loads.add(sequence, 2.0)
    assert loads.advance(3.0) == [one]
    assert loads.next_s == 1.0
    loads.remove(two)
    assert loads.advance(1.9) == []
    assert loads.advance(0.2) == [three]
    assert not loads


def test_an_abort_while_loading_frees_everything() -> None:
    bench = Bench(10, cpu_blocks=100, cpu_load_bytes_per_s=1e6)
    bench.run(prompt(1, 8))
    bench.run(prompt(2, 9))
    one, two = prompt(1, 8), prompt(1, 1)
    bench.scheduler.add(one)
    bench.scheduler.add(two)
    step = bench.scheduler.step()
    assert step is not None
    assert (one.phase, bench.scheduler.running) == (Phase.LOADING, 2)
    bench.scheduler.abort(one)
    bench.scheduler.abort(one)
    assert bench.scheduler.running == 1
    bench.scheduler.check_integrity()
    bench.outcomes.append(bench.scheduler.complete(step))
    while bench.step():
        pass
    assert (one.phase, two.phase) == (Phase.ENDED, Phase.ENDED)
    assert (one.generated_tokens, two.generated_tokens) == (0, 1)
    assert bench.scheduler.cache.used_ratio == 0


def test_write_through_tells_of_the_gpu_first() -> None:
    bench = Bench(10, cpu_blocks=100)
    bench.run(prompt(1, 2))
    assert bench.told() == [
        ("GPU", "stored", 1001),
        ("GPU", "stored", 1002),
        ("CPU", "stored", 1001),
        ("CPU", "stored", 1002),
    ]


def test_write_back_tells_of_the_tier_below_before_the_block_is_gone_above() -> None:
    bench = Bench(3, cpu_blocks=1, cpu_write="back", disk_blocks=9)
    bench.run(prompt(1, 2))
    bench.told()
    bench.run(prompt(2, 2))
    assert bench.told() == [
        ("CPU", "stored", 1002),
        ("CPU", "stored", 1001),
        ("DISK", "stored", 1002),
        ("CPU", "removed", 1002),
        ("GPU", "removed", 1002),
        ("GPU", "removed", 1001),
        ("GPU", "stored", 2001),
        ("GPU", "stored", 2002),
    ]


def test_blocks_filled_in_decode_are_written_too() -> None:
    bench = Bench(10, cpu_blocks=100)
    sequence = Sequence("1", 17, 32, [1, 2, 3])
    bench.run(sequence)
    assert list(bench.below.tiers[0].keys()) == [1, 2, 3]
    found = bench.below.tiers[0].get(3)
    assert found is not None
    assert (found.parent, found.depth, found.prompt_blocks) == (2, 2, 1)


def test_clear_empties_the_tiers_below_but_not_while_blocks_are_held() -> None:
    bench = Bench(10, cpu_blocks=100)
    bench.scheduler.add(prompt(1, 4, output=5))
    bench.step()
    assert not bench.scheduler.clear()
    assert len(bench.below.tiers[0]) == 4
    bench.run()
    assert bench.scheduler.clear()
    assert len(bench.below.tiers[0]) == 0
    again = prompt(1, 4)
    bench.run(again)
    assert again.cached_tokens == 0


def cached_after_a_scan(**policies: str) -> list[int | None]:
    """Tokens found of four system prompts, asked for five times and then not during forty long one-offs."""
    bench = Bench(60, cpu_blocks=120, **policies)
    for _ in range(5):
        for system in range(1, 5):
            bench.run(prompt(system, 10))
            bench.run(prompt(90, 50))
    for scan in range(100, 140):
        bench.run(prompt(scan, 50))
    again = [prompt(system, 10) for system in range(1, 5)]
    for sequence in again:
        bench.run(sequence)
    return [sequence.cached_tokens for sequence in again]


@pytest.mark.parametrize("policies", [{"cpu_eviction": "tiny_lfu"}, {"cpu_admission": "second_access"}])
def test_hot_system_prompts_survive_a_scan(policies: dict[str, str]) -> None:
    assert cached_after_a_scan(**policies) == [160] * 4


def test_the_same_scan_washes_out_a_plain_lru() -> None:
    assert cached_after_a_scan() == [0] * 4


@pytest.mark.parametrize("instant", [False, True])
@pytest.mark.parametrize("write", WRITE_BACKS.names)
def test_who_follows_what_is_told_knows_the_truth_and_never_meets_an_unknown_block(
    write: str, instant: bool
) -> None:
    """Lower tiers are told of by hash alone: some tier must hold the block already when one takes it."""
    seed = 41
    rng = random.Random(seed)
    bench = Bench(30, cpu_blocks=25, cpu_write=write, disk_blocks=40, cpu_load_bytes_per_s=1e9)
    held: dict[str, set[int]] = {"GPU": set(), "CPU": set(), "DISK": set()}
    live: list[Sequence] = []
    for number in range(250):
        keys = [rng.randrange(1, 4)]
        while len(keys) < rng.randint(1, 12):
            keys.append(keys[-1] * 3 + rng.randrange(3) + 1)
        sequence = Sequence(str(number), len(keys) * BLOCK - rng.randrange(8), rng.randint(1, 30), keys)
        bench.scheduler.add(sequence)
        live.append(sequence)
        if instant:
            bench.outcomes.append(bench.scheduler.admit_instantly())
            for each in [each for each in live if each.phase is Phase.DECODING and rng.random() < 0.5]:
                bench.outcomes.append(bench.scheduler.finish_instantly(each, each.output_tokens))
        else:
            for _ in range(rng.randrange(12)):
                bench.step()
        if rng.random() < 0.1:
            bench.scheduler.abort(rng.choice(live))
        bench.scheduler.check_integrity()
        for medium, what, key in bench.told():
            assert (key in held[medium]) == (what == "removed"), f"seed {seed}, {number}: {medium} {what}"
            if medium != "GPU" and what == "stored":
                assert any(key in keys for keys in held.values()), f"seed {seed}, {number}: {key} unknown"
            held[medium] ^= {key}
    assert held["GPU"] == set(bench.scheduler.cache.keys())
    for tier in bench.below.tiers:
        assert held[tier.medium] == set(tier.keys())
    assert bench.scheduler.totals.loaded_tokens > 0


def test_without_tiers_nothing_is_told_of_any() -> None:
    assert make_lower_tiers(MockOptions(), lambda: 0.0) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cpu_eviction": "arc"}, "cpu_eviction 'arc' is unknown; known: lfu, lru, tiny_lfu, value_per_byte"),
        ({"cpu_write": "around"}, "cpu_write 'around' is unknown; known: back, selective, through"),
        ({"cpu_admission": "none"}, "cpu_admission 'none' is unknown"),
        ({"cpu_blocks": -1}, "cpu_blocks must not be negative"),
        ({"disk_load_bytes_per_s": math.nan}, "disk_load_bytes_per_s must be above 0"),
    ],
)
def test_options_out_of_range_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MockOptions(**options)  # type: ignore[arg-type]


# Over HTTP and ZMQ.


async def everything_told(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    """All events since the engine started, by its replay socket."""
    source = (await client.get("/kv_event_sources")).json()["0"]
    events: list[dict[str, Any]] = []
    with zmq.asyncio.Context.instance().socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(source["replay_endpoint"])
        await dealer.send_multipart([b"", bytes(8)])
        while True:
            frames = await asyncio.wait_for(dealer.recv_multipart(), 2)
            if frames[-2] == b"\xff" * 8:
                return events
            events += msgspec.msgpack.decode(frames[-1])[1]


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
