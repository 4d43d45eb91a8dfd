from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from random import Random
from threading import Thread

import pytest

from kvroute.conductor.block_index import CPU, DISK, GPU, BlockIndex, Entry, make_block_index
from kvroute.conductor.packing import pack_in_python, pack_keys

try:
    from kvroute.conductor._block_index import BlockIndex as Compiled
except ImportError:
    Compiled = None  # type: ignore[assignment,misc]

KINDS = [pytest.param(BlockIndex, id="python")]
if Compiled is not None:
    KINDS.append(pytest.param(Compiled, id="c"))
Make = Callable[[], BlockIndex]
ANY = 2**63


def pack(*values: int) -> bytes:
    return array("Q", values).tobytes()


class Truth:
    """What a `BlockIndex` must say, by counting: (slot, tier, hash) -> count and (slot, hash) -> key."""

    def __init__(self) -> None:
        self.counts: dict[tuple[int, int, int], int] = {}
        self.names: dict[tuple[int, int], int] = {}
        self.probable: dict[int, list[int]] = {}
        self.silent: dict[int, int] = {}

    def open(self, slot: int) -> None:
        self.probable[slot], self.silent[slot] = [], 0

    def retire(self, slot: int) -> None:
        self.counts = {at: count for at, count in self.counts.items() if at[0] != slot}
        self.names = {at: key for at, key in self.names.items() if at[0] != slot}
        del self.probable[slot], self.silent[slot]

    def keys(self, slot: int, tier: int) -> set[int]:
        return {self.names[slot, name] for at, held, name in self.counts if at == slot and held == tier}

    def store(self, slot: int, tier: int, hashes: list[int], keys: list[int]) -> int:
        new = 0
        for name, key in zip(hashes, keys, strict=True):
            if self.names.get((slot, name), key) != key:
                for lower in (GPU, CPU, DISK):
                    self.counts.pop((slot, lower, name), None)
            new += key not in self.keys(slot, tier)
            self.names[slot, name] = key
            self.counts[slot, tier, name] = self.counts.get((slot, tier, name), 0) + 1
        return new

    def remove(self, slot: int, tier: int, hashes: list[int]) -> int:
        resolved = 0
        for name in hashes:
            count = self.counts.get((slot, tier, name), 0)
            if not count:
                continue
            resolved += 1
            self.counts[slot, tier, name] = count - 1
            if count > 1:
                continue
            del self.counts[slot, tier, name]
            key = self.names[slot, name]
            if not any((slot, lower, name) in self.counts for lower in (GPU, CPU, DISK)):
                del self.names[slot, name]
            if tier == GPU and self.silent[slot] and key not in self.keys(slot, GPU):
                self.probable[slot] = [other for other in self.probable[slot] if other != key] + [key]
                self.trim(slot)
        return resolved

    def trim(self, slot: int) -> None:
        self.probable[slot] = self.probable[slot][max(0, len(self.probable[slot]) - self.silent[slot]) :]

    def match(self, keys: list[int]) -> list[tuple[int, ...]]:
        rows = []
        for slot in sorted(self.probable):
            gpu, cpu, disk = (self.keys(slot, tier) for tier in (GPU, CPU, DISK))
            known = gpu | cpu | disk
            sets = (gpu, cpu, disk, gpu | cpu, known, known | set(self.probable[slot]))
            row = tuple(
                next((i for i, key in enumerate(keys) if key not in held), len(keys)) for held in sets
            )
            if row[-1]:
                rows.append((slot, *row))
        return rows

    def held(self, slot: int) -> tuple[int, int, int, int]:
        gpu, cpu, disk = (len(self.keys(slot, tier)) for tier in (GPU, CPU, DISK))
        return gpu, cpu, disk, len(self.probable[slot])

    def blocks(self) -> int:
        return len(set(self.names.values()) | {key for keys in self.probable.values() for key in keys})


