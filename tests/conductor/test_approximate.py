from __future__ import annotations

import gc
import tracemalloc
from random import Random
from typing import Any

import pytest

from kvroute.conductor.approximate import ApproximateIndex
from kvroute.conductor.radix import NODE_BYTES

MIB = 2**20


def chain(random: Random, blocks: int, start: list[int] | None = None) -> list[int]:
    """A chain of fresh keys after `start`; fresh 64-bit keys never meet, as chained ones do not."""
    return [*(start or []), *(random.getrandbits(64) for _ in range(blocks))]


@pytest.fixture
def random() -> Random:
    seed = 1234
    print(f"seed {seed}")
    return Random(seed)


def test_match_gives_every_worker_its_longest_contiguous_prefix(random: Random) -> None:
    index = ApproximateIndex(MIB)
    keys = chain(random, 20)
    index.insert("a", keys)
    index.insert("b", keys[:7])
    index.insert("c", chain(random, 5, keys[:12]))
    assert index.match(keys, ["a", "b", "c", "never seen"]) == [20, 7, 12, 0]
    assert index.match(keys[:9], ["c", "a", "b"]) == [9, 9, 7]
    assert index.match(chain(random, 3, keys), ["a"]) == [20]
    assert index.match(chain(random, 3), ["a", "b"]) == [0, 0]
    assert index.match([], ["a"]) == [0]
    assert [index.held_blocks(name) for name in ("a", "b", "c", "d")] == [20, 7, 17, 0]
    assert index.entries == 25
    index.check_integrity()


def test_match_changes_nothing(random: Random) -> None:
    index = ApproximateIndex(MIB)
    keys = chain(random, 10)
    index.insert("a", keys)
    before = repr(index)
    index.match(chain(random, 3, keys[:4]), ["a", "b"])
    assert repr(index) == before
    assert before == (
        f"<ApproximateIndex blocks=10 nodes=1 workers=1 bytes={NODE_BYTES + 80}/{MIB} evicted=0>"
    )


def test_a_chat_that_grows_stays_one_node(random: Random) -> None:
    index = ApproximateIndex(MIB)
    keys: list[int] = []
    for _ in range(30):
        keys = chain(random, 5, keys)
        index.insert("a", keys)
    assert index.match(keys, ["a"]) == [150]
    assert index.estimated_bytes == NODE_BYTES + 150 * 8


def test_inserting_again_adds_nothing(random: Random) -> None:
    index = ApproximateIndex(MIB)
    keys = chain(random, 10)
    index.insert("a", keys)
    before = repr(index)
    index.insert("a", keys)
    index.insert("a", keys[:6])
    index.insert("a", [])
    assert repr(index) == before


def test_blocks_that_hang_in_the_air_are_no_prefix(random: Random) -> None:
    """A chain with a hole is never believed beyond it."""
    index = ApproximateIndex(MIB)
    keys = chain(random, 10)
    index.insert("a", keys[5:])
    assert index.match(keys, ["a"]) == [0]
    index.insert("a", keys[:3])
    assert index.match(keys, ["a"]) == [3]
    index.insert("a", keys)
    assert index.match(keys, ["a"]) == [10]
    assert index.match(keys[5:], ["a"]) == [5]
    index.check_integrity()


def test_random_use_agrees_with_a_plain_model(random: Random) -> None:
    """Against one set of prefixes per worker: same matches, same counts, intact throughout."""
    index = ApproximateIndex(64 * MIB)
    names = [f"w{number}" for number in range(5)]
    model: dict[str, set[int]] = {name: set() for name in names}
    chains = [chain(random, random.randint(1, 30))]
    fresh = len(names)
    for step in range(3000):
        start = random.choice(chains)
        keys = chain(random, random.choice([0, 0, 1, 4]), start[: random.randint(0, len(start))])
        chains.append(keys)
        name = random.choice(names)
        index.insert(name, keys)
        model[name].update(keys)
        probe = random.choice(chains)
        expected = [
            next((i for i, key in enumerate(probe) if key not in model[n]), len(probe)) for n in names
        ]
        assert index.match(probe, names) == expected
        if random.random() < 0.02:
            gone = names.pop(random.randrange(len(names)))
            index.remove_worker(gone)
            del model[gone]
            names.append(f"w{fresh}")
            model[names[-1]] = set()
            fresh += 1
        if step % 50 == 0:
            index.check_integrity()
            assert [index.held_blocks(n) for n in names] == [len(model[n]) for n in names]
    while index.sweep():
        pass
    index.check_integrity()
    assert index.entries == len(set().union(*model.values()))


