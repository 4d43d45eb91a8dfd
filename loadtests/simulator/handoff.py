"""KV on its way from prefill to decode workers: a link out of each of these, a link into each of those."""

from __future__ import annotations

from kvroute.policies.costs.links import Handoff, LinkQueue


class Handoffs:
    """Transfers, each over two links at once, first come first served on both.

    A link is not kept idle for a transfer that waits for its other one.
    """

    def __init__(self, handoff: Handoff, workers: int) -> None:
        self._handoff = handoff
        self._out = [LinkQueue(handoff.link) for _ in range(workers)]
        self._in = [LinkQueue(handoff.link) for _ in range(workers)]
        self.moved_bytes = [0] * workers
        """Into each worker."""

    def send(self, prefill: int, decode: int, tokens: int, now_s: float) -> float:
        """Book the KV of so many tokens, in whole blocks; when all of it is there."""
        payload_bytes = self._handoff.payload_bytes(tokens)
        self.moved_bytes[decode] += payload_bytes
        return max(self._out[prefill].send(payload_bytes, now_s), self._in[decode].send(payload_bytes, now_s))
