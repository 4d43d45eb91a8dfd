"""A feed without sockets: what a test stores is what the engines said."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import cast

from kvroute.clock import monotonic
from kvroute.conductor.core import Conductor
from kvroute.conductor.events import EventFeed, EventSource, HolderHealth, Watermark, WorkerHealth
from kvroute.conductor.index import Holder, PrefixIndex
from kvroute.conductor.keys import Namespace, token_keys
from kvroute.types import Trust


class StillFeed:
    """Keeps the interface of `EventFeed`; every worker is exact, at batch 7."""

    def __init__(self, index: PrefixIndex) -> None:
        self.index = index
        self.workers: dict[str, Sequence[EventSource]] = {}
        self.restored: dict[str, Mapping[int, Watermark] | None] = {}
        self.namespaces: dict[str, Namespace] = {}
        self.marks: dict[str, dict[int, Watermark]] = {}
        self.paused: set[str] = set()
        self.observed: list[tuple[str, int, int, int]] = []
        self.trusts: dict[str, Trust] = {}
        self.closed = False

    def follow(
        self,
        worker_id: str,
        sources: Sequence[EventSource],
        namespace: Namespace,
        *,
        block_tokens: int | None = None,
        min_block_tokens: int = 16,
        silent_tier_blocks: int = 0,
        restored: Mapping[int, Watermark] | None = None,
    ) -> None:
        if worker_id in self.workers or not sources:
            raise ValueError(f"{worker_id} cannot be followed")
        self.workers[worker_id] = sources
        self.restored[worker_id] = restored
        self.namespaces[worker_id] = namespace
        self.marks[worker_id] = {source.dp_rank: Watermark(7, 77) for source in sources}
        for source in sources:
            if block_tokens is not None:
                self.index.add_holder(Holder(worker_id, source.dp_rank), block_tokens, silent_tier_blocks)

    def unfollow(self, worker_id: str) -> None:
        self.workers.pop(worker_id, None)
        self.index.remove_worker(worker_id)
        while self.index.sweep():
            pass

    def trust(self, worker_id: str) -> Trust:
        return self.trusts.get(worker_id, Trust.EXACT if worker_id in self.workers else Trust.APPROXIMATE)

    def health(self, worker_id: str) -> WorkerHealth | None:
        if worker_id not in self.workers:
            return None
        ranks = tuple(
            HolderHealth(
                dp_rank=source.dp_rank, trust=Trust.EXACT, last_seq=7, lag_s=0.25, counters={"gaps": 1}
            )
            for source in self.workers[worker_id]
        )
        return WorkerHealth(worker_id=worker_id, trust=Trust.EXACT, holders=ranks)

    def observe(self, worker_id: str, predicted_tokens: int, cached_tokens: int, prompt_tokens: int) -> None:
        self.observed.append((worker_id, predicted_tokens, cached_tokens, prompt_tokens))

    def watermarks(self, worker_id: str) -> dict[int, Watermark]:
        return dict(self.marks.get(worker_id, {}))

    def pause(self, worker_id: str) -> None:
        self.paused.add(worker_id)

    def resume(self, worker_id: str) -> None:
        self.paused.discard(worker_id)

    async def close(self) -> None:
        self.closed = True


def still_conductor(linger_s: float = 60.0, max_bytes: int = 2**24) -> tuple[Conductor, StillFeed]:
    """A conductor whose engines say nothing but what `store` stores."""
    index = PrefixIndex(max_bytes, monotonic)
    feed = StillFeed(index)
    return Conductor(index, cast(EventFeed, feed), linger_s), feed


def packed(numbers: Sequence[int]) -> bytes:
    return array("Q", numbers).tobytes()


def store(
    index: PrefixIndex,
    holder: Holder,
    tier: int,
    ids: Sequence[int],
    *,
    namespace: Namespace = Namespace(model="m"),  # noqa: B008
    blocks: slice = slice(None),
    hash_seed: int = 0,
) -> list[int]:
    """Have `holder` hold blocks of a prompt in a tier, each chain with its parent; the engine's hashes.

    Its hashes are the keys xor `hash_seed`.
    """
    block_tokens = index.block_tokens(holder)
    assert block_tokens is not None
    keys = list(token_keys(ids, namespace.root("ids"), block_tokens).keys)
    for at in range(len(keys))[blocks]:
        parent = keys[at - 1] if at else None
        index.blocks.store(
            index.slot(holder), tier, parent, packed([keys[at] ^ hash_seed]), packed([keys[at]])
        )
    return [key ^ hash_seed for key in keys]