def prompts(random: Random, count: int = 6) -> list[list[int]]:
    """Chains that fork from one another at random places."""
    chains: list[list[int]] = [[]]
    for _ in range(count):
        start = random.choice(chains)
        start = start[: random.randint(0, len(start))]
        chains.append(start + [random.getrandbits(64) for _ in range(random.randint(1, 12))])
    return chains[1:]


class Drill:
    """Random traffic on an index and on the truth beside it."""

    def __init__(self, make: Make, random: Random) -> None:
        self.index, self.truth, self.random = make(), Truth(), random
        self.chains = prompts(random)
        self.slots = [self.open() for _ in range(random.randint(1, 5))]

    def open(self) -> int:
        slot = self.index.open()
        self.truth.open(slot)
        if self.random.random() < 0.5:
            self.silence(slot)
        return slot

    def silence(self, slot: int) -> None:
        self.truth.silent[slot] = capacity = self.random.choice([0, 1, 3, 1000])
        self.truth.trim(slot)
        self.index.set_silent_tier(slot, capacity)

    def name(self, slot: int, key: int) -> int:
        """Mostly one hash per key and slot; sometimes a second, or one that named another key."""
        odds = self.random.random()
        return (key ^ slot) + 1 & 2**64 - 1 if odds < 0.9 else key >> 60 if odds < 0.95 else key

    def part(self) -> tuple[int | None, list[int]]:
        chain = self.random.choice(self.chains)
        start = self.random.randrange(len(chain))
        end = self.random.randint(start, len(chain))
        return (chain[start - 1] if start else None), chain[start:end]

    def step(self) -> None:
        slot = self.random.choice(self.slots)
        tier = self.random.choice([GPU, GPU, GPU, CPU, DISK])
        parent, keys = self.part()
        names = [self.name(slot, key) for key in keys]
        odds = self.random.random()
        if odds < 0.55:
            new = self.index.store(slot, tier, parent, pack(*names), pack(*keys))
            assert new == self.truth.store(slot, tier, names, keys)
        elif odds < 0.9:
            self.random.shuffle(names)
            assert self.index.remove(slot, tier, pack(*names)) == self.truth.remove(slot, tier, names)
        elif odds < 0.94:
            self.index.retire(slot)
            self.truth.retire(slot)
            self.slots.remove(slot)
            self.slots.append(self.open())
        elif odds < 0.98:
            self.index.sweep(self.random.choice([1, 5, 20, 1000]))
        else:
            self.silence(slot)

    def check(self) -> None:
        self.index.check_integrity()
        for chain in self.chains:
            depth = self.random.randint(0, len(chain))
            for keys in (chain, chain[:depth], [*chain[:depth], ANY, *chain[depth:]][: depth + 1]):
                assert self.index.match(pack(*keys)) == self.truth.match(keys)
        for slot in self.slots:
            assert self.index.held(slot) == self.truth.held(slot)
            for key in self.chains[0]:
                assert self.index.key_of(slot, key) == self.truth.names.get((slot, key))
        assert self.index.entries == sum(sum(self.truth.held(slot)[:3]) for slot in self.slots)

    def finish(self) -> None:
        while self.index.sweep(7):
            pass
        self.check()
        assert self.index.blocks == self.truth.blocks()


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("seed", range(40))
def test_an_index_says_what_counting_says(make: Make, seed: int) -> None:
    print(f"seed {seed}")
    drill = Drill(make, Random(seed))
    for step in range(90):
        drill.step()
        if step % 4 == 0:
            drill.check()
    drill.finish()


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("seed", range(20))
def test_an_export_restores_the_same_index_parents_first(make: Make, seed: int) -> None:
    print(f"seed {seed}")
    drill = Drill(make, Random(seed))
    for _ in range(60):
        drill.step()
    copy = make()
    for slot in drill.slots:
        twin = copy.open()
        entries = list(drill.index.export(slot))
        restore(copy, twin, entries)
        assert set(copy.export(twin)) == set(entries)
        known: set[int | None] = {None}
        listed = {key for _, _, _, key, _ in entries}
        for _, parent, _, key, _ in entries:
            assert parent in known or parent not in listed, "a block before its parent"
            known.add(key)
    copy.check_integrity()


