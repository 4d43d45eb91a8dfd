"""Events whose blocks follow one that is not known yet: parked until it is, within bounds."""

from __future__ import annotations

from collections.abc import Iterator

from kvroute.conductor.events.batches import Removed, Stored

_EVENT_BYTES = 400
_NAME_BYTES = 120


class Orphans:
    """Of one holder. What happens to a parked block while it is parked is kept with it, in order."""

    def __init__(self, limit_bytes: int, limit_s: float) -> None:
        self.expired = 0
        """Counter: blocks given up, for their age or for room."""
        self._limit_bytes = limit_bytes
        self._limit_s = limit_s
        self._bytes = 0
        self._parked: dict[int, tuple[float, list[Stored | Removed]]] = {}
        """Parent hash -> (since, what follows), oldest first."""
        self._home: dict[int, int] = {}
        """Hash of a parked block -> the parent it is parked under."""

    def __len__(self) -> int:
        return len(self._home)

    def __bool__(self) -> bool:
        return bool(self._parked)

    def __contains__(self, block_hash: int) -> bool:
        return block_hash in self._home

    def park(self, parent: int, event: Stored, now_s: float) -> None:
        """Keep an event until `take(parent)`; the oldest go when there is no room."""
        _, events = self._parked.setdefault(parent, (now_s, []))
        events.append(event)
        self._bytes += _size(event)
        for block_hash in _hashes(event):
            self._home.setdefault(block_hash, parent)
        while self._bytes > self._limit_bytes and self._parked:
            self._give_up(next(iter(self._parked)))

    def note(self, block_hash: int, event: Stored | Removed) -> None:
        """Something more happened to a parked block: it is applied after what is parked already."""
        self._parked[self._home[block_hash]][1].append(event)
        self._bytes += _size(event)

    def take(self, parent: int) -> list[Stored | Removed]:
        """What waited for this block, in order; no longer parked."""
        _, events = self._parked.pop(parent, (0.0, []))
        for event in events:
            self._bytes -= _size(event)
            for block_hash in _hashes(event):
                if self._home.get(block_hash) == parent:
                    del self._home[block_hash]
        return events

    def expire(self, now_s: float) -> None:
        """Give up what waited too long."""
        while self._parked:
            parent, (since, _) = next(iter(self._parked.items()))
            if now_s - since < self._limit_s:
                return
            self._give_up(parent)

    def clear(self) -> None:
        """The holder was cleared: nothing waits any more."""
        self._parked.clear()
        self._home.clear()
        self._bytes = 0

    def _give_up(self, parent: int) -> None:
        before = len(self._home)
        self.take(parent)
        self.expired += before - len(self._home)


def _hashes(event: Stored | Removed) -> Iterator[int]:
    return iter(memoryview(event.hashes).cast("Q"))


def _size(event: Stored | Removed) -> int:
    ids = len(event.token_ids) if isinstance(event, Stored) else 0
    return _EVENT_BYTES + ids + len(event.hashes) // 8 * _NAME_BYTES
