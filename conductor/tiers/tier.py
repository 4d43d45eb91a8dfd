"""One tier of blocks: bounded, leaf-first, by its policies. No clock and no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvroute.conductor.tiers.base import (
    Admission,
    BlockInfo,
    Eviction,
    Link,
    WriteBack,
    count_at_least,
    note_nothing,
)


@dataclass(slots=True)
class TierCounts:
    """Blocks since the start. What was not stored is counted by its reason."""

    stored: int = 0
    evicted: int = 0
    not_admitted: int = 0
    not_worth_a_victim: int = 0
    too_large: int = 0


class Tier:
    """Holds blocks of any sizes within `capacity_bytes`; `write` says when those above are written here."""

    def __init__(
        self,
        medium: str,
        capacity_bytes: int,
        admission: Admission,
        eviction: Eviction,
        write: WriteBack,
        link: Link,
    ) -> None:
        count_at_least("capacity_bytes", capacity_bytes, 1)
        self.medium = medium
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.write = write
        self.link = link
        self.counts = TierCounts()
        self._admission = admission
        self._eviction = eviction
        self._recorders = [
            policy.record
            for policy in (admission, eviction)
            if getattr(policy.record, "__func__", None) is not note_nothing
        ]
        self._blocks: dict[int, BlockInfo] = {}
        self._children: dict[int, int] = {}
        """Successors held here, by key; of blocks held or not, as a leaf may arrive before its parent."""

    def __repr__(self) -> str:
        used = f"{self.used_bytes} of {self.capacity_bytes} bytes"
        return f"<Tier {self.medium} {len(self._blocks)} blocks, {used}>"

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: int) -> bool:
        return key in self._blocks

    def keys(self) -> Iterable[int]:
        """Keys of the blocks held, in order of arrival."""
        return self._blocks.keys()

    def get(self, key: int) -> BlockInfo | None:
        """The block, if it is here."""
        return self._blocks.get(key)

    def load_s(self, blocks: Sequence[BlockInfo]) -> float:
        """Seconds to bring blocks up, alone on the link."""
        return self.link.latency_s + sum(block.bytes for block in blocks) / self.link.bytes_per_s

    def access(self, chain: Sequence[BlockInfo]) -> None:
        """These blocks were computed or read, here or elsewhere; they are as of now."""
        for record in self._recorders:
            for block in chain:
                record(block)
        blocks, children = self._blocks, self._children
        for block in chain:
            key = block.key
            if key in blocks:
                blocks[key] = block
                if key not in children:
                    self._eviction.offer(block)

    def store(self, block: BlockInfo, now_s: float) -> tuple[bool, list[BlockInfo]]:
        """Whether the block is here now, and which had to go for it."""
        if block.key in self._blocks:
            return True, []
        if not self._admission.admit(block, now_s):
            self.counts.not_admitted += 1
            return False, []
        if block.bytes > self.capacity_bytes:
            self.counts.too_large += 1
            return False, []
        self._adopt(block)
        evicted: list[BlockInfo] = []
        while self.used_bytes + block.bytes > self.capacity_bytes:
            key = self._eviction.victim(block, now_s)
            if key is None:
                self._disown(block)
                self.counts.not_worth_a_victim += 1
                return False, evicted
            evicted.append(self._remove(key))
        self._blocks[block.key] = block
        self.used_bytes += block.bytes
        self.counts.stored += 1
        if block.key not in self._children:
            self._eviction.offer(block)
        return True, evicted

    def clear(self) -> None:
        """Forget every block."""
        for key in self._blocks:
            self._eviction.withdraw(key)
        self._blocks.clear()
        self._children.clear()
        self.used_bytes = 0

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless the books add up."""
        used_bytes = sum(block.bytes for block in self._blocks.values())
        if used_bytes != self.used_bytes or used_bytes > self.capacity_bytes:
            raise AssertionError(f"{self!r} holds {used_bytes} bytes")
        children: dict[int, int] = {}
        for block in self._blocks.values():
            if block.parent is not None:
                children[block.parent] = children.get(block.parent, 0) + 1
        if children != self._children:
            raise AssertionError(f"{self!r} miscounts successors")

    def _remove(self, key: int) -> BlockInfo:
        block = self._blocks.pop(key)
        self.used_bytes -= block.bytes
        self.counts.evicted += 1
        self._disown(block)
        return block

    def _adopt(self, block: BlockInfo) -> None:
        """Count the block with its parent, which is no leaf any more: it must not make room for its own."""
        if block.parent is not None:
            self._children[block.parent] = self._children.get(block.parent, 0) + 1
            self._eviction.withdraw(block.parent)

    def _disown(self, block: BlockInfo) -> None:
        if block.parent is None:
            return
        left = self._children[block.parent] - 1
        if left:
            self._children[block.parent] = left
            return
        del self._children[block.parent]
        parent = self._blocks.get(block.parent)
        if parent is not None:
            self._eviction.offer(parent)