def restore(index: BlockIndex, slot: int, entries: list[Entry]) -> None:
    for tier, parent, name, key, count in entries:
        for _ in range(count):
            index.store(slot, tier, parent, pack(name), pack(key))


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("seed", range(20))
def test_eviction_drops_the_probable_first_and_never_a_parent_before_its_child(make: Make, seed: int) -> None:
    print(f"seed {seed}")
    drill = Drill(make, Random(seed))
    for _ in range(80):
        drill.step()
    index = drill.index
    while index.sweep():
        pass
    for slot in drill.slots:  # whole prompts, so that every hole that is found later was made by eviction
        for chain in drill.chains:
            index.store(slot, GPU, None, pack(*(key ^ slot for key in chain)), pack(*chain))
    before = {slot: index.held(slot) for slot in drill.slots}
    blocks = index.blocks
    dropped = index.evict(index.bytes_used)
    assert dropped == 0
    while index.blocks:
        dropped = index.evict(index.bytes_used - 1)
        assert dropped == blocks - index.blocks
        blocks = index.blocks
        index.check_integrity()
        for slot in drill.slots:
            held = index.held(slot)
            assert all(now <= then for now, then in zip(held, before[slot], strict=True))
            if held[:3] != before[slot][:3]:
                assert held[3] == 0, "a confirmed block went before a probable one"
            listed = {key: parent for _, parent, _, key, _ in index.export(slot)}
            assert all(parent is None or parent in listed for parent in listed.values())
        if not dropped and all(index.held(slot)[3] == 0 for slot in drill.slots):
            break
    drill.index.check_integrity()


