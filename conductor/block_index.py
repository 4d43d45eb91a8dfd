"""Confirmed blocks: which holder has which block in which tier, as the engines' own events say.

This is the reference in plain Python. `_block_index.c` is the same class, smaller and faster; where it could
not be built, this one serves. `make_block_index` picks.

Hashes are the engine's names of blocks, known per slot; keys are ours (`keys.py`), the same for all slots.
Both are unsigned 64-bit integers, packed in the machine's byte order (`array("Q").tobytes()`). A slot is a
small integer that stands for one holder. Because keys are chained, a key has one parent for good; whoever
stores chains promises that.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from itertools import chain as chained

GPU, CPU, DISK = 0, 1, 2
PROBABLE = 3
"""Not a tier of events: what left the GPU of an engine whose lower tier sends none."""
LANES = ((GPU,), (CPU,), (DISK,), (GPU, CPU), (GPU, CPU, DISK), (GPU, CPU, DISK, PROBABLE))
"""The tiers behind each count of a match."""

U64_END = 2**64
BLOCK_BYTES = 130
NAME_BYTES = 200
"""Memory of a block and of a slot's name for one, as tracemalloc finds it when tables have just grown."""

Match = tuple[int, int, int, int, int, int, int]
"""(slot, gpu, cpu, disk, gpu_cpu, any, probable), see `BlockIndex.match`."""
Entry = tuple[int, int | None, int, int, int]
"""(tier, parent key, hash, key, count), see `BlockIndex.export`."""


class _Slot:
    __slots__ = ("alias", "bit", "counts", "held", "names", "recent", "silent")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.names: dict[int, int] = {}
        """Engine hash -> key, while the hash is in a tier."""
        self.counts: tuple[dict[int, int], ...] = ({}, {}, {})
        """Per tier: engine hash -> how often it was stored more than removed."""
        self.alias: Counter[tuple[int, int]] = Counter()
        """(tier, key) -> hashes there that name the key, beyond the first."""
        self.held = [0, 0, 0]
        self.recent: dict[int, None] = {}
        """Keys that are probable, the first to go first."""
        self.silent = 0


