"""GPU caches by other rules than LRU: what they keep, and that their books balance."""

from __future__ import annotations

import random
from collections.abc import Sequence as Keys

import pytest

from kvroute.conductor.tiers.registry import EVICTIONS
from kvroute.loadtests.mock_engine.block_cache import BlockCache
from kvroute.loadtests.mock_engine.scheduler import Scheduler
from kvroute.loadtests.mock_engine.sequences import Sequence
from kvroute.loadtests.simulator.bounds import Future
from kvroute.loadtests.simulator.caches import Conversations
from kvroute.loadtests.simulator.memory import BOUNDS, Memory
from kvroute.loadtests.simulator.setting import Setting
from kvroute.loadtests.simulator.tiers import FleetMemory
from kvroute.policies.costs.speeds import PRESETS

SPEED = PRESETS["qwen3-32b-h200-tp2"]
BLOCK = 16
RULES = [*EVICTIONS.names, *BOUNDS]


class Bench:
    """One or more engines of one memory; a second passes between two prompts."""

    def __init__(self, rule: str, blocks: int, engines: int = 1) -> None:
        self.now_s = 0.0
        setting = Setting(scale=1.0, kv_tokens=blocks * BLOCK, block_tokens=BLOCK, memory=Memory(rule))
        self.fleet = FleetMemory(setting, lambda: self.now_s)
        self.engines = [Scheduler(self.fleet.cache(), SPEED, BLOCK) for _ in range(engines)]

    @property
    def cache(self) -> BlockCache:
        return self.engines[0].cache

    def run(self, prompts: Keys[Keys[int]], engines: Keys[int] = ()) -> list[int]:
        """One after the other; the blocks each found. A prompt has a token more than its blocks."""
        self.fleet.foretell([(float(at), keys) for at, keys in enumerate(prompts)])
        hits = []
        for at, keys in enumerate(prompts):
            engine = self.engines[engines[at] if engines else 0]
            sequence = Sequence("", len(keys) * BLOCK + 1, 3, keys)
            engine.add(sequence)
            while step := engine.step():
                self.now_s += step.duration_s
                engine.complete(step)
                engine.check_integrity()
            assert sequence.cached_tokens is not None
            hits.append(sequence.cached_tokens // BLOCK)
            self.now_s = at + 1.0
        return hits


def chain(name: int, blocks: int) -> list[int]:
    return [name * 100 + depth for depth in range(blocks)]


def random_prompts(source: random.Random, count: int, names: int = 8, blocks: int = 5) -> list[list[int]]:
    """Chains that share beginnings: the rest hangs on a second name."""
    made = []
    for _ in range(count):
        name, shared, rest = source.randrange(names), source.randrange(blocks), source.randrange(3)
        made.append(
            chain(name, shared + 1)
            + [10_000 + name * 1000 + shared * 100 + rest * 10 + i for i in range(rest)]
        )
    return made


def test_lru_is_the_engines_own_cache() -> None:
    assert type(Bench("lru", 10).cache) is BlockCache


def test_lfu_lets_go_of_what_was_read_least() -> None:
    prompts = [chain(1, 4), chain(1, 4), chain(2, 3), chain(3, 3), chain(1, 4), chain(2, 3)]
    # Room for nine, one of them for the prompt's last token: the fourth takes two blocks of those there.
    assert Bench("lfu", 9).run(prompts) == [0, 4, 0, 0, 4, 1]
    assert Bench("lru", 9).run(prompts) == [0, 4, 0, 0, 2, 1]


def test_tiny_lfu_lets_what_it_would_refuse_go_first() -> None:
    twice = [chain(1, 4), chain(1, 4), chain(2, 3), chain(2, 3)]
    once = [chain(name, 1) for name in range(3, 8)]
    # The first of those that come once finds room, the second takes a block, and the others each other's.
    assert Bench("tiny_lfu", 9).run([*twice, *once, chain(1, 4)])[-1] == 3
    assert Bench("lru", 9).run([*twice, *once, chain(1, 4)])[-1] == 0
    # What is asked for again is let in.
    bench = Bench("tiny_lfu", 9)
    bench.run([*twice, *once, *[chain(7, 1)] * 3, chain(8, 1), chain(9, 1)])
    assert bench.cache.match(chain(7, 1)) == 1


def test_value_keeps_what_is_dear_to_compute() -> None:
    """Deep blocks attend to more: the last of the long chain are worth more than the newer, shallow ones."""
    dear, cheap = chain(1, 40), [chain(name, 2) for name in range(2, 6)]
    assert Bench("value_per_byte", 46).run([dear, *cheap, dear])[-1] == 40
    assert Bench("lru", 46).run([dear, *cheap, dear])[-1] < 40


def test_the_clairvoyant_keeps_what_comes_next() -> None:
    a, b, c = chain(1, 3), chain(2, 3), chain(3, 3)
    prompts = [a, b, c, a, b, a, c]
    assert Bench("lru", 8).run(prompts) == [0, 0, 0, 1, 1, 3, 1]
    # c wants four blocks and two are free: it takes from b, as a comes next. And so on.
    assert Bench("belady", 8).run(prompts) == [0, 0, 0, 3, 1, 3, 1]


def test_the_clairvoyant_knows_that_another_engine_served_what_was_next() -> None:
    """Both hold a. When the other has served it, nobody will ask for it again, and it makes room for c."""
    a, b, c = chain(1, 3), chain(2, 3), chain(3, 3)
    bench = Bench("belady", 8, engines=2)
    hits = bench.run([a, b, a, c, b], engines=[0, 0, 1, 0, 0])
    assert hits == [0, 0, 0, 0, 3]


@pytest.mark.parametrize("rule", RULES)
def test_hits_lie_between_none_and_the_bounds(rule: str) -> None:
    """Blocks of one engine, equal in cost: none has more hits than the clairvoyant, and it no more than what
    never evicts."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    for round in range(6):
        source = random.Random(seed + round)
        prompts = random_prompts(source, 60)
        blocks = source.randrange(10, 30)
        hits, belady, endless = (
            sum(Bench(name, blocks).run(prompts)) for name in (rule, "belady", "endless")
        )
        if rule == "endless":
            belady = endless
        assert hits <= belady <= endless


@pytest.mark.parametrize("rule", RULES)
def test_books_balance_under_load_preemption_and_aborts(rule: str) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    source = random.Random(seed)
    bench = Bench(rule, 20, engines=2)
    prompts = random_prompts(source, 80)
    bench.fleet.foretell([(float(at), keys) for at, keys in enumerate(prompts)])
    live: list[tuple[Scheduler, Sequence]] = []
    for keys in prompts:
        engine = source.choice(bench.engines)
        sequence = Sequence("", len(keys) * BLOCK + source.randrange(1, BLOCK), source.randrange(1, 60), keys)
        engine.add(sequence)
        live.append((engine, sequence))
        for engine in bench.engines:
            for _ in range(source.randrange(12)):
                if step := engine.step():
                    bench.now_s += step.duration_s
                    engine.complete(step)
                engine.check_integrity()
        if source.random() < 0.2:
            engine, sequence = source.choice(live)
            engine.abort(sequence)
    assert sum(engine.totals.preemptions for engine in bench.engines) > 0
    for engine in bench.engines:
        while step := engine.step():
            engine.complete(step)
        engine.check_integrity()
        assert engine.clear()
        engine.cache.take_removed()
        assert engine.cache.free_blocks == 20


def test_what_never_evicts_is_everywhere_and_takes_room_only_while_it_is_held() -> None:
    bench = Bench("endless", 6, engines=2)
    hits = bench.run(
        [chain(1, 4), chain(2, 4), chain(3, 4), chain(1, 4), chain(2, 5)], engines=[0, 0, 0, 1, 1]
    )
    assert hits == [0, 0, 0, 4, 4]
    assert [engine.cache.free_blocks for engine in bench.engines] == [6, 6]
    assert (bench.cache.resident_blocks, bench.cache.used_ratio) == (13, 0.0)


def test_what_is_shared_takes_room_where_it_is_held() -> None:
    """Four blocks and a private one of six are held: five more do not fit, found or not, and wait."""
    bench = Bench("endless", 6)
    bench.run([chain(1, 4), chain(2, 4)])
    engine = bench.engines[0]
    first, second = (Sequence("", 4 * BLOCK + 1, 5, chain(name, 4)) for name in (1, 2))
    engine.add(first)
    engine.add(second)
    step = engine.step()
    assert step is not None
    assert [sequence for sequence, _ in step.prefills] == [first]
    assert engine.cache.free_blocks == 1


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ([[1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]], [(1, 0), (2, 3), (3, 5)]),
        ([[1, 2, 3], [1, 2, 9]], [(1, 0), (1, 2)]),  # shares a beginning, does not go on
        ([[1], [1, 2], [1, 3]], [(1, 0), (1, 1), (1, 1)]),  # all may share a first block
        ([[1, 2], [], [1, 2, 3]], [(1, 0), (1, 0), (2, 2)]),
    ],
)
def test_turns_are_told_by_prompts_alone(prompts: list[list[int]], expected: list[tuple[int, int]]) -> None:
    conversations = Conversations()
    assert [conversations.next_turn(keys) for keys in prompts] == expected


def test_conversations_forget_what_was_not_seen_the_longest() -> None:
    conversations = Conversations(capacity_blocks=4)
    for keys in ([1, 2], [3, 4], [5, 6]):
        conversations.next_turn(keys)
    assert conversations.next_turn([3, 4, 7]) == (2, 2)
    assert conversations.next_turn([1, 2, 8]) == (1, 0)


def test_the_future_is_that_of_requests_which_have_not_begun() -> None:
    future = Future()
    future.foretell([(1.0, [1, 2]), (5.0, [1])])
    bench = Bench("belady", 10)
    cache = bench.fleet.cache()
    assert (future.next_s(1), future.next_s(2), future.next_s(3)) == (1.0, 1.0, float("inf"))
    future.begin(cache, [1, 2])  # type: ignore[arg-type]
    assert (future.next_s(1), future.next_s(2)) == (5.0, float("inf"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gpu_eviction": "arc"}, "gpu_eviction 'arc' is unknown; known: hazard, lfu, .*, belady, endless"),
        ({"cpu_eviction": "belady"}, "cpu_eviction 'belady' is unknown"),
        ({"cpu_write": "never"}, "cpu_write 'never' is unknown; known: back, selective, through"),
        ({"tier_news": "rumour"}, "tier_news 'rumour' is unknown; known: events, size, none"),
        ({"disk_tokens": -1}, "disk_tokens must be 0 or more, got -1"),
        ({"gpu_eviction": "endless", "cpu_tokens": 5}, "'endless' is a bound on GPUs alone"),
    ],
)
def test_bad_memories_are_named(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Memory(**fields)  # type: ignore[arg-type]