@pytest.mark.parametrize("make", KINDS)
def test_the_least_recently_stored_prompts_are_evicted_first(make: Make) -> None:
    random = Random(5)
    index = make()
    chains = [[random.getrandbits(64) for _ in range(50)] for _ in range(400)]
    slot = index.open()
    for chain in [*chains, *chains[:100]]:
        index.store(slot, GPU, None, pack(*chain), pack(*chain))
    assert index.evict(index.bytes_used // 2) >= 150 * 50
    matched = [bool(index.match(pack(*chain))) for chain in chains]
    assert index.bytes_used
    assert sum(matched[:100]) == 100
    assert sum(matched[100:200]) == 0
    index.check_integrity()


@pytest.mark.parametrize("make", KINDS)
def test_stored_twice_and_removed_once_is_still_there_in_that_tier(make: Make) -> None:
    index = make()
    slot = index.open()
    assert index.store(slot, GPU, None, pack(1, 2), pack(11, 12)) == 2
    assert index.store(slot, GPU, None, pack(1), pack(11)) == 0
    assert index.store(slot, CPU, None, pack(1), pack(11)) == 1
    assert index.remove(slot, GPU, pack(1, 2)) == 2
    assert index.match(pack(11, 12)) == [(slot, 1, 1, 0, 1, 1, 1)]
    assert index.remove(slot, GPU, pack(1, 2, 3)) == 1
    assert index.match(pack(11, 12)) == [(slot, 0, 1, 0, 1, 1, 1)]
    assert index.key_of(slot, 1) == 11
    assert index.remove(slot, CPU, pack(1)) == 1
    assert index.key_of(slot, 1) is None
    assert (index.blocks, index.entries) == (0, 0)


@pytest.mark.parametrize("make", KINDS)
def test_a_hole_ends_a_match_and_filling_it_joins_the_rest_again(make: Make) -> None:
    index = make()
    one, two = index.open(), index.open()
    keys = list(range(100, 120))
    index.store(one, GPU, None, pack(*keys), pack(*keys))
    index.store(two, GPU, None, pack(*keys), pack(*keys))
    index.remove(one, GPU, pack(107))
    assert [row[:2] for row in index.match(pack(*keys))] == [(one, 7), (two, 20)]
    index.store(one, CPU, 106, pack(107), pack(107))
    assert index.match(pack(*keys))[0] == (one, 7, 0, 0, 20, 20, 20)
    index.store(one, GPU, 106, pack(107), pack(107))
    assert index.match(pack(*keys))[0] == (one, 20, 0, 0, 20, 20, 20)
    index.check_integrity()


@pytest.mark.parametrize("make", KINDS)
def test_a_prefix_counts_from_the_start_and_only_in_its_order(make: Make) -> None:
    """Keys are chained: what follows another start has other keys, and a block in the air is no prefix."""
    index = make()
    one = index.open()
    index.store(one, GPU, None, pack(1, 2, 3), pack(11, 12, 13))
    assert index.match(pack(21, 12, 13)) == []
    assert index.match(pack(12, 13)) == [(one, 2, 0, 0, 2, 2, 2)]
    assert index.match(b"") == []


@pytest.mark.parametrize("make", KINDS)
def test_what_leaves_a_gpu_above_a_silent_tier_is_probable_until_as_many_left_after_it(make: Make) -> None:
    index = make()
    slot = index.open()
    index.set_silent_tier(slot, 3)
    index.store(slot, GPU, None, pack(1, 2, 3, 4, 5), pack(1, 2, 3, 4, 5))
    index.remove(slot, GPU, pack(3, 2, 1))
    assert index.held(slot) == (2, 0, 0, 3)
    assert index.match(pack(1, 2, 3, 4, 5)) == [(slot, 0, 0, 0, 0, 0, 5)]
    index.store(slot, GPU, 2, pack(3), pack(3))
    index.remove(slot, GPU, pack(3, 4))  # 3 left again and is younger now: 2 goes
    assert index.match(pack(1, 2, 3, 4, 5)) == [(slot, 0, 0, 0, 0, 0, 1)]
    index.set_silent_tier(slot, 0)
    assert index.held(slot) == (1, 0, 0, 0)
    assert index.blocks == 1
    index.check_integrity()


@pytest.mark.parametrize("make", KINDS)
def test_a_retired_slot_matches_nothing_at_once_and_its_number_is_free_after_the_sweep(make: Make) -> None:
    index = make()
    old, other = index.open(), index.open()
    keys = pack(*range(1, 501))
    index.store(old, GPU, None, keys, keys)
    index.store(other, GPU, None, keys[:80], keys[:80])
    index.retire(old)
    assert index.match(keys) == [(other, 10, 0, 0, 10, 10, 10)]
    assert index.open() not in (old, other)
    for late in (
        lambda: index.store(old, GPU, None, keys, keys),
        lambda: index.remove(old, GPU, keys),
        lambda: index.retire(old),
        lambda: index.held(old),
        lambda: index.key_of(old, 1),
    ):
        with pytest.raises(ValueError, match=f"slot must be an open one, not {old}"):
            late()
    steps = 1
    while index.sweep(100):
        steps += 1
    assert steps > 1
    assert index.blocks == 10
    assert index.open() == old
    assert index.held(old) == (0, 0, 0, 0)


@pytest.mark.parametrize("make", KINDS)
def test_bad_arguments_are_named_and_change_nothing(make: Make) -> None:
    index = make()
    slot = index.open()
    index.store(slot, GPU, None, pack(1), pack(1))
    before = repr(index)
    for argument, call in (
        ("slot", lambda: index.store(slot + 1, GPU, None, pack(2), pack(2))),
        ("slot", lambda: index.store(-1, GPU, None, pack(2), pack(2))),
        ("slot", lambda: index.set_silent_tier(7, 5)),
        ("slot", lambda: list(index.export(9))),
        ("tier", lambda: index.store(slot, 3, None, pack(2), pack(2))),
        ("tier", lambda: index.remove(slot, -1, pack(1))),
        ("hashes", lambda: index.store(slot, GPU, None, b"1234567", pack(2))),
        ("keys", lambda: index.store(slot, GPU, None, pack(2), pack(2)[:7])),
        ("keys", lambda: index.store(slot, GPU, None, pack(2, 3), pack(2))),
        ("hashes", lambda: index.remove(slot, GPU, b"1")),
        ("keys", lambda: index.match(b"123")),
        ("parent_key", lambda: index.store(slot, GPU, 2**64, pack(2), pack(2))),
        ("parent_key", lambda: index.store(slot, GPU, -1, pack(2), pack(2))),
        ("block_hash", lambda: index.key_of(slot, -1)),
        ("capacity_blocks", lambda: index.set_silent_tier(slot, -1)),
    ):
        with pytest.raises(ValueError, match=argument):
            call()
    assert repr(index) == before
    index.check_integrity()


@pytest.mark.parametrize("make", KINDS)
def test_a_block_stays_while_any_of_its_hashes_is_there(make: Make) -> None:
    index = make()
    slot = index.open()
    assert [index.store(slot, GPU, None, pack(name), pack(11)) for name in (1, 2, 3)] == [1, 0, 0]
    for name, blocks in ((2, 1), (1, 1), (3, 0)):
        assert index.remove(slot, GPU, pack(name)) == 1
        assert index.held(slot) == (blocks, 0, 0, 0)
        index.check_integrity()


@pytest.mark.parametrize("make", KINDS)
def test_a_slot_retired_while_a_sweep_is_under_way_is_swept_too(make: Make) -> None:
    index = make()
    first, second = index.open(), index.open()
    for slot, keys in ((second, pack(*range(1, 501))), (first, pack(*range(1001, 1501)))):
        index.store(slot, GPU, None, keys, keys)
    index.retire(first)
    assert index.sweep(10)
    index.retire(second)
    assert not index.sweep(100_000)
    assert index.blocks == 0
    index.check_integrity()


@pytest.mark.parametrize("make", KINDS)
def test_more_slots_than_fit_one_word_hold_and_match_alike(make: Make) -> None:
    """Sets grow wider while blocks are held, and again; then all go, and the narrow ones stay right."""
    index = make()
    keys = list(range(1, 41))
    slots = [index.open() for _ in range(300)]
    for depth, slot in enumerate(slots):
        part = pack(*keys[: depth % 40 + 1])
        index.store(slot, depth % 3, None, part, part)
    rows = index.match(pack(*keys))
    assert [(row[0], row[5]) for row in rows] == [(slot, slot % 40 + 1) for slot in slots]
    assert [row[1 + row[0] % 3] for row in rows] == [slot % 40 + 1 for slot in slots]
    index.check_integrity()
    for slot in slots[1:]:
        index.retire(slot)
    while index.sweep():
        pass
    assert index.match(pack(*keys)) == [(slots[0], 1, 0, 0, 1, 1, 1)]
    assert index.blocks == 1
    index.check_integrity()


@pytest.mark.parametrize("make", KINDS)
def test_restarts_without_a_sweep_between_them_do_not_pile_up(make: Make) -> None:
    index = make()
    keys = pack(*range(1, 11))
    numbers = set()
    for _ in range(1000):
        slot = index.open()
        numbers.add(slot)
        index.store(slot, GPU, None, keys, keys)
        index.retire(slot)
        index.sweep(20)
    assert len(numbers) < 200
    while index.sweep():
        pass
    assert (index.blocks, index.entries) == (0, 0)


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("keep_prompt", [False, True])
def test_memory_returns_to_base_when_chains_come_and_go(make: Make, keep_prompt: bool) -> None:
    """No node stays for a chain that is gone, below a kept prefix neither."""
    random = Random(9)
    index = make()
    slot = index.open()
    system = [random.getrandbits(64) for _ in range(16)]
    if keep_prompt:
        index.store(slot, GPU, None, pack(*system), pack(*system))
    base = (index.blocks, index.bytes_used)
    peak = 0
    for _ in range(5):
        branches = [[random.getrandbits(64) for _ in range(4)] for _ in range(1000)]
        for branch in branches:
            above = random.choice(system)
            index.store(slot, GPU, above, pack(*branch), pack(*branch))
        peak = max(peak, index.bytes_used)
        random.shuffle(branches)
        for branch in branches:
            assert index.remove(slot, GPU, pack(*branch)) == 4
        assert index.blocks == base[0]
        index.check_integrity()
    assert index.bytes_used <= base[1] + (peak - base[1]) // 50
    index.retire(slot)
    while index.sweep():
        pass
    assert index.blocks == 0


@pytest.mark.parametrize("make", KINDS[1:])
def test_resident_memory_returns_as_well(make: Make) -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    random = Random(10)
    index = make()
    base = 0
    for turn in range(9):
        slot = index.open()
        for _ in range(400):
            keys = random.randbytes(8 * 500)
            index.store(slot, GPU, None, keys, keys)
        index.retire(slot)
        while index.sweep():
            pass
        if turn == 2:
            base = resident()
    assert resident() - base < 16 * 2**20  # six turns of 8 MB each


@pytest.mark.parametrize("make", KINDS[1:])
def test_threads_that_call_it_at_once_do_not_corrupt_it(make: Make) -> None:
    """One thread owns the index; the interpreter's lock keeps it whole for those who forget."""
    index = make()
    chains = prompts(Random(3), 20)
    slots = [index.open() for _ in range(8)]
    failures: list[BaseException] = []

    def traffic(slot: int) -> None:
        random = Random(slot)
        try:
            for _ in range(1500):
                keys = pack(*random.choice(chains))
                index.store(slot, GPU, None, keys, keys)
                index.match(keys)
                index.remove(slot, GPU, keys)
        except BaseException as error:
            failures.append(error)

    threads = [Thread(target=traffic, args=(slot,)) for slot in slots]
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval_s)
    assert not failures
    assert (index.blocks, index.entries) == (0, 0)
    index.check_integrity()


