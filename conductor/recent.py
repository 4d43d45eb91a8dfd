"""What was just routed to workers with believable events: it counts until the event has had time to come."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvroute.clock import Clock
from kvroute.conductor.block_index import GPU, BlockIndex, make_block_index

PREDICTION_BYTES = 250
"""Memory of a prediction in the queue, beyond its keys."""


@dataclass(slots=True, eq=False)
class _Sender:
    slot: int | None
    """None once all that was predicted so far is forgotten."""


@dataclass(frozen=True, slots=True)
class _Prediction:
    expires_s: float
    sender: _Sender
    keys: bytes


class RecentPredictions:
    """Predictions that live for `lifetime_s`, counted, so that a prompt sent twice lives on with the second.

    Not thread safe. Whoever owns it keeps it within bounds by `drop_oldest`.
    """

    def __init__(self, clock: Clock, lifetime_s: float) -> None:
        self.lifetime_s = lifetime_s
        self._clock = clock
        self._blocks: BlockIndex = make_block_index()
        self._queue: deque[_Prediction] = deque()
        self._queued_bytes = 0
        self._senders: dict[str, _Sender] = {}
        self._names: dict[int, str] = {}
        """Slot -> worker id."""

    @property
    def entries(self) -> int:
        """Gauge: (worker, block) pairs."""
        return self._blocks.entries

    @property
    def bytes_used(self) -> int:
        """Gauge: memory of the entries and of the queue."""
        return self._blocks.bytes_used + self._queued_bytes

    def add(self, worker_id: str, keys: bytes) -> None:
        """A prompt of these packed keys was routed to this worker now."""
        sender = self._senders.get(worker_id)
        if sender is None:
            slot = self._blocks.open()
            sender = self._senders[worker_id] = _Sender(slot)
            self._names[slot] = worker_id
        assert sender.slot is not None
        self._blocks.store(sender.slot, GPU, None, keys, keys)
        self._queue.append(_Prediction(self._clock() + self.lifetime_s, sender, keys))
        self._queued_bytes += PREDICTION_BYTES + len(keys)

    def match(self, keys: bytes, block_tokens: int) -> dict[str, int]:
        """Contiguous tokens from the first block, by worker id: of each worker that was sent that block."""
        names = self._names
        return {names[row[0]]: row[1] * block_tokens for row in self._blocks.match(keys)}

    def forget(self, worker_id: str) -> None:
        """Nothing that was sent to this worker so far counts any more. Constant time."""
        sender = self._senders.pop(worker_id, None)
        if sender is not None and sender.slot is not None:
            self._blocks.retire(sender.slot)
            del self._names[sender.slot]
            sender.slot = None

    def expire(self) -> None:
        """Let go of what is older than `lifetime_s`."""
        now_s = self._clock()
        while self._queue and self._queue[0].expires_s <= now_s:
            self.drop_oldest()

    def drop_oldest(self) -> int:
        """Let go of the oldest prediction, if any; returns how many blocks nothing predicts any more."""
        if not self._queue:
            return 0
        before = self._blocks.blocks
        oldest = self._queue.popleft()
        self._queued_bytes -= PREDICTION_BYTES + len(oldest.keys)
        if oldest.sender.slot is not None:
            self._blocks.remove(oldest.sender.slot, GPU, oldest.keys)
        return before - self._blocks.blocks

    def __len__(self) -> int:
        """Predictions queued, forgotten ones included."""
        return len(self._queue)

    def sweep(self, blocks: int) -> bool:
        """Clear what was forgotten from so many blocks; True while there is more."""
        return self._blocks.sweep(blocks)

    def check_integrity(self) -> None:
        """Raise `AssertionError` if an invariant is broken."""
        self._blocks.check_integrity()
        assert self._queued_bytes == sum(PREDICTION_BYTES + len(one.keys) for one in self._queue)
        slots = {sender.slot: name for name, sender in self._senders.items()}
        assert slots == self._names, "slots of workers differ"
        expected = dict.fromkeys(self._names, 0)
        for one in self._queue:
            if one.sender.slot is not None:
                expected[one.sender.slot] += len(one.keys) // 8
        counted = {slot: sum(entry[4] for entry in self._blocks.export(slot)) for slot in self._names}
        assert counted == expected, f"counted {counted}, queued {expected}"
