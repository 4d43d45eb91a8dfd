"""Links that KV travels on, and what a transfer takes."""

from __future__ import annotations

from dataclasses import dataclass

from kvroute.types import Tier


@dataclass(frozen=True, slots=True)
class Link:
    """A link used in turn by the transfers on it. Bandwidth is of payload, as measured, not the line's."""

    bytes_per_s: float
    latency_s: float = 0.0
    """Before the first byte: set-up, lookup, RPC."""

    def transfer_s(self, payload_bytes: float, queued_bytes: float = 0.0) -> float:
        """Seconds for a transfer behind others that have so many bytes to go; 0 for nothing."""
        if payload_bytes <= 0:
            return 0.0
        return self.latency_s + (queued_bytes + payload_bytes) / self.bytes_per_s


TIER_LINKS: dict[Tier, Link] = {Tier.CPU: Link(20e9, 1e-6), Tier.DISK: Link(7e9, 80e-6)}
"""From each tier up to the GPU: pinned memory over PCIe, an NVMe drive read in large blocks."""