@pytest.mark.parametrize("make", KINDS)
def test_chains_that_bite_their_own_tail_harm_nobody(make: Make) -> None:
    """No honest engine has them; a lying one must not make eviction or export run for ever."""
    index = make()
    slot = index.open()
    index.store(slot, GPU, 3, pack(1, 2, 3), pack(1, 2, 3))
    index.store(slot, GPU, 9, pack(9), pack(9))
    assert len(list(index.export(slot))) == 4
    index.check_integrity()
    index.evict(0)
    assert index.blocks == 0
    index.check_integrity()


@pytest.mark.parametrize("pack_any", [pack_keys, pack_in_python])
def test_keys_are_packed_in_the_machines_order_or_refused(pack_any: Callable[[list[int]], bytes]) -> None:
    keys = [0, 1, 2**63, 2**64 - 1, 12345678901234567890]
    assert pack_any(keys) == array("Q", keys).tobytes()
    assert pack_any([]) == b""
    for bad in (-1, 2**64, "1", 1.5, None):
        with pytest.raises(ValueError, match="a key must be from 0 to"):
            pack_any([1, bad])  # type: ignore[list-item]


def test_the_compiled_index_is_picked_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVROUTE_PURE_PYTHON", raising=False)
    assert type(make_block_index()) is (Compiled or BlockIndex)
    monkeypatch.setenv("KVROUTE_PURE_PYTHON", "1")
    assert type(make_block_index()) is BlockIndex
