"""KV that an engine keeps after its request is over, until a decode engine has it or its time is up."""

from __future__ import annotations

import asyncio
from array import array
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvroute.loadtests.mock_engine.sequences import Sequence

if TYPE_CHECKING:
    from kvroute.loadtests.mock_engine.engine import MockEngine


@dataclass(slots=True, eq=False)
class Hold:
    """The KV of one prompt."""

    id: str
    """By which a decode engine asks for it."""
    sequence: Sequence
    tokens: array[int]
    """The prompt."""
    block_ids: list[int]
    delay_s: float
    """What a fault adds to its transfer."""
    is_wrong: bool
    """Computed over blocks that were wrong themselves."""
    since_s: float
    claims: int = 0
    """Decode requests that are going to fetch it."""
    timer: asyncio.TimerHandle | None = None
    """Of its lease."""

    @property
    def blocks(self) -> int:
        """KV blocks that are kept."""
        return self.sequence.resident_blocks + self.sequence.private_blocks


class Holds:
    """Of one engine incarnation."""

    def __init__(self, engine: MockEngine) -> None:
        self.expired_total = 0
        """Of this incarnation."""
        self._engine = engine
        self._books = engine.pd_books
        self._by_id: dict[str, Hold] = {}
        self._by_sequence: dict[Sequence, Hold] = {}
        self._gone: OrderedDict[str, str] = OrderedDict()
        self._next_block = 1

    def add(
        self, id: str, sequence: Sequence, blocks: int, *, lease_s: float | None, delay_s: float = 0.0
    ) -> Hold:
        """Keep a prompt's KV, in so many blocks, from now on; without a lease, until somebody frees it."""
        answer, index = sequence.payload
        part = answer.call.parts[index]
        ids = list(range(self._next_block, self._next_block + blocks))
        self._next_block += blocks
        hold = Hold(id, sequence, part.tokens, ids, delay_s, part.is_wrong, self._engine.now_s())
        self._books.held_total += 1
        if id in self._by_id:
            # The engine has lost sight of the first one, and only its lease will end it.
            lost = self._by_id.pop(id)
            lost.id = f"{id}/{self._books.held_total}"
            self._by_id[lost.id] = lost
        self._by_id[id] = self._by_sequence[sequence] = hold
        self.lease(hold, lease_s)
        return hold

    def lease(self, hold: Hold, lease_s: float | None) -> None:
        """Let it expire after so long; None: never."""
        if hold.timer is not None:
            hold.timer.cancel()
        hold.timer = None
        if lease_s is not None:
            hold.timer = asyncio.get_running_loop().call_later(lease_s, self._expire, hold)

    def get(self, id: object) -> Hold | None:
        """What is kept under an id."""
        return self._by_id.get(id) if isinstance(id, str) else None

    def of(self, sequence: Sequence) -> Hold | None:
        """What is kept of a sequence."""
        return self._by_sequence.get(sequence)

    def free(self, hold: Hold, why: str) -> None:
        """Give its blocks back; idempotent."""
        if self._by_id.get(hold.id) is not hold:
            return
        del self._by_id[hold.id], self._by_sequence[hold.sequence]
        self.lease(hold, None)
        self._books.freed_by[why] += 1
        self._gone[hold.id] = why
        if len(self._gone) > self._books.max_ids:
            self._gone.popitem(last=False)
        self._engine.driver.let_go(hold.sequence)

    def fate(self, id: object) -> str:
        """Why there is nothing under an id: pulled, released, expired, aborted, or unknown."""
        return self._gone.get(id, "unknown") if isinstance(id, str) else "unknown"

    def lose(self) -> None:
        """The process ends."""
        for hold in self._by_id.values():
            self.lease(hold, None)
        self._books.freed_by["lost"] += len(self._by_id)
        self._by_id.clear()
        self._by_sequence.clear()

    def as_dict(self) -> dict[str, Any]:
        """As /debug shows it; what no decode request has asked for is stranded."""
        now_s, holds = self._engine.now_s(), list(self._by_id.values())
        return {
            "held": {
                "requests": len(holds),
                "blocks": sum(hold.blocks for hold in holds),
                "ids": [hold.id for hold in holds[: self._books.max_ids]],
                "ages_s": [round(now_s - hold.since_s, 3) for hold in holds[: self._books.max_ids]],
            },
            "stranded_blocks": sum(hold.blocks for hold in holds if not hold.claims),
        }

    def _expire(self, hold: Hold) -> None:
        hold.timer = None
        self.expired_total += 1
        self.free(hold, "expired")
