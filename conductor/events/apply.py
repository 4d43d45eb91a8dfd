"""Events of one holder into the index: hashes to keys, groups, sizes, orphans. Pure but for the index.

Our keys come from the event's token ids and the parent's key; nothing depends on how the engine hashes.
"""

from __future__ import annotations

from array import array
from collections import Counter

import msgspec
import structlog

from kvroute.conductor.events.batches import Batch, Cleared, Removed, Stored
from kvroute.conductor.events.identity import Roots, identify
from kvroute.conductor.events.limits import DEFAULTS, FeedLimits
from kvroute.conductor.events.objects import Objects, Resolve
from kvroute.conductor.events.orphans import Orphans
from kvroute.conductor.events.pages import Pages
from kvroute.conductor.index import Holder, PrefixIndex
from kvroute.conductor.keys import Namespace, chain_keys

log = structlog.get_logger(__name__)

DENSE = (None, "full_attention", "mla_attention", "sink_full_attention")
"""Kinds of attention whose blocks can be reused as a prefix; None is an engine that has no other."""
INSISTENCE = 64
"""Events in a row of another block size after which the engine is believed."""
COUNTS = (
    "batches",
    "failed_batches",
    "bad_events",
    "unknown_events",
    "orphans",  # blocks parked
    "orphan_removals",
    "unresolved",  # blocks named by a hash that is not known
    "foreign_groups",  # events, as the next four
    "unknown_media",
    "unknown_extras",
    "block_size_changes",
    "block_size_refused",
    "clears",
)


