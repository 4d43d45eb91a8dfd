"""Is a block worth writing? Cold data kept out leaves room, at the price of one more miss for what is new."""

from __future__ import annotations

from collections import OrderedDict

from kvroute.conductor.tiers.base import BlockInfo, at_least, count_at_least, note_nothing
from kvroute.conductor.tiers.value import Costs


class Always:
    """Everything."""

    record = note_nothing

    def admit(self, block: BlockInfo, now_s: float) -> bool:
        """True."""
        return True


class SecondAccess:
    """What was asked for before, among the last `ghost_entries` keys: one-off prompts stay out."""

    def __init__(self, ghost_entries: int = 65_536) -> None:
        count_at_least("ghost_entries", ghost_entries, 1)
        self._ghost_entries = ghost_entries
        self._seen: OrderedDict[int, bool] = OrderedDict()
        """Key to whether it was seen more than once; the oldest first."""

    def record(self, block: BlockInfo) -> None:
        """Remember the key, and forget the one not asked for the longest."""
        seen = self._seen
        seen[block.key] = block.key in seen
        seen.move_to_end(block.key)
        if len(seen) > self._ghost_entries:
            seen.popitem(last=False)

    def admit(self, block: BlockInfo, now_s: float) -> bool:
        """True from the second access on."""
        return self._seen.get(block.key, False)


class LengthThreshold:
    """Prompts of some length: short ones are soon computed again, and very long ones push out all others."""

    def __init__(self, min_blocks: int = 0, max_blocks: int | None = None) -> None:
        count_at_least("min_blocks", min_blocks, 0)
        if max_blocks is not None:
            count_at_least("max_blocks", max_blocks, max(1, min_blocks))
        self._min_blocks = min_blocks
        self._max_blocks = max_blocks

    record = note_nothing

    def admit(self, block: BlockInfo, now_s: float) -> bool:
        """By the prompt's length, not the block's place: a tail without its head is of no use."""
        blocks = block.prompt_blocks
        return blocks >= self._min_blocks and (self._max_blocks is None or blocks <= self._max_blocks)


class ExpectedBenefit:
    """What will save more time than it costs; the other options are those of `Costs`."""

    def __init__(self, min_value_per_byte: float = 0.0, **costs: float) -> None:
        at_least("min_value_per_byte", min_value_per_byte, 0.0)
        self._min_value_per_byte = min_value_per_byte
        self._costs = Costs(**costs)

    record = note_nothing

    def admit(self, block: BlockInfo, now_s: float) -> bool:
        """True when it is worth more per byte than the least asked."""
        return self._costs.value_per_byte(block, now_s) > self._min_value_per_byte
