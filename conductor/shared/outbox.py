"""What was routed here and waits to be told: the only part of sharing that the request path touches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvroute.conductor.shared.messages import ENTRY_BYTES, KEY_BYTES, MAX_KEYS, Routed, RoutedBatch, encode
from kvroute.conductor.shared.stats import Dropped, SharedStats
from kvroute.types import PromptKeys

ITEM_BYTES = 400
KEY_OBJECT_BYTES = 40
"""An integer and its place in a list, if the queue alone keeps it alive."""

_Name = tuple[str, float | None, int, int, int]
"""URL, start time, block size, number of keys, last key: the last of chained keys stands for all of them."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One stream entry's payload, and how many prompts it tells of."""

    payload: bytes
    prompts: int


class Outbox:
    """Bounded in bytes; equal prompts for one worker wait once. Packing is left to whoever takes.

    It is closed while nobody could be told: then it keeps nothing.
    """

    def __init__(self, sender: str, max_bytes: int, stats: SharedStats, wake: Callable[[], None]) -> None:
        self._sender = sender
        self._max_bytes = max_bytes
        self._stats = stats
        self._wake = wake
        self._waiting: dict[_Name, PromptKeys] = {}
        self._is_open = False

    def __len__(self) -> int:
        return len(self._waiting)

    def open(self) -> None:
        self._is_open = True

    def close(self) -> None:
        """Drop what waits, and what comes until `open`."""
        self._is_open = False
        if self._waiting:
            self._stats.dropped[Dropped.DISCONNECTED] += len(self._waiting)
            self._waiting.clear()
            self._stats.queue_bytes = 0

    def add(self, url: str, started_at: float | None, keys: PromptKeys) -> None:
        """Constant time; the keys must not be changed afterwards."""
        count = min(len(keys.keys), MAX_KEYS)
        if not count:
            return
        stats = self._stats
        if not self._is_open:
            stats.dropped[Dropped.DISCONNECTED] += 1
            return
        name = (url, started_at, keys.block_tokens, count, keys.keys[count - 1])
        if name in self._waiting:
            stats.coalesced += 1
            return
        size = _size(keys)
        if stats.queue_bytes + size > self._max_bytes:
            stats.dropped[Dropped.QUEUE_FULL] += 1
            return
        stats.queue_bytes += size
        if not self._waiting:
            self._wake()
        self._waiting[name] = keys

    def take(self, max_bytes: int) -> list[Entry]:
        """Remove and pack the oldest prompts, up to about so many bytes."""
        entries: list[Entry] = []
        items: list[Routed] = []
        size = total = 0
        while self._waiting and total < max_bytes:
            name = next(iter(self._waiting))
            keys = self._waiting.pop(name)
            self._stats.queue_bytes -= _size(keys)
            self._stats.truncated += len(keys.keys) > MAX_KEYS
            items.append(Routed.of(name[0], name[1], keys))
            size += len(items[-1].keys) + len(name[0]) + KEY_BYTES
            if size >= ENTRY_BYTES:
                entries.append(Entry(encode(RoutedBatch(self._sender, items)), len(items)))
                total += size
                items, size = [], 0
        if items:
            entries.append(Entry(encode(RoutedBatch(self._sender, items)), len(items)))
        return entries


def _size(keys: PromptKeys) -> int:
    return ITEM_BYTES + KEY_OBJECT_BYTES * len(keys.keys)
