"""What the index hears of an engine's blocks: later than it happened, and not all of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from kvroute.conductor.block_index import GPU
from kvroute.conductor.index import Holder, PrefixIndex, pack_keys
from kvroute.loadtests.mock_engine.steps import Outcome
from kvroute.loadtests.simulator.tiers import tell_tiers


class IndexFeed:
    """The events of all engines. Hashes are the keys themselves. A worker that is gone is not heard of again
    until it is back, and nothing of what it sent before.

    `tells_tiers`: of those below the GPU too. `is_shared`: what one engine stores, all have.
    """

    def __init__(
        self,
        index: PrefixIndex,
        holders: Sequence[Holder],
        lag_s: float,
        loss: float,
        source: Random,
        at: Callable[..., None],
        *,
        tells_tiers: bool = True,
        is_shared: bool = False,
    ) -> None:
        self._index = index
        self._holders = holders
        self._slots = [index.slot(holder) for holder in holders]
        self._lag_s = lag_s
        self._loss = loss
        self._source = source
        self._at = at
        """Calls something so many seconds from now."""
        self._tells_tiers = tells_tiers
        self._is_shared = is_shared
        self.lost_batches = 0

    def tell(self, worker: int, outcome: Outcome) -> None:
        """What one step of an engine changed: one batch of events."""
        if not (outcome.removed or outcome.stored or (self._tells_tiers and outcome.has_changes)):
            return
        if self._loss and self._source.random() < self._loss:
            self.lost_batches += 1
        elif self._lag_s:
            self._at(self._lag_s, self._hear, worker, self._slots[worker], outcome)
        else:
            self._hear(worker, self._slots[worker], outcome)

    def gone(self, worker: int) -> None:
        """Its cache is no more."""
        self._index.clear(self._holders[worker])
        while self._index.sweep():
            pass
        self._slots[worker] = self._index.slot(self._holders[worker])

    def _hear(self, worker: int, slot: int, outcome: Outcome) -> None:
        if slot != self._slots[worker]:
            return  # sent before it was gone
        blocks = self._index.blocks
        if self._tells_tiers:
            tell_tiers(blocks, slot, outcome.demoted)
        if outcome.removed:
            blocks.remove(slot, GPU, pack_keys(outcome.removed))
        for stored in outcome.stored:
            keys, start = stored.sequence.keys, stored.start
            packed = pack_keys(keys[start : stored.stop])
            for holder in self._slots if self._is_shared else (slot,):
                blocks.store(holder, GPU, keys[start - 1] if start else None, packed, packed)
        if self._tells_tiers:
            tell_tiers(blocks, slot, outcome.offloaded)