def test_random_use_under_eviction_never_claims_what_was_not_inserted(random: Random) -> None:
    index = ApproximateIndex(2**16)
    names = ["a", "b", "c"]
    model: dict[str, set[int]] = {name: set() for name in names}
    chains = [chain(random, 20)]
    for step in range(5000):
        start = random.choice(chains[-200:])
        keys = chain(random, random.randint(0, 8), start[: random.randint(0, len(start))])
        chains.append(keys)
        name = random.choice(names)
        index.insert(name, keys)
        model[name].update(keys)
        assert index.match(keys, [name]) == [len(keys)]
        probe = random.choice(chains)
        for found, other in zip(index.match(probe, names), names, strict=True):
            assert model[other].issuperset(probe[:found])
        if step % 100 == 0:
            index.check_integrity()
    assert index.evicted_blocks > 0


def test_the_oldest_goes_first_and_leaves_before_roots(random: Random) -> None:
    index = ApproximateIndex(2**16)
    system = chain(random, 50)
    cold, warm = chain(random, 50), chain(random, 50)
    index.insert("a", cold)
    index.insert("a", warm)
    tails = [chain(random, 10, system) for _ in range(400)]
    for tail in tails:
        index.insert("a", tail)
        index.insert("a", warm)
    assert index.match(cold, ["a"]) == [0]
    assert index.match(warm, ["a"]) == [50]
    assert index.match(tails[0], ["a"]) == [50]  # its own end is gone, the shared root is not
    assert index.match(tails[-1], ["a"]) == [60]
    assert index.evicted_blocks == 50 + 100 + 400 * 10 + 50 - 50 - index.entries
    index.check_integrity()


def test_distinct_prompts_without_end_stay_within_the_bound(random: Random) -> None:
    index = ApproximateIndex(MIB)
    for number in range(20_000):
        index.insert(f"w{number % 3}", chain(random, 4))
        assert index.estimated_bytes <= MIB
    assert index.evicted_blocks == 80_000 - index.entries
    assert sum(index.held_blocks(f"w{number}") for number in range(3)) == index.entries
    index.check_integrity()


def test_a_prompt_larger_than_the_index_is_noted_in_part_and_spares_the_rest(random: Random) -> None:
    index = ApproximateIndex(2**16)
    keys, other = chain(random, 30_000), chain(random, 10)
    index.insert("a", other)
    index.insert("a", keys)
    assert index.match(keys, ["a"]) == [4096]
    assert index.match(other, ["a"]) == [10]


@pytest.mark.parametrize("shape", ["flat", "branching", "long"])
def test_the_estimate_is_near_the_real_memory_and_not_below(random: Random, shape: str) -> None:
    chains: list[list[int]] = []
    for number in range(10_000):
        match shape:
            case "flat":
                chains.append(chain(random, 2))
            case "branching":  # every key a branching point of two
                start = random.choice(chains) if chains else []
                chains.append(chain(random, 1, start[: random.randint(0, len(start))]))
            case _:
                chains.append(chain(random, 50, chains[-1][:20] if number % 5 else None))
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        index = ApproximateIndex(256 * MIB)
        for number, keys in enumerate(chains):
            index.insert(f"w{number % 8}", keys)
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.5 < used / index.estimated_bytes <= 1.0, (used, index)


@pytest.mark.parametrize("kept", [0, 40])
def test_diverging_chains_are_all_released(random: Random, kept: int) -> None:
    """Splitting nodes must be undone: with and without a kept common prefix, nothing of the churn stays."""
    index = ApproximateIndex(64 * MIB)
    system = chain(random, kept)
    index.insert("keeper", system)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(3):
            chains = [system]
            for _ in range(2000):
                start = random.choice(chains)
                chains.append(chain(random, 3, start[: random.randint(min(kept, 1), len(start))]))
                index.insert("gone#1", chains[-1])
            chains.clear()
            index.remove_worker("gone#1")
            while index.sweep():
                pass
            index._removed.clear()
        gc.collect()
        left = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert index.entries == kept
    assert index.match(system, ["keeper"]) == [kept]
    assert index.estimated_bytes == kept * 8 + (NODE_BYTES if kept else 0)
    assert left < (10_000 if kept == 0 else 2_000_000), left  # with a survivor the tables keep their size
    index.check_integrity()


def test_eviction_joins_what_insertion_split(random: Random) -> None:
    index = ApproximateIndex(2**16)
    trunk = chain(random, 100)
    for cut in range(1, 100, 2):
        index.insert("a", chain(random, 3, trunk[:cut]))
    index.insert("a", trunk)
    for _ in range(2000):
        index.insert("a", chain(random, 3))
        index.insert("a", trunk)
    assert index.match(trunk, ["a"]) == [100]
    index.check_integrity()
    assert index._tree.children[0] is not None
    assert index._tree.runs[index._tree.children[0][trunk[0]]] == b"".join(
        key.to_bytes(8, "little") for key in trunk
    )


