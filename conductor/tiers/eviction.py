"""Which leaf goes first. All are O(log n) per call."""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush

from kvroute.conductor.tiers.base import BlockInfo, note_nothing
from kvroute.conductor.tiers.frequency import FrequencySketch
from kvroute.conductor.tiers.value import Costs

_Entry = tuple[tuple[float, ...], int, BlockInfo]


class Ranked:
    """Offered blocks in order of rank, the lowest first; ties go to the one offered first."""

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        # What is withdrawn stays in the heap until it comes to its top or the heap is half waste.
        self._tickets: dict[int, int] = {}
        self._next_ticket = 0

    def __len__(self) -> int:
        return len(self._tickets)

    record = note_nothing

    def offer(self, block: BlockInfo) -> None:
        self._next_ticket += 1
        self._tickets[block.key] = self._next_ticket
        heappush(self._heap, (self._rank(block), self._next_ticket, block))
        if len(self._heap) > 2 * len(self._tickets) + 64:
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapify(self._heap)

    def withdraw(self, key: int) -> None:
        self._tickets.pop(key, None)

    def lowest(self) -> BlockInfo | None:
        """The one that would go first."""
        heap = self._heap
        while heap and not self._is_current(heap[0]):
            heappop(heap)
        return heap[0][2] if heap else None

    def refuses(self, newcomer: BlockInfo, now_s: float) -> bool:
        lowest = self.lowest()
        return lowest is not None and not self._yields(lowest, newcomer, now_s)

    def victim(self, newcomer: BlockInfo | None, now_s: float) -> int | None:
        lowest = self.lowest()
        if lowest is None or (newcomer is not None and not self._yields(lowest, newcomer, now_s)):
            return None
        heappop(self._heap)
        del self._tickets[lowest.key]
        return lowest.key

    def _is_current(self, entry: _Entry) -> bool:
        return self._tickets.get(entry[2].key) == entry[1]

    def _rank(self, block: BlockInfo) -> tuple[float, ...]:
        """Lowest goes first; never changes while the block lies unasked."""
        raise NotImplementedError

    def _yields(self, lowest: BlockInfo, newcomer: BlockInfo, now_s: float) -> bool:
        """Whether the lowest makes room for the newcomer."""
        return True


class LRU(Ranked):
    """The one not asked for the longest. Simple, good for sessions, and washed out by a scan."""

    def _rank(self, block: BlockInfo) -> tuple[float, ...]:
        return (block.last_access_s, -block.depth)


class LFU(Ranked):
    """The one read least since it was computed; what was hot long ago stays long."""

    def _rank(self, block: BlockInfo) -> tuple[float, ...]:
        return (block.reads, block.last_access_s, -block.depth)


class TinyLFU(LRU):
    """LRU, but a newcomer must have been asked for more often of late than the block that would go.

    Frequencies cover blocks held or not (`FrequencySketch`), so what is new and asked for gets in.
    """

    def __init__(self, sketch_entries: int = 65_536) -> None:
        super().__init__()
        self._sketch = FrequencySketch(sketch_entries)

    def record(self, block: BlockInfo) -> None:
        """Count the access."""
        self._sketch.add(block.key)

    def _yields(self, lowest: BlockInfo, newcomer: BlockInfo, now_s: float) -> bool:
        return self._sketch.count(newcomer.key) > self._sketch.count(lowest.key)


class ValuePerByte(Ranked):
    """The one worth least per byte (`Costs`); a newcomer worth less, its writing counted, is not written."""

    def __init__(self, **costs: float) -> None:
        super().__init__()
        self._costs = Costs(**costs)

    def _rank(self, block: BlockInfo) -> tuple[float, ...]:
        """Log2 of the value at time 0, the writing being spent: all fade alike, so the order keeps."""
        at_once = self._costs.expected_reuses(block, block.last_access_s) * self._costs.saved_s(block)
        if at_once <= 0:
            return (-math.inf, block.last_access_s, -block.depth)
        faded = math.log2(at_once / block.bytes) + block.last_access_s / self._costs.half_life_s
        return (faded, block.last_access_s, -block.depth)

    def _yields(self, lowest: BlockInfo, newcomer: BlockInfo, now_s: float) -> bool:
        held = 2 ** (self._rank(lowest)[0] - now_s / self._costs.half_life_s)
        return self._costs.value_per_byte(newcomer, now_s) > held