class Applier:
    """Of one holder.

    Counters are in `counts`, by the names in `COUNTS`.
    """

    def __init__(
        self,
        index: PrefixIndex,
        holder: Holder,
        namespace: Namespace,
        *,
        block_tokens: int | None = None,
        min_block_tokens: int = 1,
        silent_tier_blocks: int = 0,
        limits: FeedLimits = DEFAULTS,
        resolve: Resolve | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        self.orphans = Orphans(limits.parked_bytes, limits.parked_s)
        self.flaws: set[str] = set()
        """What went wrong since the last clear, in the words of `trust.REASONS`."""
        self.silent_tier_blocks = silent_tier_blocks
        self._index = index
        self._blocks = index.blocks
        self.holder = holder
        self._min_block_tokens = min_block_tokens
        self._objects = Objects(index, holder, self.counts, resolve)
        self._roots = Roots(namespace)
        self._pages: Pages | None = None
        self._slot: int | None = None
        self._said_tokens = 0
        """Block size of the engine's events since the last clear; 0 before any."""
        self._other_sizes = 0
        self._group: int | None = None
        self._groups: set[int] = set()
        """Of dense attention, as far as seen; `_group` is the one that counts."""
        self._block_tokens = 0
        if block_tokens is not None:
            self._open(block_tokens)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why what is known of the holder is not exact, see `trust.REASONS`."""
        return tuple(sorted(self.flaws | {"orphans"} if self.orphans else self.flaws))

    def key_of(self, block_hash: int) -> tuple[int, int] | None:
        """(key, tokens per block) of a block that this holder has under that hash."""
        key = self._key(block_hash)
        return None if key is None else (key, self._block_tokens)

    @property
    def held_blocks(self) -> int:
        """Gauge: blocks confirmed, summed over tiers."""
        return 0 if self._slot is None else sum(self._blocks.held(self._slot)[:3])

    @property
    def grouped(self) -> bool:
        """True when the engine's blocks are smaller than the holder's in the index."""
        return self._pages is not None

    @property
    def block_tokens(self) -> int | None:
        """Of the holder in the index; None before it is known."""
        return self._block_tokens or None

    def apply(self, batch: Batch, now_s: float) -> None:
        """Bring a batch in. News of a removed worker is ignored."""
        self._count(batch, now_s)
        if self._slot is not None:
            self._attach()  # another holder has the slot's number once this one was removed
        for event in batch.events:
            if isinstance(event, Stored):
                self._stored(event, now_s)
            elif isinstance(event, Removed):
                self._removed(event)
            elif isinstance(event, Cleared):
                self.clear()
            else:
                self._objects.apply(event)
                self._attach()
        if batch.bad:  # after a clear within the batch too: which came first is not known of what is not read
            self.flaws.add("bad_events")

    def _count(self, batch: Batch, now_s: float) -> None:
        self.counts["batches"] += 1
        self.counts["unknown_events"] += batch.unknown
        self.counts["bad_events"] += batch.bad
        before = self.orphans.expired
        self.orphans.expire(now_s)
        if self.orphans.expired != before:
            self.flaws.add("orphans")

    def clear(self) -> None:
        """The holder has nothing any more."""
        self.counts["clears"] += 1
        self.orphans.clear()
        self._objects.clear()
        self._said_tokens = self._other_sizes = 0
        self.flaws.clear()
        self._group = None
        self._groups.clear()
        self._pages = None
        if self._slot is not None:
            self._index.clear(self.holder)
            self._attach()

    # Stored

    def _stored(self, event: Stored, now_s: float) -> None:
        if not self._counts_as_residency(event):
            return
        if not event.token_ids:
            self._stored_by_name(event)
            return
        if not self._fits(event.block_tokens) or self._slot is None:
            return
        parent = event.parent
        if parent is not None and not self._known(parent):
            self.counts["orphans"] += len(event.hashes) // 8
            self.orphans.park(parent, event, now_s)
            return
        self._store(event)
        if self.orphans:
            self._adopt(event, now_s)

    def _store(self, event: Stored) -> None:
        """The parent is known."""
        assert self._slot is not None
        assert event.tier is not None
        identity = identify(event)
        self.counts["unknown_extras"] += identity.guessed
        if self._pages is not None:
            hashes = array("Q", event.hashes)
            root = 0 if event.parent is not None else self._roots.of(identity)
            self._pages.store(event.tier, event.parent, root, hashes, event.token_ids, identity.extras)
            return
        if event.parent is None:
            parent_key, seed = None, self._roots.of(identity)
        else:
            parent_key = self._blocks.key_of(self._slot, event.parent)
            if parent_key is None:  # it came and went while its children waited
                self.counts["unresolved"] += len(event.hashes) // 8
                self.flaws.add("orphans")
                return
            seed = parent_key
        keys = chain_keys(event.token_ids, seed, event.block_tokens, identity.extras)
        self._blocks.store(self._slot, event.tier, parent_key, event.hashes, array("Q", keys).tobytes())

    def _stored_by_name(self, event: Stored) -> None:
        """Blocks that are known in some tier are in another one too; the event says no more."""
        parent_key = self._key(event.parent) if event.parent is not None else None
        for block_hash in memoryview(event.hashes).cast("Q"):
            one = array("Q", (block_hash,)).tobytes()
            if self._known(block_hash):
                parent_key = self._store_known(event, block_hash, one, parent_key)
            elif block_hash in self.orphans:
                self.orphans.note(block_hash, msgspec.structs.replace(event, hashes=one))
            else:
                self.counts["unresolved"] += 1
                parent_key = None

    def _store_known(self, event: Stored, block_hash: int, one: bytes, parent_key: int | None) -> int | None:
        assert self._slot is not None
        assert event.tier is not None
        if self._pages is not None:
            self._pages.count(event.tier, block_hash)
            return None
        key = self._blocks.key_of(self._slot, block_hash)
        self._blocks.store(self._slot, event.tier, parent_key, one, array("Q", (key or 0,)).tobytes())
        return key

    def _adopt(self, event: Stored, now_s: float) -> None:
        """Apply what waited for the blocks of this event, and what waited for those."""
        arrived = list(memoryview(event.hashes).cast("Q"))
        while arrived:
            for waiting in self.orphans.take(arrived.pop()):
                if isinstance(waiting, Removed):
                    self._removed(waiting)
                elif not waiting.token_ids:
                    self._stored_by_name(waiting)
                else:
                    self._store(waiting)
                    arrived += memoryview(waiting.hashes).cast("Q")

    def _counts_as_residency(self, event: Stored) -> bool:
        """One dense group stands for all, the first seen: their blocks come and go alike."""
        if event.tier is None:
            self.counts["unknown_media"] += 1
            return False
        if event.kind not in DENSE:
            self.counts["foreign_groups"] += 1
            return False
        if event.group is not None:
            if self._group is None:
                self._group = event.group
            self._groups.add(event.group)
            if event.group != self._group:
                self.counts["foreign_groups"] += 1
                return False
        return True

    # Removed

    def _removed(self, event: Removed) -> None:
        if event.tier is None:
            self.counts["unknown_media"] += 1
            self.flaws.add("bad_events")  # what it says is gone may be what we still hold
            return
        # Blocks of sliding-window and other groups have the same names as those of the dense one.
        if event.group is not None and self._groups and event.group not in self._groups:
            self.counts["foreign_groups"] += 1
            return
        if self._slot is None:
            return
        if self._pages is None and not self.orphans:
            resolved = self._blocks.remove(self._slot, event.tier, event.hashes)
            missed = len(event.hashes) // 8 - resolved
        else:
            missed = sum(not self._remove_one(event, name) for name in memoryview(event.hashes).cast("Q"))
        if event.group in (None, self._group):
            self.counts["orphan_removals"] += missed

    def _remove_one(self, event: Removed, block_hash: int) -> bool:
        assert self._slot is not None
        assert event.tier is not None
        one = array("Q", (block_hash,)).tobytes()
        if self._pages is not None and self._pages.remove(event.tier, block_hash):
            return True
        if self._pages is None and self._blocks.remove(self._slot, event.tier, one):
            return True
        if block_hash in self.orphans:
            self.orphans.note(block_hash, Removed(one, event.tier, event.group))
            return True
        return False

    # What an event is measured by

    def _fits(self, block_tokens: int) -> bool:
        """Whether the event's blocks are of the size that the holder's have; the first event sets it."""
        if block_tokens == self._said_tokens:
            self._other_sizes = 0
            return True
        if self._said_tokens:
            self._other_sizes += 1
            if self._other_sizes < INSISTENCE:
                self.counts["block_size_refused"] += 1
                self.flaws.add("block_size")
                return False
        self._open(block_tokens)
        self._said_tokens, self._other_sizes = block_tokens, 0
        return True

    def _open(self, block_tokens: int) -> None:
        pages = -(-self._min_block_tokens // block_tokens)
        if self._slot is not None and pages * block_tokens != self._block_tokens:
            self.counts["block_size_changes"] += 1
            log.warning(
                "events have another block size, the index of the holder starts empty",
                worker=self.holder.worker_id,
                dp_rank=self.holder.dp_rank,
                expected_tokens=self._block_tokens,
                block_tokens=block_tokens,
            )
        self._block_tokens = pages * block_tokens
        self._index.add_holder(self.holder, self._block_tokens, self.silent_tier_blocks)
        self._attach()
        self.orphans.clear()
        self._pages = None
        if pages > 1 and self._slot is not None:
            self._pages = Pages(self._blocks, self._slot, block_tokens, pages)

    def _attach(self) -> None:
        try:
            self._slot = self._index.slot(self.holder)
        except KeyError:
            self._slot = None

    def _known(self, block_hash: int) -> bool:
        if self._pages is not None:
            return block_hash in self._pages
        return self._key(block_hash) is not None

    def _key(self, block_hash: int) -> int | None:
        return None if self._slot is None else self._blocks.key_of(self._slot, block_hash)
