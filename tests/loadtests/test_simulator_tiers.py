"""Tiers below simulated GPUs and pulls between them: what they take, and what the router is told of them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

import pytest

from kvroute.conductor.block_index import CPU, DISK, GPU, make_block_index
from kvroute.conductor.index import Holder, pack_keys
from kvroute.conductor.tiers.stack import TierChange
from kvroute.loadtests.simulator.memory import Memory
from kvroute.loadtests.simulator.requests import Record
from kvroute.loadtests.simulator.setting import Failure, Setting
from kvroute.loadtests.simulator.simulation import Simulation
from kvroute.loadtests.simulator.tiers import tell_tiers
from kvroute.loadtests.traces.arrivals import arrivals
from kvroute.loadtests.traces.rows import Row, Trace
from kvroute.loadtests.traces.workloads import generate
from kvroute.policies.costs.links import Link
from kvroute.policies.costs.speeds import PRESETS
from kvroute.policies.registry import make_policy
from kvroute.types import Decision, Fleet, Hold, Pull, Rejection, RequestView, Tier

SPEED = PRESETS["qwen3-32b-h200-tp2"]
BLOCK = 512
BLOCK_BYTES = BLOCK * SPEED.kv_bytes_per_token
A, B, C = (tuple(range(start, start + 10)) for start in (0, 100, 200))
SLOW = Link(BLOCK_BYTES / 0.1, 0.02)
"""A block takes 100 ms."""


class Scripted:
    """The number of a worker for each request in turn, and from whom it pulls how many tokens."""

    needs_prefix: ClassVar[bool] = True

    @dataclass(frozen=True, slots=True)
    class Options:
        pass

    def __init__(self, *answers: int | tuple[int, int, int]) -> None:
        self.answers = list(answers)
        self.seen: list[Fleet] = []

    def decide(self, request: RequestView, fleet: Fleet) -> Decision | Hold | Rejection:
        self.seen.append(fleet)
        answer = self.answers.pop(0)
        if isinstance(answer, int):
            return Decision.whole(fleet.workers[answer], "scripted")
        target, source, tokens = answer
        chosen = Decision.whole(fleet.workers[target], "scripted")
        return Decision(chosen.candidate, "scripted", pull=Pull(fleet.workers[source], tokens, 0.1))


def run(
    memory: Memory, policy: Scripted, *rows: tuple[float, int, int, tuple[int, ...]], **fields: object
) -> tuple[Simulation, list[Record]]:
    setting = Setting(**{"workers": 1, "scale": 1.0, "kv_tokens": 12 * BLOCK, "memory": memory, **fields})  # type: ignore[arg-type]
    simulation = Simulation(setting, policy)  # type: ignore[arg-type]
    records = simulation.run(arrivals(Trace("test", BLOCK, tuple(Row(*row) for row in rows)), BLOCK))
    simulation.check_integrity()
    return simulation, records


def alone_s(new: int, cached: int) -> float:
    """A prefill with nothing beside it."""
    return SPEED.prefill_s(new, cached)


def test_what_the_gpu_evicted_comes_up_on_the_tiers_link() -> None:
    memory = Memory(cpu_tokens=100 * BLOCK, cpu_link=SLOW)
    _, (_, _, again) = run(
        memory, Scripted(0, 0, 0), (0.0, 5200, 1, A), (10.0, 5200, 1, B), (20.0, 5200, 1, A)
    )
    # B needs eleven of twelve blocks and finds two free: nine of A's go down, the last ones first.
    assert (again.gpu_tokens, again.cpu_tokens, again.cached_tokens) == (512, 9 * 512, 5120)
    assert again.first_s == pytest.approx(20.0 + 0.02 + 0.9 + alone_s(80, 5120))


def test_who_comes_during_a_load_does_not_wait_for_it() -> None:
    memory = Memory(cpu_tokens=100 * BLOCK, cpu_link=SLOW)
    _, records = run(
        memory,
        Scripted(0, 0, 0, 0),
        *((0.0, 5200, 1, A), (10.0, 5200, 1, B), (20.0, 5200, 1, A), (20.1, 400, 1, (9,))),
        kv_tokens=13 * BLOCK,
    )
    assert records[3].first_s == pytest.approx(20.1 + alone_s(400, 0))


def test_loads_of_one_engine_queue() -> None:
    memory = Memory(cpu_tokens=100 * BLOCK, cpu_link=SLOW, cpu_write="through")
    a, b, filler = A[:4], B[:4], tuple(range(300, 320))
    _, records = run(
        memory,
        Scripted(0, 0, 0, 0, 0),
        *((0.0, 2060, 1, a), (2.0, 2060, 1, b), (5.0, 10_300, 1, filler), (20.0, 2060, 1, a)),
        (20.0, 2060, 1, b),
        kv_tokens=21 * BLOCK,
    )
    first, second = records[3], records[4]
    assert (first.cpu_tokens, second.cpu_tokens) == (2048, 2048)
    assert first.first_s is not None
    assert second.first_s is not None
    assert first.first_s == pytest.approx(20.0 + 0.42 + alone_s(12, 2048))
    assert second.first_s == pytest.approx(20.0 + 0.84 + alone_s(12, 2048), abs=alone_s(12, 2048))


def test_what_leaves_the_cpu_tier_lies_on_disk() -> None:
    memory = Memory(cpu_tokens=4 * BLOCK, disk_tokens=100 * BLOCK, disk_link=SLOW)
    _, (_, _, again) = run(
        memory, Scripted(0, 0, 0), (0.0, 5200, 1, A), (10.0, 5200, 1, B), (20.0, 5200, 1, A)
    )
    assert (again.gpu_tokens, again.cpu_tokens, again.disk_tokens) == (512, 4 * 512, 5 * 512)


@pytest.mark.parametrize(
    ("news", "gpu", "cpu", "all_tokens"),
    [("events", 512, 5120, 5120), ("none", 512, 512, 512), ("size", 512, 512, 5120)],
)
def test_the_router_knows_of_tiers_what_it_is_told(news: str, gpu: int, cpu: int, all_tokens: int) -> None:
    memory = Memory(cpu_tokens=100 * BLOCK, tier_news=news)  # type: ignore[arg-type]
    policy = Scripted(0, 0, 0)
    run(memory, policy, (0.0, 5200, 1, A), (10.0, 5200, 1, B), (30.0, 5200, 1, A))
    match = policy.seen[-1].matches[0]
    assert (match.gpu_tokens, match.cpu_tokens, match.tokens) == (gpu, cpu, all_tokens)


def test_the_pace_has_the_links_of_the_tiers() -> None:
    policy = Scripted(0)
    run(Memory(cpu_tokens=100 * BLOCK, cpu_link=SLOW), policy, (0.0, 5200, 1, A))
    assert policy.seen[0].paces[0].load_s(Tier.CPU, 1024) == pytest.approx(0.22)


def test_what_never_evicts_is_known_of_all_workers() -> None:
    policy = Scripted(0, 1)
    _, (_, second) = run(Memory("endless"), policy, (0.0, 5200, 1, A), (10.0, 5200, 1, A), workers=2)
    assert [match.gpu_tokens for match in policy.seen[1].matches] == [5120, 5120]
    assert second.gpu_tokens == 5120


PEERS = Memory(cpu_tokens=100 * BLOCK, cpu_write="through", peer_link=SLOW)


def test_a_pull_takes_the_way_out_of_its_source_and_then_the_rest_is_computed() -> None:
    simulation, (_, second) = run(
        PEERS, Scripted(0, (1, 0, 5120)), (0.0, 5200, 1, A), (10.0, 5200, 1, A), workers=2
    )
    assert (second.peer_tokens, second.cpu_tokens, second.gpu_tokens) == (5120, 0, 0)
    assert second.first_s == pytest.approx(10.0 + 0.02 + 1.0 + alone_s(80, 5120))
    assert simulation.fleet.pulls.results == {"pulled": 1}
    # It lies there as what was computed does.
    assert simulation.engines[1].scheduler.cache.match(A) == 10


def test_pulls_from_one_worker_queue_and_those_from_another_do_not() -> None:
    work = ((0.0, 1100, 1, A[:2]), (0.0, 1100, 1, B[:2]), (10.0, 1100, 1, A[:2]), (10.0, 1100, 1, A[:2]))
    _, records = run(
        PEERS,
        Scripted(0, 1, (2, 0, 1024), (3, 0, 1024), (4, 1, 1024)),
        *work,
        (10.0, 1100, 1, B[:2]),
        workers=5,
    )
    prefill_s = alone_s(76, 1024)
    assert [record.first_s for record in records[2:]] == pytest.approx(
        [10.22 + prefill_s, 10.42 + prefill_s, 10.22 + prefill_s]
    )


def test_only_what_is_missing_travels() -> None:
    _, (_, _, third) = run(
        PEERS,
        Scripted(0, 1, (1, 0, 4096)),
        *((0.0, 5200, 1, A), (5.0, 1100, 1, A[:2]), (10.0, 5200, 1, A)),
        workers=2,
    )
    assert (third.gpu_tokens, third.peer_tokens) == (1024, 4096)
    assert third.first_s == pytest.approx(10.0 + 0.02 + 0.8 + alone_s(80, 5120))


@pytest.mark.parametrize(("pull_from", "pulled"), [("cpu", 0), ("any", 5120)])
def test_a_worker_without_tiers_gives_only_where_gpus_give(pull_from: str, pulled: int) -> None:
    memory = Memory(peer_link=SLOW, pull_from=pull_from)  # type: ignore[arg-type]
    simulation, (_, second) = run(
        memory, Scripted(0, (1, 0, 5120)), (0.0, 5200, 1, A), (10.0, 5200, 1, A), workers=2
    )
    assert second.peer_tokens == pulled
    assert simulation.fleet.pulls.results == ({"pulled": 1} if pulled else {"nothing": 1})


def test_a_pull_that_is_late_is_given_up_for_computing() -> None:
    """The gateway waits a second and three times what it expected; ten blocks take five."""
    memory = Memory(cpu_tokens=100 * BLOCK, cpu_write="through", peer_link=Link(BLOCK_BYTES / 0.5, 0.02))
    policy = Scripted(0, (1, 0, 5120))
    simulation, (_, second) = run(memory, policy, (0.0, 5200, 1, A), (10.0, 5200, 1, A), workers=2)
    assert simulation.fleet.pulls.results == {"late": 1}
    assert second.peer_tokens == 0
    assert second.predicted_ttft_s is not None
    limit_s = 3 * (0.1 + second.predicted_ttft_s) + 1.0
    assert second.first_s == pytest.approx(10.0 + limit_s + alone_s(5200, 0))


def test_a_source_that_fails_meanwhile_gives_nothing() -> None:
    simulation, (_, second) = run(
        PEERS,
        Scripted(0, (1, 0, 5120)),
        *((0.0, 5200, 1, A), (10.0, 5200, 1, A)),
        workers=2,
        failures=(Failure(0, 10.5),),
    )
    assert simulation.fleet.pulls.results == {"lost": 1}
    assert second.first_s == pytest.approx(11.02 + alone_s(5200, 0))


MEMORIES = {
    **{name: Memory(name) for name in ("lfu", "tiny_lfu", "value_per_byte", "hazard", "belady", "endless")},
    "through": Memory(cpu_tokens=30_000, cpu_write="through"),
    "back": Memory("hazard", cpu_tokens=30_000, disk_tokens=50_000),
    "selective": Memory(cpu_tokens=30_000, cpu_write="selective", cpu_eviction="tiny_lfu"),
    "peers": Memory(cpu_tokens=60_000, cpu_admission="second_access", peer_link=SLOW),
    "gpu peers": Memory(peer_link=SLOW, pull_from="any"),
}


@pytest.mark.parametrize("memory", MEMORIES.values(), ids=MEMORIES)
def test_everything_ends_the_same_every_time_and_the_index_knows_the_truth(memory: Memory) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    failures = () if memory.gpu_eviction in ("belady", "endless") else (Failure(1, 8.0, 15.0),)
    setting = Setting(workers=3, kv_tokens=60_000, block_tokens=64, memory=memory, failures=failures)
    trace = generate("mixed", 80, 4.0, seed)
    outcomes = []
    for _ in range(2):
        simulation = Simulation(setting, make_policy("ttft", {}))
        records = simulation.run(arrivals(trace, 64))
        simulation.check_integrity()
        assert all(record.is_over for record in records)
        outcomes.append([record.measured(simulation.names) for record in records])
        for number, engine in enumerate(simulation.engines):
            slot = simulation.index.slot(Holder(f"w{number}"))
            told = {(tier, key) for tier, _, _, key, _ in simulation.index.blocks.export(slot)}
            below = engine.scheduler.below
            caches = [engine.scheduler.cache, *(() if below is None else below.tiers)]
            held = {
                (medium, key)
                for medium, cache in zip((GPU, CPU, DISK), caches, strict=False)
                for key in cache.keys()  # noqa: SIM118  # no dictionary
            }
            assert told == held
    assert outcomes[0] == outcomes[1]


def changes(*made: tuple[int, int | None, bool]) -> list[TierChange]:
    return [TierChange("CPU", key, stored, parent) for key, parent, stored in made]


@pytest.mark.parametrize(
    ("told", "left"),
    [
        (changes((1, None, True), (2, 1, True), (7, None, True), (8, 7, True)), 2),
        (changes((2, 1, True), (1, None, True)), 2),  # leaves first, as they leave the GPU
        (changes((1, None, True), (2, 1, True), (2, 1, False)), 1),
        (changes((1, None, True), (1, None, False), (1, None, True)), 1),
        (changes((1, None, True)) + changes((1, None, False), (1, None, True), (2, 1, True)), 2),
        (changes((1, None, True), (2, 1, True), (1, None, False), (2, 1, False)), 0),
    ],
)
def test_changes_reach_the_index_in_any_order(told: list[TierChange], left: int) -> None:
    blocks = make_block_index()
    slot = blocks.open()
    tell_tiers(blocks, slot, told)
    matches = blocks.match(pack_keys([1, 2]))
    assert [row[2] for row in matches] == ([left] if left else [])
    blocks.check_integrity()