def test_a_second_worker_that_catches_up_shares_the_node_again(random: Random) -> None:
    index = ApproximateIndex(MIB)
    keys = chain(random, 30)
    index.insert("a", keys)
    for end in (5, 10, 20, 30):
        index.insert("b", keys[:end])
        assert index.match(keys, ["a", "b"]) == [30, end]
        index.check_integrity()
    assert index.estimated_bytes == NODE_BYTES + 30 * 8


def test_a_removed_worker_matches_nothing_at_once_and_its_bit_returns_clean(random: Random) -> None:
    index = ApproximateIndex(MIB)
    shared, own = chain(random, 10), chain(random, 10)
    index.insert("a#1", own)
    index.insert("a#1", shared)
    index.insert("b#1", shared)
    index.remove_worker("a#1")
    assert index.match(own, ["a#1", "b#1"]) == [0, 0]
    assert index.match(shared, ["a#1", "b#1"]) == [0, 10]
    assert index.held_blocks("a#1") == 0
    index.insert("a#2", own[:4])  # the same engine again, before the sweep is done
    assert index.match(own, ["a#1", "a#2"]) == [0, 4]
    while index.sweep(1):
        index.check_integrity()
    assert index.entries == 14
    for number in range(3, 10):
        index.insert(f"a#{number}", own[:1])
        assert index.match(own, [f"a#{number}"]) == [1]
        assert index.match(shared, [f"a#{number}"]) == [0]
    index.check_integrity()


def test_late_news_of_a_removed_worker_resurrects_nothing(random: Random) -> None:
    index = ApproximateIndex(MIB)
    keys = chain(random, 10)
    index.insert("a#1", keys)
    index.remove_worker("a#1")
    for _ in range(100):
        index.insert("a#1", keys)
    while index.sweep():
        pass
    assert (index.entries, index.held_blocks("a#1"), index.match(keys, ["a#1"])) == (0, 0, [0])
    index.remove_worker("never seen")
    index.insert("never seen", keys)
    assert index.entries == 0
    index.check_integrity()


def test_workers_that_come_and_go_reuse_bits_and_leave_nothing(random: Random) -> None:
    index = ApproximateIndex(4 * MIB)
    for number in range(2000):
        index.insert(f"w#{number}", chain(random, 3))
        index.insert(f"w#{number}", chain(random, 3))
        if number >= 4:
            index.remove_worker(f"w#{number - 4}")
    while index.sweep():
        pass
    assert index.entries == 4 * 6
    assert index._next_bit < 2**64
    index.check_integrity()


def test_removal_does_not_stall(random: Random) -> None:
    """Constant time for any number of keys; the clearing is spread over later inserts."""
    index = ApproximateIndex(256 * MIB)
    for _ in range(20_000):
        index.insert("a", chain(random, 50))
    holders = list(index._tree.holders)
    index.remove_worker("a")
    assert index._tree.holders == holders, "no node is visited"
    assert index.held_blocks("a") == 0
    for _ in range(1000):
        index.insert("b", chain(random, 1))
    assert index.entries == 1000
    index.check_integrity()


def test_keys_that_are_no_chain_break_no_invariant(random: Random) -> None:
    """A hostile or broken caller gets wrong matches at worst."""
    index = ApproximateIndex(2**16)
    for _ in range(3000):
        index.insert(random.choice("abc"), [random.randint(0, 3) for _ in range(random.randint(0, 12))])
        index.match([random.randint(0, 3) for _ in range(12)], ["a", "b", "c"])
        if random.random() < 0.02:
            index.check_integrity()
    index.check_integrity()


def test_too_small_a_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 65536, not 100"):
        ApproximateIndex(100)


class Counted(list[int]):
    """Keys that count how often one is looked at."""

    looks = 0

    def __getitem__(self, at: Any) -> Any:
        self.looks += 1
        return super().__getitem__(at)


def test_a_match_looks_at_few_keys(random: Random) -> None:
    """Not at every block for every holder, which would be 1600 looks."""
    index = ApproximateIndex(16 * MIB)
    names = [f"w{number}" for number in range(8)]
    base = chain(random, 200)
    for number, name in enumerate(names):
        index.insert(name, base[: 20 + number * 20])
        for _ in range(100):
            index.insert(name, chain(random, 180, base[:20]))
    keys = Counted(base)
    assert index.match(keys, names) == [20 + number * 20 for number in range(8)]
    assert keys.looks < 40
