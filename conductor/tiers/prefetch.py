"""How much to fetch ahead. What is fetched too late or beside the need wastes the link."""

from __future__ import annotations

from kvroute.conductor.tiers.base import Fetch, Link, count_at_least


class Deadline:
    """The leading blocks that arrive before they are needed, after what is on the link already."""

    def blocks(self, fetch: Fetch, link: Link, now_s: float) -> int:
        """From 0 to all; the rest is computed, or loaded when it is wanted."""
        transfer_s = fetch.needed_at_s - now_s - link.latency_s
        room_bytes = transfer_s * link.bytes_per_s - link.in_flight_bytes
        # A hair of tolerance: a fetch that ends at the very moment it is needed is in time.
        return int(max(0.0, min(fetch.blocks, room_bytes / fetch.block_bytes + 1e-9)))


class Buffer:
    """As much as keeps the bytes on the link, for which the GPU holds room, within `limit_bytes`."""

    def __init__(self, limit_bytes: int = 1 << 30) -> None:
        count_at_least("limit_bytes", limit_bytes, 1)
        self._limit_bytes = limit_bytes

    def blocks(self, fetch: Fetch, link: Link, now_s: float) -> int:
        """From 0 to all, whenever they are needed."""
        return max(0, min(fetch.blocks, (self._limit_bytes - link.in_flight_bytes) // fetch.block_bytes))
