"""The tiers below a GPU, upper first: what is written down as blocks are computed, read and evicted.

Pure but for its clock. Writes take effect at once and cost nothing; loads take the time of `load_s`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import Struct

from kvroute.clock import Clock
from kvroute.conductor.tiers.base import BlockInfo
from kvroute.conductor.tiers.tier import Tier


class TierChange(Struct, frozen=True, gc=False):
    """One block came into a tier, or left it."""

    medium: str
    key: int
    stored: bool
    parent: int | None = None
    """Key of the block before it in its prompt."""


@dataclass(frozen=True, slots=True)
class BlockModel:
    """What a block of this engine weighs and takes."""

    block_bytes: int
    recompute_s: Callable[[int], float]
    """Seconds to prefill one block after so many others."""


class TierStack:
    """Follows every block of the GPU above (`computed`, `read`, `evicted`) and keeps the tiers below."""

    def __init__(self, tiers: Sequence[Tier], model: BlockModel, clock: Clock) -> None:
        self.tiers = tuple(tiers)
        self._model = model
        self._clock = clock
        self._above: dict[int, BlockInfo] = {}
        self._changes: list[TierChange] = []

    def __repr__(self) -> str:
        return f"<TierStack {', '.join(map(repr, self.tiers))}>"

    def match(self, keys: Sequence[int]) -> int:
        """How many leading blocks lie in some tier below; changes nothing."""
        for count, key in enumerate(keys):
            if not any(key in tier for tier in self.tiers):
                return count
        return len(keys)

    def load_s(self, keys: Sequence[int]) -> float:
        """Seconds to bring up blocks that `match` counted, each from the uppermost tier that holds it."""
        seconds, left = 0.0, list(keys)
        for tier in self.tiers:
            here = [block for key in left if (block := tier.get(key)) is not None]
            if here:
                seconds += tier.load_s(here)
                left = [key for key in left if key not in tier]
        return seconds

    def below_first(self, keys: Sequence[int]) -> int:
        """How many of the blocks that `match` counted are not in the first tier."""
        return sum([key not in self.tiers[0] for key in keys])

    def computed(self, keys: Sequence[int], start: int, prompt_blocks: int) -> None:
        """Blocks `start` to the end of a chain are in the GPU now, computed or loaded."""
        now_s, above, find, model = self._clock(), self._above, self._find, self._model
        block_bytes, recompute_s = model.block_bytes, model.recompute_s
        chain = []
        for depth in range(start, len(keys)):
            key = keys[depth]
            block = find(key)
            if block is None:
                parent = keys[depth - 1] if depth else None
                block = BlockInfo(
                    key, parent, block_bytes, depth, prompt_blocks, recompute_s(depth), 0, now_s
                )
                chain.append(block)
            above[key] = block
        self._access(chain, now_s)

    def read(self, keys: Sequence[int]) -> None:
        """A request hit these leading blocks, in the GPU or below."""
        now_s, above, find = self._clock(), self._above, self._find
        chain = []
        for key in keys:
            block = find(key)
            if block is not None:
                block = _read(block, now_s)
                if key in above:
                    above[key] = block
                chain.append(block)
        self._access(chain, now_s)

    def evicted(self, keys: Sequence[int]) -> None:
        """Blocks left the GPU, leaves first."""
        now_s = self._clock()
        for key in keys:
            block = self._above.pop(key, None)
            if block is not None:
                self._leaving(0, block, now_s)

    def clear(self) -> None:
        """Forget every block, above and below, and every change not taken."""
        self._above.clear()
        self._changes.clear()
        for tier in self.tiers:
            tier.clear()

    def take_changes(self) -> list[TierChange]:
        """What happened below since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless every tier's books add up."""
        for tier in self.tiers:
            tier.check_integrity()

    def _find(self, key: int) -> BlockInfo | None:
        block = self._above.get(key)
        if block is None:
            for tier in self.tiers:
                block = tier.get(key)
                if block is not None:
                    break
        return block

    def _access(self, chain: Sequence[BlockInfo], now_s: float) -> None:
        for level, tier in enumerate(self.tiers):
            tier.access(chain)
            if not tier.write.at_access:
                continue
            # Past a block that is not here, its successors would lie unreachable: they are not written.
            # What makes room here may push a later block of the chain out of the tier below, its only place.
            for block in chain:
                reachable = block.parent is None or block.parent in tier
                if reachable and tier.write.after_access(block) and self._find(block.key) is not None:
                    self._store(level, block, now_s)

    def _leaving(self, level: int, block: BlockInfo, now_s: float) -> None:
        """A block leaves the tier above `level`."""
        if level < len(self.tiers):
            tier = self.tiers[level]
            if tier.write.at_eviction and block.key not in tier and tier.write.before_eviction(block):
                self._store(level, block, now_s)

    def _store(self, level: int, block: BlockInfo, now_s: float) -> None:
        tier = self.tiers[level]
        if block.key in tier:
            return
        stored, evicted = tier.store(block, now_s)
        # Told first where a block goes and then where it is gone: whoever follows never loses sight of it.
        if stored:
            self._changes.append(TierChange(tier.medium, block.key, True, block.parent))
        for each in evicted:
            if level + 1 < len(self.tiers):
                self._leaving(level + 1, each, now_s)
            self._changes.append(TierChange(tier.medium, each.key, False, each.parent))


def _read(block: BlockInfo, now_s: float) -> BlockInfo:
    return BlockInfo(
        block.key,
        block.parent,
        block.bytes,
        block.depth,
        block.prompt_blocks,
        block.recompute_s,
        block.reads + 1,
        now_s,
    )
