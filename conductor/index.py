"""The prefix index: what engines confirmed and what was routed to them, as one answer.

Three parts share one bound of bytes. `blocks` is exact: every holder's blocks, as its events tell. `_recent`
is what was just routed to workers whose events are believed; it counts for `prediction_s`: by then the event
has come, or the engine kept nothing. `_routed` is for workers without believable events and for keys made of
bytes: there a prediction is all there is, and it stays as long as there is room.

For room, predictions go first, but for a small share that is always theirs; then confirmed blocks go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import structlog
from msgspec import Struct

from kvroute.clock import Clock
from kvroute.conductor.approximate import ApproximateIndex
from kvroute.conductor.block_index import BlockIndex, make_block_index
from kvroute.conductor.packing import pack_keys
from kvroute.conductor.places import Places
from kvroute.conductor.recent import RecentPredictions
from kvroute.types import NO_MATCH, FoundMatches, KeyMode, PrefixMatch, PromptKeys

__all__ = ["Holder", "HolderMatch", "PrefixIndex", "pack_keys"]

log = structlog.get_logger(__name__)

PREDICTED_SHARE = 1 / 16
"""Of the bound: kept for predictions even where confirmed blocks alone would fill it all."""
EVICT_TO = 0.8
"""Of their bound: how far confirmed blocks are evicted once they are over it. Each time costs a look at all
of them, about 0.1 us a block."""
MIN_BYTES = 2**20
REMEMBERED_REMOVALS = 4096
MAX_PLACES = 16
"""Sequences of worker ids that are remembered: one for each model asked for."""


class Holder(Struct, frozen=True, gc=False):
    """What answers for a set of blocks: one data-parallel rank of one incarnation of an engine."""

    worker_id: str
    dp_rank: int = 0


class HolderMatch(Struct, frozen=True, gc=False):
    """What one holder has confirmed of a prompt: contiguous tokens from its start."""

    holder: Holder
    block_tokens: int
    gpu_tokens: int
    """In the GPU alone; the next two in their tiers alone."""
    cpu_tokens: int
    disk_tokens: int
    gpu_cpu_tokens: int
    """Each block in GPU or CPU memory."""
    confirmed_tokens: int
    """Each block in any of the tiers."""
    probable_tokens: int
    """Each block in any of them, or probably in a tier of that engine that sends no events."""


@dataclass(slots=True)
class _Held:
    slot: int
    block_tokens: int
    silent_tier_blocks: int


@dataclass(slots=True, eq=False)
class _Worker:
    ranks: dict[Holder, _Held] = field(default_factory=dict)
    exact: bool = False


class PrefixIndex:
    """One thread owns it and nothing waits. Worker ids are incarnations: one that was removed never returns.

    `prediction_s`: how long a worker whose events are believed may take to confirm what was routed to it.
    Call `sweep` after each slice of events: it also keeps the bound.
    """

    def __init__(self, max_bytes: int, clock: Clock, prediction_s: float = 10.0) -> None:
        if max_bytes < MIN_BYTES:
            raise ValueError(f"max_bytes must be at least {MIN_BYTES}, not {max_bytes}")
        if not prediction_s >= 0:
            raise ValueError(f"prediction_s must be 0 or more, not {prediction_s}")
        self.max_bytes = max_bytes
        self._confirmed_limit = int(max_bytes * (1 - PREDICTED_SHARE))
        self.blocks: BlockIndex = make_block_index()
        """Confirmed blocks. Events are applied to it directly, see `slot`."""
        self.evicted_confirmed = 0
        """Counter: confirmed and probable blocks dropped for room."""
        self._recent = RecentPredictions(clock, prediction_s)
        self._evicted_recent = 0
        self._routed = ApproximateIndex(max_bytes)
        self._workers: dict[str, _Worker] = {}
        self._removed: dict[str, None] = {}
        self._holders: dict[int, tuple[Holder, int]] = {}
        """Slot of `blocks` -> (holder, its tokens per block)."""
        self._places: dict[int, Places] = {}
        """By identity of the worker ids; forgotten when a holder gets a slot. One given up is in no row."""
        self._packed_keys: PromptKeys | None = None
        self._packed = b""

    # Holders

    def add_holder(self, holder: Holder, block_tokens: int, silent_tier_blocks: int = 0) -> None:
        """Expect events of `holder`. Known already: it stays, but with another block size it starts empty.

        `silent_tier_blocks`: size of a lower tier of the engine that sends no events; 0 is none. A worker's
        first holder makes it one whose events are believed. A removed worker's is ignored.
        """
        if block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1, not {block_tokens}")
        worker = self._worker(holder.worker_id)
        if worker is None:
            return
        if not worker.ranks:
            self.believe_events(holder.worker_id, True)
        held = worker.ranks.get(holder)
        if held is not None and held.block_tokens == block_tokens:
            held.silent_tier_blocks = silent_tier_blocks
            self.blocks.set_silent_tier(held.slot, silent_tier_blocks)
            return
        if held is not None:
            self._close(held)
        worker.ranks[holder] = self._open(holder, block_tokens, silent_tier_blocks)

    def clear(self, holder: Holder) -> None:
        """The engine dropped its cache or restarted: nothing of `holder`, and no prediction of its worker,
        counts from now on. Its slot is a new one. An unknown holder is ignored.
        """
        worker = self._workers.get(holder.worker_id)
        held = worker.ranks.get(holder) if worker is not None else None
        if worker is None or held is None:
            return
        self._close(held)
        worker.ranks[holder] = self._open(holder, held.block_tokens, held.silent_tier_blocks)
        self._forget_predictions(holder.worker_id)

    def remove_worker(self, worker_id: str) -> None:
        """Forget all ranks and predictions of an incarnation for good; later news of it is ignored."""
        self._removed[worker_id] = None
        if len(self._removed) > REMEMBERED_REMOVALS:
            del self._removed[next(iter(self._removed))]
        worker = self._workers.pop(worker_id, None)
        if worker is not None:
            for held in worker.ranks.values():
                self._close(held)
            self._forget_predictions(worker_id)

    def believe_events(self, worker_id: str, exact: bool) -> None:
        """Whether predictions for this worker live for `prediction_s` (True) or as long as there is room.

        That is of keys made of tokens: no event will ever confirm those of bytes.
        """
        worker = self._worker(worker_id)
        if worker is not None:
            worker.exact = exact

    def holders_of(self, worker_id: str) -> list[Holder]:
        """The ranks added; empty for a worker without events, an unknown or a removed one."""
        worker = self._workers.get(worker_id)
        return [] if worker is None else list(worker.ranks)

    def block_tokens(self, holder: Holder) -> int | None:
        """Its tokens per block; None for an unknown holder."""
        worker = self._workers.get(holder.worker_id)
        held = None if worker is None else worker.ranks.get(holder)
        return None if held is None else held.block_tokens

    @property
    def block_sizes(self) -> set[int]:
        """Tokens per block of all holders: what a prompt must be keyed by to ask them all."""
        return {block_tokens for _, block_tokens in self._holders.values()}

    def slot(self, holder: Holder) -> int:
        """Where `blocks` keeps what `holder` has; another one after `clear`. Raises `KeyError` if unknown."""
        return self._workers[holder.worker_id].ranks[holder].slot

    def _worker(self, worker_id: str) -> _Worker | None:
        """The books of a worker, opened if need be; None for a removed one."""
        worker = self._workers.get(worker_id)
        if worker is None and worker_id not in self._removed:
            worker = self._workers[worker_id] = _Worker()
        return worker

    def _open(self, holder: Holder, block_tokens: int, silent_tier_blocks: int) -> _Held:
        held = _Held(self.blocks.open(), block_tokens, silent_tier_blocks)
        self.blocks.set_silent_tier(held.slot, silent_tier_blocks)
        self._holders[held.slot] = holder, block_tokens
        self._places.clear()
        return held

    def _close(self, held: _Held) -> None:
        self.blocks.retire(held.slot)
        del self._holders[held.slot]

    # Predictions

    def predict(self, worker_id: str, keys: PromptKeys) -> None:
        """Note that a prompt was just routed to this worker. A very long one is noted in part."""
        worker = self._worker(worker_id)
        chain = keys.keys
        if worker is None or not chain:
            return
        if worker.exact and keys.mode is KeyMode.TOKENS:
            self._recent.add(worker_id, self._packed_of(keys)[: self.max_bytes // 128 * 8])
        else:
            self._routed.insert(worker_id, chain)
        self._keep_bound()

    def _forget_predictions(self, worker_id: str) -> None:
        self._recent.forget(worker_id)
        self._routed.clear_worker(worker_id)

    # Answers

    def match(
        self, keys_by_block_tokens: Mapping[int, PromptKeys], worker_ids: Sequence[str]
    ) -> list[PrefixMatch]:
        """What each worker is thought to hold of one prompt, parallel to the ids.

        The prompt is keyed once per block size in the fleet. Of several ranks the best counts.
        """
        if len(keys_by_block_tokens) == 1:  # the way of most requests, without what they do not need
            ((block_tokens, keys),) = keys_by_block_tokens.items()
            if keys.mode is KeyMode.BYTES:
                return self._match_bytes(block_tokens, keys, worker_ids)
        places = self._places_of(worker_ids)
        if len(places.at) < len(worker_ids):  # some are named twice
            once = list(places.at)
            known = dict(zip(once, self.match(keys_by_block_tokens, once), strict=True))
            return [known[worker_id] for worker_id in worker_ids]
        matches = FoundMatches(len(worker_ids))
        predicted: dict[str, int] = {}
        for block_tokens, keys in keys_by_block_tokens.items():
            if not keys.keys:
                continue
            exactly = keys.mode is KeyMode.TOKENS
            if exactly:
                packed = self._packed_of(keys)
                places.put_confirmed(self.blocks.match(packed), block_tokens, matches)
                self._recent.expire()
                sent = self._recent.match(packed, block_tokens)
                if predicted:  # of other block sizes: the longest counts
                    sent = {id_: max(tokens, predicted.get(id_, 0)) for id_, tokens in sent.items()}
                predicted |= sent
            if self._routed.entries:
                routed = self._routed.match(keys.keys, worker_ids)
                for worker_id, blocks in zip(worker_ids, routed, strict=True):
                    if blocks and not (exactly and self._is_exact(worker_id)):
                        predicted[worker_id] = max(predicted.get(worker_id, 0), blocks * block_tokens)
        if predicted:
            places.put_predicted(predicted, matches)
        return matches

    def _match_bytes(
        self, block_tokens: int, keys: PromptKeys, worker_ids: Sequence[str]
    ) -> list[PrefixMatch]:
        routed = self._routed.match(keys.keys, worker_ids)
        by_blocks = {0: NO_MATCH}
        for blocks in routed:
            if blocks not in by_blocks:
                tokens = blocks * block_tokens
                by_blocks[blocks] = PrefixMatch(tokens, predicted_tokens=tokens)
        return [by_blocks[blocks] for blocks in routed]

    def _places_of(self, worker_ids: Sequence[str]) -> Places:
        """Kept by identity of a tuple, which is the same for all requests while the fleet is."""
        places = self._places.get(id(worker_ids))
        if places is not None:
            return places
        places = Places.of(worker_ids)
        for name, at in places.at.items():
            worker = self._workers.get(name)
            ranks = {} if worker is None else worker.ranks
            for holder, held in ranks.items():
                places.slots.setdefault(held.block_tokens, {})[held.slot] = at
                if len(ranks) > 1:
                    places.ranks[held.slot] = holder.dp_rank
        if isinstance(worker_ids, tuple):
            if len(self._places) == MAX_PLACES:
                self._places.clear()
            self._places[id(worker_ids)] = places
        return places

    def _is_exact(self, worker_id: str) -> bool:
        worker = self._workers.get(worker_id)
        return worker is not None and worker.exact

    def _packed_of(self, keys: PromptKeys) -> bytes:
        """Its keys, packed once for a match and the prediction that follows it."""
        if keys is not self._packed_keys:
            self._packed_keys, self._packed = keys, pack_keys(keys.keys)
        return self._packed

    def lookup(self, keys_by_block_tokens: Mapping[int, PromptKeys]) -> list[HolderMatch]:
        """Every holder that has confirmed the start of a prompt, or probably has it; predictions apart."""
        return [
            row
            for block_tokens, keys in keys_by_block_tokens.items()
            for row in self._lookup(block_tokens, pack_keys(keys.keys))
        ]

    def _lookup(self, block_tokens: int, packed: bytes) -> Iterable[HolderMatch]:
        for slot, *counts in self.blocks.match(packed):
            holder, held_block_tokens = self._holders[slot]
            if held_block_tokens == block_tokens:
                yield HolderMatch(holder, block_tokens, *(count * block_tokens for count in counts))

    def held_blocks(self, worker_id: str) -> int:
        """Blocks confirmed in every rank and tier, and those of predictions that stay."""
        worker = self._workers.get(worker_id)
        held = [] if worker is None else worker.ranks.values()
        return self._routed.held_blocks(worker_id) + sum(sum(self.blocks.held(one.slot)[:3]) for one in held)

    # Upkeep

    @property
    def entries(self) -> int:
        """Gauge: confirmed (holder, tier, block) triples, and distinct blocks of predictions."""
        return self.blocks.entries + self._recent.entries + self._routed.entries

    @property
    def bytes_used(self) -> int:
        """Gauge: memory of all parts."""
        return self.blocks.bytes_used + self._predicted_bytes

    @property
    def _predicted_bytes(self) -> int:
        return self._recent.bytes_used + self._routed.estimated_bytes

    @property
    def evicted_predicted(self) -> int:
        """Counter: blocks of predictions dropped for room."""
        return self._evicted_recent + self._routed.evicted_blocks

    @property
    def evicted_blocks(self) -> int:
        """Counter: all that was dropped for room."""
        return self.evicted_confirmed + self.evicted_predicted

    def sweep(self, blocks: int = 4096) -> bool:
        """Expire predictions, clear what was retired from so many blocks, and keep the bound.

        True while there is more to clear.
        """
        self._recent.expire()
        more = self.blocks.sweep(blocks)
        more |= self._recent.sweep(blocks)
        more |= self._routed.sweep(blocks)
        self._keep_bound()
        return more

    def _keep_bound(self) -> None:
        confirmed_bytes, confirmed_limit = self.blocks.bytes_used, self._confirmed_limit
        if confirmed_bytes <= confirmed_limit and confirmed_bytes + self._predicted_bytes <= self.max_bytes:
            return
        if confirmed_bytes > confirmed_limit:
            while self.blocks.sweep():
                pass
            if self.blocks.bytes_used > confirmed_limit:
                evicted = self.blocks.evict(int(confirmed_limit * EVICT_TO))
                self.evicted_confirmed += evicted
                log.warning(
                    "the index is full of confirmed blocks", max_bytes=self.max_bytes, evicted=evicted
                )
        room = self.max_bytes - self.blocks.bytes_used
        while len(self._recent) and self._predicted_bytes > room:
            self._evicted_recent += self._recent.drop_oldest()
        self._routed.evict(room - self._recent.bytes_used)

    def check_integrity(self) -> None:
        """Raise `AssertionError` if an invariant is broken. Looks at everything: for tests and idle time."""
        self.blocks.check_integrity()
        self._recent.check_integrity()
        self._routed.check_integrity()
        slots = {
            held.slot: (holder, held.block_tokens)
            for worker in self._workers.values()
            for holder, held in worker.ranks.items()
        }
        assert slots == self._holders, "slots of holders differ"
        assert not self._removed.keys() & self._workers.keys(), "a removed worker has books"

    def __repr__(self) -> str:
        return (
            f"<PrefixIndex workers={len(self._workers)} holders={len(self._holders)} entries={self.entries} "
            f"bytes={self.bytes_used}/{self.max_bytes} evicted={self.evicted_blocks}>"
        )
