"""What the master of a Mooncake store says: objects named by the hashes that engines gave their blocks.

The store becomes a holder of its own. It publishes no token ids, so a block is known once an engine's event
told what its hash stands for; the rest is counted.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable

from kvroute.conductor.events.batches import StoreChange
from kvroute.conductor.index import Holder, PrefixIndex

OBJECTS = 100_000
"""Object keys remembered with their hashes, for removals that name the object alone."""

Resolve = Callable[[int], tuple[int, int] | None]
"""Hash -> (key, tokens per block) where any engine knows it."""


class Objects:
    """Of one store. Counts unresolved, orphan_removals, unknown_media and block_size_refused in `counts`."""

    def __init__(
        self, index: PrefixIndex, holder: Holder, counts: Counter[str], resolve: Resolve | None
    ) -> None:
        self._index = index
        self._holder = holder
        self._counts = counts
        self._resolve = resolve
        self._named: OrderedDict[str, bytes] = OrderedDict()
        self._block_tokens = 0

    def clear(self) -> None:
        """Forget what objects stand for."""
        self._named.clear()

    def apply(self, event: StoreChange) -> None:
        """Bring one change in; the holder enters the index with its first known block."""
        if event.tier is None:
            self._counts["unknown_media"] += 1
        elif event.action == "cleared":
            self._named.clear()
            self._index.clear(self._holder)
        elif event.action == "stored":
            self._remember(event)
            for block_hash in memoryview(event.hashes).cast("Q"):
                self._store(event.tier, block_hash)
        else:
            self._remove(event.tier, event.hashes or self._named.pop(event.object_key, b""))

    def _remember(self, event: StoreChange) -> None:
        if event.object_key and event.hashes:
            self._named[event.object_key] = event.hashes
            if len(self._named) > OBJECTS:
                self._named.popitem(last=False)

    def _store(self, tier: int, block_hash: int) -> None:
        found = None if self._resolve is None else self._resolve(block_hash)
        if found is None:
            self._counts["unresolved"] += 1
            return
        key, block_tokens = found
        if not self._block_tokens:
            self._index.add_holder(self._holder, block_tokens)
            self._block_tokens = block_tokens
        slot = self._slot()
        if block_tokens != self._block_tokens or slot is None:
            self._counts["block_size_refused"] += 1
            return
        self._index.blocks.store(slot, tier, None, _one(block_hash), _one(key))

    def _remove(self, tier: int, hashes: bytes) -> None:
        slot = self._slot()
        resolved = 0 if slot is None else self._index.blocks.remove(slot, tier, hashes)
        self._counts["orphan_removals"] += len(hashes) // 8 - resolved

    def _slot(self) -> int | None:
        try:
            return self._index.slot(self._holder)
        except KeyError:
            return None


def _one(value: int) -> bytes:
    return array("Q", (value,)).tobytes()
