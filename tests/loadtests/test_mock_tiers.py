"""The tiers below the mock engine's GPU: what they hold, what a load takes, and what is told of it."""

from __future__ import annotations

import math
import random

import pytest

from kvroute.conductor.tiers.registry import WRITE_BACKS
from kvroute.loadtests.mock_engine import MockOptions
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


def test_a_load_that_takes_no_time_needs_room_all_the_same() -> None:
    bench = Bench(10, cpu_blocks=100, cpu_load_bytes_per_s=math.inf)
    bench.run(prompt(1, 8))
    bench.run(prompt(2, 9))
    again = prompt(1, 8, output=5)
    bench.scheduler.add(again)
    while again.phase is not Phase.DECODING:
        assert bench.step()
    assert (again.cached_tokens, again.computed_tokens) == (128, 129)
    assert (again.resident_blocks, again.private_blocks) == (8, 1)


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
        (
            {"cpu_eviction": "arc"},
            "cpu_eviction 'arc' is unknown; known: hazard, lfu, lru, tiny_lfu, value_per_byte",
        ),
        ({"cpu_write": "around"}, "cpu_write 'around' is unknown; known: back, selective, through"),
        ({"cpu_admission": "none"}, "cpu_admission 'none' is unknown"),
        ({"cpu_blocks": -1}, "cpu_blocks must not be negative"),
        ({"disk_load_bytes_per_s": math.nan}, "disk_load_bytes_per_s must be above 0"),
    ],
)
def test_options_out_of_range_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MockOptions(**options)  # type: ignore[arg-type]
