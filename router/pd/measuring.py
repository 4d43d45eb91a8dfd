"""How fast KV travels from prefill to decode workers, learned from handoffs as they happen."""

from __future__ import annotations

from dataclasses import replace

from kvroute.policies.costs.links import Nearness
from kvroute.router.dispatch import Dispatcher

WEIGHT = 0.1
"""Of one handoff."""
REPLACE_AT = 0.2
"""The link in use is replaced once what is measured differs from it by so much: prices are kept by it."""
MIN_BYTES = 2**22
"""Smaller ones tell of the set-up and of the first decode step."""
FASTEST, SLOWEST = 1e12, 1e6
"""Bytes per second that are believed."""


class HandoffSpeeds:
    """Payload over time, set-up taken off, averaged by how near the two workers are.

    The time is from the prefill's answer to the first byte of the decode worker, but for what was expected of
    it beside the way: the wait for links and for a step, and that step.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._seconds_per_byte: dict[Nearness, float] = {}

    def observe(self, near: Nearness, payload_bytes: int, handoff_s: float) -> None:
        """One handoff is over."""
        if payload_bytes < MIN_BYTES:
            return
        links = self._dispatcher.pd_links
        link = links.of(near)
        if handoff_s <= link.latency_s:
            return
        seen = min(1 / SLOWEST, max(1 / FASTEST, (handoff_s - link.latency_s) / payload_bytes))
        known = self._seconds_per_byte.get(near, 1 / link.bytes_per_s)
        known += WEIGHT * (seen - known)
        self._seconds_per_byte[near] = known
        if abs(known * link.bytes_per_s - 1) > REPLACE_AT:
            self._dispatcher.pd_links = links.with_link(near, replace(link, bytes_per_s=1 / known))