class BlockIndex:
    """Counts per slot, tier and key: what was stored twice and removed once is still there.

    Everything is synchronous, and one thread owns it. Bad arguments are a `ValueError` that names them, and
    change nothing.
    """

    def __init__(self) -> None:
        self._masks: tuple[dict[int, int], ...] = ({}, {}, {}, {})
        """Per tier, PROBABLE last: key -> bits of the slots that hold it."""
        self._parents: dict[int, int | None] = {}
        """Every key known, least recently stored first."""
        self._slots: dict[int, _Slot] = {}
        self._retired: dict[int, _Slot] = {}
        self._alive = 0
        self._names = 0

    @property
    def blocks(self) -> int:
        """Gauge: distinct keys known; those of retired slots count until they are swept."""
        return len(self._parents)

    @property
    def entries(self) -> int:
        """Gauge: (slot, tier, key) triples in confirmed tiers."""
        return sum(sum(slot.held) for slot in self._slots.values())

    @property
    def bytes_used(self) -> int:
        """Gauge: estimated memory."""
        probable = sum(len(slot.recent) for slot in chained(self._slots.values(), self._retired.values()))
        return len(self._parents) * BLOCK_BYTES + self._names * NAME_BYTES + probable * BLOCK_BYTES // 2

    def open(self) -> int:
        """A new empty slot; numbers of swept ones are used again."""
        number = 0
        while number in self._slots or number in self._retired:
            number += 1
        self._slots[number] = _Slot(1 << number)
        self._alive |= 1 << number
        return number

    def retire(self, slot: int) -> None:
        """Forget a slot: from now on it matches nothing. Constant time; `sweep` gives the memory back."""
        retired = self._slot(slot)
        del self._slots[slot]
        self._retired[slot] = retired
        self._alive ^= retired.bit

    def sweep(self, blocks: int = 4096) -> bool:
        """Clear retired slots from so many blocks; True while there is more to do."""
        while self._retired and blocks > 0:
            number, slot = next(iter(self._retired.items()))
            while blocks > 0 and (slot.names or slot.recent):
                if slot.names:
                    key = slot.names.popitem()[1]
                    self._names -= 1
                else:
                    key = slot.recent.popitem()[0]
                for tier in (GPU, CPU, DISK, PROBABLE):
                    self._unmark(slot, tier, key)
                self._forget_unheld(key)
                blocks -= 1
            if not slot.names and not slot.recent:
                del self._retired[number]
        return bool(self._retired)

    def store(self, slot: int, tier: int, parent_key: int | None, hashes: bytes, keys: bytes) -> int:
        """A chain of blocks that `slot` has in `tier` once more; returns how many it did not have there.

        hashes and keys are parallel; the parent of keys[0] is `parent_key` (None: it has none, it is the
        first block of a prompt), that of keys[i] is keys[i - 1]. A hash that named another key before lets
        go of that one.
        """
        holder = self._slot(slot)
        counts = holder.counts[_tier(tier)]
        names, chain = _unpack(hashes, "hashes"), _unpack(keys, "keys")
        if len(names) != len(chain):
            raise ValueError(f"keys must be as many as hashes ({len(names)}), not {len(chain)}")
        parent = None if parent_key is None else _u64(parent_key, "parent_key")
        new = 0
        for name, key in zip(names, chain, strict=True):
            self._parents.pop(key, None)
            self._parents[key] = parent
            parent = key
            if holder.names.get(name, key) != key:
                self._let_go(holder, name)
            if name not in holder.names:
                holder.names[name] = key
                self._names += 1
            counts[name] = counts.get(name, 0) + 1
            if counts[name] == 1:
                new += self._enter(holder, tier, key)
        return new

    def remove(self, slot: int, tier: int, hashes: bytes) -> int:
        """Take blocks from `tier` once; returns how many it had. The rest are orphans and change nothing."""
        holder = self._slot(slot)
        counts = holder.counts[_tier(tier)]
        resolved = 0
        for name in _unpack(hashes, "hashes"):
            count = counts.get(name, 0)
            resolved += count > 0
            if count > 1:
                counts[name] = count - 1
            elif count:
                del counts[name]
                self._leave(holder, tier, holder.names[name])
                self._drop_unused_name(holder, name)
        return resolved

    def key_of(self, slot: int, block_hash: int) -> int | None:
        """Our key of an engine hash that `slot` has in any confirmed tier."""
        return self._slot(slot).names.get(_u64(block_hash, "block_hash"))

    def set_silent_tier(self, slot: int, capacity_blocks: int) -> None:
        """The engine has a lower tier of this size that sends no events; 0 is none.

        A block that leaves the GPU is then probable, until as many others left after it.
        """
        holder = self._slot(slot)
        holder.silent = _u64(capacity_blocks, "capacity_blocks")
        self._trim_probable(holder)

    def held(self, slot: int) -> tuple[int, int, int, int]:
        """Distinct blocks in (gpu, cpu, disk, probable)."""
        holder = self._slot(slot)
        return holder.held[GPU], holder.held[CPU], holder.held[DISK], len(holder.recent)

    def match(self, keys: bytes) -> list[Match]:
        """What every slot that has the first block holds of a chain: contiguous blocks from the first.

        gpu, cpu, disk: in that tier alone; gpu_cpu: each block in one of the two; any: in any confirmed
        tier; probable: in any, or probably in the silent one. In order of slots.
        """
        chain = _unpack(keys, "keys")
        found: dict[tuple[int, ...], dict[int, int]] = {}
        lanes = []
        for lane in LANES:
            tiers = tuple(tier for tier in lane if self._masks[tier])
            if tiers not in found:
                found[tiers] = self._contiguous(chain, tiers)
            lanes.append(found[tiers])
        gpu, cpu, disk, gpu_cpu, known, probable = lanes
        return [
            (number, gpu[bit], cpu[bit], disk[bit], gpu_cpu[bit], known[bit], probable[bit])
            for number, bit in sorted((number, slot.bit) for number, slot in self._slots.items())
            if probable[bit]
        ]

    def _contiguous(self, chain: memoryview, tiers: tuple[int, ...]) -> dict[int, int]:
        """Bit of each slot -> blocks of the chain it has in these tiers, from the first to the first hole."""
        masks = [self._masks[tier] for tier in tiers]
        depths: dict[int, int] = {}
        alive = self._alive
        for depth, key in enumerate(chain):
            holders = 0
            for mask in masks:
                holders |= mask.get(key, 0)
            lost = alive & ~holders
            if lost:
                depths.update(dict.fromkeys(_bits(lost), depth))
                alive ^= lost
                if not alive:
                    break
        depths.update(dict.fromkeys(_bits(alive), len(chain)))
        return depths

    def export(self, slot: int) -> Iterator[Entry]:
        """What `slot` holds in confirmed tiers, parents before children, for `store` in another index."""
        holder = self._slot(slot)
        names: dict[int, list[int]] = {}
        for name, key in holder.names.items():
            names.setdefault(key, []).append(name)
        waiting: set[int] = set(names)
        for start in names:
            path = []
            above: int | None = start
            while above is not None and above in waiting:
                path.append(above)
                waiting.discard(above)
                above = self._parents[above]
            for key in reversed(path):
                for tier, counts in enumerate(holder.counts):
                    yield from (
                        (tier, self._parents[key], name, key, counts[name])
                        for name in names[key]
                        if name in counts
                    )

    def evict(self, bytes_limit: int) -> int:
        """Drop blocks until `bytes_used` is at most this: what is only probable first, then the least
        recently stored, never a block before those that follow it. Returns blocks dropped.
        """
        before = self.blocks
        while self.bytes_used > bytes_limit and any(slot.recent for slot in self._slots.values()):
            for slot in self._slots.values():
                if slot.recent:
                    self._drop_probable(slot)
        excess = (self.bytes_used - bytes_limit) // BLOCK_BYTES + 1
        while self.bytes_used > bytes_limit and self._parents:
            self._evict_leaves(max(1, excess // 2))
        return before - self.blocks

    def _evict_leaves(self, blocks: int) -> None:
        children = Counter(self._parents.values())
        dropped: dict[int, None] = {}
        passed: set[int | None] = set()
        for candidate in self._parents:
            passed.add(candidate)
            key: int | None = candidate
            while key is not None and key in passed and not children[key] and len(dropped) < blocks:
                dropped[key] = None
                passed.discard(key)
                key = self._parents[key]
                children[key] -= 1
        if not dropped:  # chains that bite their own tail
            dropped[next(iter(self._parents))] = None
        for slot in chained(self._slots.values(), self._retired.values()):
            for name in [name for name, key in slot.names.items() if key in dropped]:
                self._let_go(slot, name)
            for key in [key for key in slot.recent if key in dropped]:
                self._drop_probable(slot, key)
        for key in dropped:
            self._parents.pop(key, None)

    def _enter(self, slot: _Slot, tier: int, key: int) -> bool:
        mask = self._masks[tier].get(key, 0)
        if mask & slot.bit:
            slot.alias[tier, key] += 1
            return False
        self._masks[tier][key] = mask | slot.bit
        slot.held[tier] += 1
        return True

    def _leave(self, slot: _Slot, tier: int, key: int, silently: bool = True) -> None:
        if slot.alias[tier, key] > 1:
            slot.alias[tier, key] -= 1
        elif slot.alias.pop((tier, key), 0) == 0:
            self._unmark(slot, tier, key)
            slot.held[tier] -= 1
            if silently and tier == GPU and slot.silent:
                slot.recent.pop(key, None)
                slot.recent[key] = None
                self._masks[PROBABLE][key] = self._masks[PROBABLE].get(key, 0) | slot.bit
                self._trim_probable(slot)
            self._forget_unheld(key)

    def _let_go(self, slot: _Slot, name: int) -> None:
        """Take a name from all tiers, without a guess that it went to a lower one."""
        for tier, counts in enumerate(slot.counts):
            if counts.pop(name, 0):
                self._leave(slot, tier, slot.names[name], silently=False)
        self._drop_unused_name(slot, name)

    def _drop_unused_name(self, slot: _Slot, name: int) -> None:
        if not any(name in counts for counts in slot.counts):
            del slot.names[name]
            self._names -= 1

    def _trim_probable(self, slot: _Slot) -> None:
        while len(slot.recent) > slot.silent:
            self._drop_probable(slot)

    def _drop_probable(self, slot: _Slot, key: int | None = None) -> None:
        oldest = next(iter(slot.recent)) if key is None else key
        del slot.recent[oldest]
        self._unmark(slot, PROBABLE, oldest)
        self._forget_unheld(oldest)

    def _unmark(self, slot: _Slot, tier: int, key: int) -> None:
        mask = self._masks[tier].get(key, 0) & ~slot.bit
        if mask:
            self._masks[tier][key] = mask
        else:
            self._masks[tier].pop(key, None)

    def _forget_unheld(self, key: int) -> None:
        if not any(key in mask for mask in self._masks):
            self._parents.pop(key, None)

    def _slot(self, slot: int) -> _Slot:
        found = self._slots.get(slot)
        if found is None:
            raise ValueError(f"slot must be an open one, not {slot}")
        return found

    def check_integrity(self) -> None:
        """Raise `AssertionError` if an invariant is broken. Looks at everything: for tests and idle time."""
        assert set().union(*self._masks) == set(self._parents), "keys held and keys known differ"
        assert self._alive == sum(slot.bit for slot in self._slots.values()), "bits of open slots differ"
        everyone = [*self._slots.values(), *self._retired.values()]
        assert self._names == sum(len(slot.names) for slot in everyone), "names are miscounted"
        for number, slot in self._slots.items():
            assert slot.bit == 1 << number, f"slot {number} has bit {slot.bit}"
            assert set().union(*slot.counts) == set(slot.names), f"slot {number} has names in no tier"
            assert len(slot.recent) <= slot.silent, f"slot {number} has more probable blocks than it may"
            for tier, counts in enumerate(slot.counts):
                held = Counter(slot.names[name] for name in counts)
                assert len(held) == slot.held[tier], f"slot {number} is miscounted in tier {tier}"
                alias = {key: extra for (at, key), extra in slot.alias.items() if at == tier and extra}
                assert alias == {key: count - 1 for key, count in held.items() if count > 1}, "aliases differ"
                self._check_marks(slot, tier, set(held))
            self._check_marks(slot, PROBABLE, set(slot.recent))

    def _check_marks(self, slot: _Slot, tier: int, keys: set[int]) -> None:
        marked = {key for key, mask in self._masks[tier].items() if mask & slot.bit}
        assert marked == keys, f"tier {tier} lists {len(marked)} blocks, the slot names {len(keys)}"

    def __repr__(self) -> str:
        return f"<BlockIndex blocks={self.blocks} entries={self.entries} bytes={self.bytes_used}>"


def _tier(tier: int) -> int:
    if tier not in (GPU, CPU, DISK):
        raise ValueError(f"tier must be {GPU} (GPU), {CPU} (CPU) or {DISK} (disk), not {tier}")
    return tier


def _u64(value: int, argument: str) -> int:
    if not 0 <= value < U64_END:
        raise ValueError(f"{argument} must be from 0 to 2**64 - 1, not {value}")
    return value


def _unpack(packed: bytes, argument: str) -> memoryview:
    if len(packed) % 8:
        raise ValueError(f"{argument} must be packed 64-bit integers, not {len(packed)} bytes")
    return memoryview(packed).cast("Q")


def _bits(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit


def make_block_index() -> BlockIndex:
    """The index in C; in Python where that was not built, or with KVROUTE_PURE_PYTHON=1."""
    if os.environ.get("KVROUTE_PURE_PYTHON") == "1":
        return BlockIndex()
    try:
        from kvroute.conductor._block_index import BlockIndex as Compiled
    except ImportError:
        return BlockIndex()
    return Compiled()
