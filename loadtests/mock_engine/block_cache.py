"""The KV blocks of one engine: reference counts, prefix sharing and leaf-first LRU eviction.

Pure: no clock, no I/O. A block is *private* while its owner still fills it (only counted) and *resident*
once published under its chained key, when others may share it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice


class CacheCorruption(AssertionError):
    """The cache's books do not add up; the message says which."""


class BlockCache:
    """Counts in blocks. A resident block nobody references is idle: still a hit, and the first to go."""

    def __init__(self, capacity_blocks: int) -> None:
        if capacity_blocks < 1:
            raise ValueError(f"capacity_blocks must be at least 1, got {capacity_blocks}")
        self.capacity_blocks = capacity_blocks
        self.free_blocks = capacity_blocks
        self._refs: dict[int, int] = {}
        self._parents: dict[int, int | None] = {}
        # Oldest first. Blocks are released tail first, and whoever holds a child holds its parents, so a
        # child always stands before its parent here: evicting from the front evicts leaves.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._removed: list[int] = []

    def __repr__(self) -> str:
        return (
            f"<BlockCache {self.capacity_blocks} blocks: {self.free_blocks} free, "
            f"{len(self._idle)} idle, {len(self._refs)} resident>"
        )

    def __contains__(self, key: int) -> bool:
        return key in self._refs

    @property
    def resident_blocks(self) -> int:
        """Blocks a new request could share."""
        return len(self._refs)

    @property
    def idle_blocks(self) -> int:
        """Resident blocks that may be evicted."""
        return len(self._idle)

    @property
    def used_ratio(self) -> float:
        """Share of blocks some request holds, 0..1; idle blocks count as unused, as engines report it."""
        return 1 - (self.free_blocks + len(self._idle)) / self.capacity_blocks

    def keys(self) -> Iterable[int]:
        """Keys of all resident blocks, in order of publication."""
        return self._refs.keys()

    def match(self, keys: Sequence[int]) -> int:
        """How many leading blocks are resident; changes nothing."""
        refs = self._refs
        for count, key in enumerate(keys):
            if key not in refs:
                return count
        return len(keys)

    def acquire(self, keys: Sequence[int]) -> None:
        """Reference resident blocks, so that they stay."""
        refs, idle = self._refs, self._idle
        for key in keys:
            count = refs[key]
            if not count:
                del idle[key]
            refs[key] = count + 1

    def begin(self, keys: Sequence[int], hits: int, prompt_tokens: int) -> None:
        """A sequence of these blocks was admitted and found so many of them here: nothing to LRU, which goes
        by the order of releases.
        """

    def fits(self, keys: Sequence[int], blocks: int) -> bool:
        """Whether so many could be taken beside these resident ones; changes nothing."""
        short = blocks - self.free_blocks
        return short <= 0 or short <= self.idle_blocks - sum([not self._refs[key] for key in keys])

    def allocate(self, blocks: int) -> bool:
        """Take private blocks, evicting idle ones as needed; False, and no change, when there are too few."""
        short = blocks - self.free_blocks
        if short > len(self._idle):
            return False
        if short > 0:
            refs, parents, idle = self._refs, self._parents, self._idle
            gone = list(islice(idle, short))
            for key in gone:
                del idle[key], refs[key], parents[key]
            self._removed += gone
        self.free_blocks += max(short, 0) - blocks
        return True

    def publish(self, key: int, parent: int | None) -> bool:
        """Turn one of the caller's private blocks into a resident one that the caller references.

        False when the key is resident already: the caller then shares that block and gives its own back.
        """
        count = self._refs.get(key)
        if count is None:
            self._refs[key] = 1
            self._parents[key] = parent
            return True
        if not count:
            del self._idle[key]
        self._refs[key] = count + 1
        self.free_blocks += 1
        return False

    def publish_run(self, keys: Sequence[int], start: int, stop: int) -> list[tuple[int, int]]:
        """`publish` blocks `start` to `stop` of a chain; the runs among them that were not resident."""
        refs, run = self._refs, keys[start:stop]
        if refs.keys().isdisjoint(run):
            refs.update(dict.fromkeys(run, 1))
            self._parents.update(zip(run, [keys[start - 1] if start else None, *run], strict=False))
            return [(start, stop)]
        return self.publish_each(keys, start, stop)

    def publish_each(self, keys: Sequence[int], start: int, stop: int) -> list[tuple[int, int]]:
        """The same one by one: the `publish_run` of a cache with a `publish` of its own."""
        runs, begin = [], start
        for index in range(start, stop):
            if not self.publish(keys[index], keys[index - 1] if index else None):
                if begin < index:
                    runs.append((begin, index))
                begin = index + 1
        if begin < stop:
            runs.append((begin, stop))
        return runs

    def release(self, keys: Sequence[int], private_blocks: int) -> None:
        """Give up references to resident blocks, tail first, and private blocks."""
        refs, idle = self._refs, self._idle
        for key in reversed(keys):
            count = refs[key] - 1
            refs[key] = count
            if not count:
                idle[key] = None
        self.free_blocks += private_blocks

    def clear(self) -> bool:
        """Forget every resident block; False, and no change, while any block is in use, as in vLLM."""
        if self.free_blocks + len(self._idle) != self.capacity_blocks:
            return False
        self.free_blocks += len(self._idle)
        for book in (self._refs, self._parents, self._idle):
            book.clear()
        return True

    @property
    def has_removed(self) -> bool:
        """Whether something was evicted since `take_removed`."""
        return bool(self._removed)

    def take_removed(self) -> list[int]:
        """Keys evicted since the last call, oldest first."""
        removed, self._removed = self._removed, []
        return removed

    def check_integrity(self, private_blocks: int = 0) -> None:
        """Raise `CacheCorruption` unless the books add up; `private_blocks` is what owners hold in all."""
        held = self.free_blocks + private_blocks + len(self._refs)
        if held != self.capacity_blocks:
            raise CacheCorruption(f"{held} blocks accounted for, of {self.capacity_blocks}")
        position = {key: i for i, key in enumerate(self._idle)}
        for key, count in self._refs.items():
            if count < 0 or (count == 0) != (key in position):
                raise CacheCorruption(f"block {key:#x} has {count} references, idle: {key in position}")
            parent = self._parents[key]
            if parent is None:
                continue
            if parent not in self._refs:
                raise CacheCorruption(f"block {key:#x} outlived its parent")
            if key not in position and parent in position:
                raise CacheCorruption(f"block {key:#x} is referenced, its parent is not")
            if key in position and parent in position and position[key] > position[parent]:
                raise CacheCorruption(f"block {key:#x} would be evicted after its parent")
