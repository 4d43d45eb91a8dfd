"""GPU caches that no engine can have: one knows the future, one never evicts. They show what is left."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvroute.clock import Clock
from kvroute.conductor.tiers.base import BlockInfo
from kvroute.conductor.tiers.eviction import Ranked
from kvroute.conductor.tiers.stack import BlockModel
from kvroute.loadtests.mock_engine.block_cache import BlockCache, CacheCorruption
from kvroute.loadtests.simulator.caches import RankedCache


class Future:
    """When each block of a list of arrivals will be asked for, over the whole fleet."""

    def __init__(self) -> None:
        self._arrivals_s: Mapping[int, Sequence[float]] = {}
        self._begun: dict[int, int] = {}
        self._caches: list[RankedCache] = []

    def foretell(self, prompts: Iterable[tuple[float, Sequence[int]]]) -> None:
        """(arrival in seconds, keys of the full blocks), in order of arrival."""
        arrivals_s: dict[int, list[float]] = {}
        for arrival_s, keys in prompts:
            for key in keys:
                arrivals_s.setdefault(key, []).append(arrival_s)
        self._arrivals_s = arrivals_s

    def next_s(self, key: int) -> float:
        """Arrival of the next request of the block that has not begun; infinite for none."""
        arrivals_s = self._arrivals_s.get(key, ())
        begun = self._begun.get(key, 0)
        return arrivals_s[begun] if begun < len(arrivals_s) else float("inf")

    def follow(self, cache: RankedCache) -> None:
        """Tell a cache whose order this is of every change."""
        self._caches.append(cache)

    def begin(self, cache: RankedCache, keys: Sequence[int]) -> None:
        """A request of these blocks has begun in one of the caches: what is next is another one."""
        for key in keys:
            self._begun[key] = self._begun.get(key, 0) + 1
        for other in self._caches:
            if other is not cache:
                other.offer_again(keys)


class Clairvoyant(Ranked):
    """The leaf asked for last goes first (Belady): the most hits that an eviction of equal blocks can have.

    It knows nothing of what blocks cost, nor of tiers.
    """

    def __init__(self, future: Future) -> None:
        super().__init__()
        self._future = future

    def _rank(self, block: BlockInfo) -> tuple[float, ...]:
        return (-self._future.next_s(block.key), -block.depth)


class ClairvoyantCache(RankedCache):
    """A cache of the clairvoyant order, and part of the fleet that it holds for."""

    def __init__(
        self, capacity_blocks: int, future: Future, model: BlockModel, block_tokens: int, clock: Clock
    ) -> None:
        super().__init__(capacity_blocks, Clairvoyant(future), model, block_tokens, clock)
        self._future = future
        future.follow(self)

    def begin(self, keys: Sequence[int], hits: int, prompt_tokens: int) -> None:
        super().begin(keys, hits, prompt_tokens)
        self._future.begin(self, keys[: prompt_tokens // self._block_tokens])


class EndlessCache(BlockCache):
    """Whatever any of the fleet has computed is in all of its GPUs at once and for good; only what running
    sequences hold takes room.
    """

    def __init__(self, capacity_blocks: int, everywhere: set[int]) -> None:
        super().__init__(capacity_blocks)
        self._everywhere = everywhere

    def __contains__(self, key: int) -> bool:
        return key in self._everywhere

    @property
    def resident_blocks(self) -> int:
        return len(self._everywhere)

    def keys(self) -> Iterable[int]:
        return self._everywhere

    def match(self, keys: Sequence[int]) -> int:
        everywhere = self._everywhere
        return next((count for count, key in enumerate(keys) if key not in everywhere), len(keys))

    def acquire(self, keys: Sequence[int]) -> None:
        """May take more room than there is; `allocate` then fails, and the caller lets go again."""
        for key in keys:
            self._hold(key)

    def allocate(self, blocks: int) -> bool:
        if blocks > self.free_blocks:
            return False
        self.free_blocks -= blocks
        return True

    def publish(self, key: int, parent: int | None) -> bool:
        self.free_blocks += 1
        self._hold(key)
        new = key not in self._everywhere
        self._everywhere.add(key)
        return new

    publish_run = BlockCache.publish_each

    def release(self, keys: Sequence[int], private_blocks: int) -> None:
        for key in keys:
            self._refs[key] -= 1
            if not self._refs[key]:
                del self._refs[key]
                self.free_blocks += 1
        self.free_blocks += private_blocks

    def clear(self) -> bool:
        """Only whether it could be: the others keep what all have."""
        return not self._refs

    def check_integrity(self, private_blocks: int = 0) -> None:
        held = self.free_blocks + private_blocks + len(self._refs)
        if held != self.capacity_blocks:
            raise CacheCorruption(f"{held} blocks accounted for, of {self.capacity_blocks}")

    def _hold(self, key: int) -> None:
        count = self._refs.get(key, 0)
        self._refs[key] = count + 1
        if not count:
            self.free_blocks -= 1
