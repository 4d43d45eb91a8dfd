"""Caches and tiers of a simulated fleet, as its `Memory` wants them, and what the index is told of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvroute.clock import Clock
from kvroute.conductor.block_index import CPU, DISK, BlockIndex
from kvroute.conductor.packing import pack_keys
from kvroute.conductor.tiers.base import Link
from kvroute.conductor.tiers.hazard import Hazard, HazardTable
from kvroute.conductor.tiers.registry import ADMISSIONS, EVICTIONS, WRITE_BACKS
from kvroute.conductor.tiers.stack import BlockModel, TierChange, TierStack
from kvroute.conductor.tiers.tier import Tier
from kvroute.loadtests.mock_engine.block_cache import BlockCache
from kvroute.loadtests.simulator.bounds import ClairvoyantCache, EndlessCache, Future
from kvroute.loadtests.simulator.caches import Conversations, RankedCache
from kvroute.loadtests.simulator.setting import Setting
from kvroute.policies.costs.links import Link as PricedLink

GHOSTS = 2**18
"""Keys whose reuse the hazard index of a fleet remembers."""
_TIERS = {"CPU": CPU, "DISK": DISK}


class FleetMemory:
    """Makes every engine's cache and tiers; knows what the caches of a fleet have in common."""

    def __init__(self, setting: Setting, clock: Clock) -> None:
        block_tokens, speed = setting.block_tokens, setting.speed
        self.memory = setting.memory
        self.block_bytes = speed.kv_bytes_per_token * block_tokens
        self._capacity_blocks = setting.kv_tokens // block_tokens
        self._block_tokens = block_tokens
        self._clock = clock
        calibrated = speed.calibrated(setting.scale, 0.0)
        self._model = BlockModel(self.block_bytes, lambda depth: calibrated.block_s(depth, block_tokens))
        self._future = Future()
        self._everywhere: set[int] = set()
        self._table = HazardTable(GHOSTS)
        self._conversations = Conversations()

    @property
    def silent_tier_blocks(self) -> int:
        """What the index is told of the tiers in place of events."""
        return self.memory.lower_tokens // self._block_tokens if self.memory.tier_news == "size" else 0

    def foretell(self, prompts: Iterable[tuple[float, Sequence[int]]]) -> None:
        """What will arrive, for the cache that knows: seconds, and keys of full blocks."""
        if self.memory.knows_future:
            self._future.foretell(prompts)

    def cache(self) -> BlockCache:
        """Of one engine, empty."""
        name, blocks = self.memory.gpu_eviction, self._capacity_blocks
        if name == "lru":
            return BlockCache(blocks)
        if name == "endless":
            return EndlessCache(blocks, self._everywhere)
        if name == "belady":
            return ClairvoyantCache(blocks, self._future, self._model, self._block_tokens, self._clock)
        eviction = EVICTIONS.make(name)
        conversations = None
        if isinstance(eviction, Hazard):
            eviction.table, conversations = self._table, self._conversations
        return RankedCache(blocks, eviction, self._model, self._block_tokens, self._clock, conversations)

    def tiers(self) -> PulledTiers | None:
        """Of one engine, empty; None where there is nothing below its GPU and nobody to pull from."""
        memory = self.memory
        tiers = []
        if memory.cpu_tokens:
            rules = memory.cpu_admission, memory.cpu_eviction, memory.cpu_write
            tiers.append(self._tier("CPU", memory.cpu_tokens, rules, memory.cpu_link))
        if memory.disk_tokens:
            rules = "always", "lru", "back"
            tiers.append(self._tier("DISK", memory.disk_tokens, rules, memory.disk_link))
        if not tiers and memory.peer_link is None:
            return None
        return PulledTiers(tiers, self._model, self._clock)

    def _tier(self, medium: str, tokens: int, rules: tuple[str, str, str], link: PricedLink) -> Tier:
        admission, eviction, write = rules
        return Tier(
            medium,
            max(1, tokens // self._block_tokens) * self._model.block_bytes,
            ADMISSIONS.make(admission),
            EVICTIONS.make(eviction),
            WRITE_BACKS.make(write),
            Link(link.bytes_per_s, link.latency_s),
        )


class PulledTiers(TierStack):
    """Tiers, and beside them what was pulled from a peer for requests that are about to begin."""

    def __init__(self, tiers: Sequence[Tier], model: BlockModel, clock: Clock) -> None:
        super().__init__(tiers, model, clock)
        self._pulled: Counter[int] = Counter()

    def receive(self, keys: Sequence[int]) -> None:
        """Blocks of a request came from a peer; they take no load. `let_go` of them when it has begun."""
        self._pulled.update(keys)

    def let_go(self, keys: Sequence[int]) -> None:
        """The request that they were pulled for has them, or is over; no matter whether they are here."""
        for key in keys:
            if self._pulled[key] > 1:
                self._pulled[key] -= 1
            else:
                del self._pulled[key]

    def clear(self) -> None:
        super().clear()
        self._pulled.clear()

    def match(self, keys: Sequence[int]) -> int:
        if not self._pulled:
            return super().match(keys)
        for count, key in enumerate(keys):
            if key not in self._pulled and not any(key in tier for tier in self.tiers):
                return count
        return len(keys)

    def load_s(self, keys: Sequence[int]) -> float:
        if not self._pulled:
            return super().load_s(keys)
        return super().load_s([key for key in keys if key not in self._pulled])

    def check_integrity(self) -> None:
        super().check_integrity()
        if self._pulled:
            raise AssertionError(f"{len(self._pulled)} pulled blocks are nobody's")


def tell_tiers(blocks: BlockIndex, slot: int, changes: Sequence[TierChange]) -> None:
    """Tell the index what changed below a GPU; its hashes are the keys themselves.

    What came is told before what went: the index counts, so the order of the two makes no difference.
    """
    for medium, tier in _TIERS.items():
        mine = [change for change in changes if change.medium == medium]
        _store(blocks, slot, tier, [change for change in mine if change.stored])
        gone = [change.key for change in mine if not change.stored]
        if gone:
            blocks.remove(slot, tier, pack_keys(gone))


def _store(blocks: BlockIndex, slot: int, tier: int, changes: list[TierChange]) -> None:
    """One call for each chain; what was evicted above comes leaves first."""
    if len(changes) > 1 and changes[0].parent == changes[1].key:
        changes.reverse()
    start = 0
    for end in range(1, len(changes) + 1):
        if end == len(changes) or changes[end].parent != changes[end - 1].key:
            packed = pack_keys([change.key for change in changes[start:end]])
            blocks.store(slot, tier, changes[start].parent, packed, packed)
            start = end
