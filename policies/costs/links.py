"""Links that KV travels on: a transfer alone, behind others, through several stages, to a decode worker."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from kvroute.types import Tier, Worker


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

LINKS: dict[str, Link] = {
    "dram": TIER_LINKS[Tier.CPU],
    "nvme": TIER_LINKS[Tier.DISK],
    "nvme-write": Link(5e9, 80e-6),
    "object-store": Link(1e9, 30e-3),
    "tcp": Link(4.2e9, 5e-3),
    "roce-100g": Link(12.1e9, 1e-3),
    "ib-400g": Link(43e9, 1e-3),
    "ib-8x400g": Link(190e9, 1e-3),
}
"""By name, for plans. The middle of what is measured of payload: TCP 3.5-4.9 GB/s and 2-10 ms of set-up, RDMA
0.5-2 ms of set-up, one 400 Gb/s port 38-49 GB/s, eight of them 190 GB/s."""


class Nearness(StrEnum):
    """What two workers share, the narrowest first."""

    HOST = "host"
    RACK = "rack"
    ZONE = "zone"
    FAR = "far"
    """Nothing that is known."""


def nearness(prefill: Worker, decode: Worker) -> Nearness:
    """By their labels. Names repeat (every zone has its rack 1): they are the same only within what is not
    known to be apart.
    """
    ours, theirs = prefill.place, decode.place
    nearest = Nearness.FAR
    for near, one, other in (
        (Nearness.ZONE, ours.zone, theirs.zone),
        (Nearness.RACK, ours.rack, theirs.rack),
        (Nearness.HOST, ours.host, theirs.host),
    ):
        if one and other:
            if one != other:
                break
            nearest = near
    return nearest


@dataclass(frozen=True, slots=True)
class PdLinks:
    """From prefill to decode workers, by how near they are. What is measured replaces what is here."""

    host: Link = LINKS["dram"]
    rack: Link = LINKS["roce-100g"]
    zone: Link = LINKS["roce-100g"]
    far: Link = LINKS["tcp"]

    @classmethod
    def uniform(cls, link: Link) -> PdLinks:
        """The same wherever they are."""
        return cls(link, link, link, link)

    def of(self, near: Nearness) -> Link:
        link: Link = getattr(self, near)
        return link

    def between(self, prefill: Worker, decode: Worker) -> Link:
        return self.of(nearness(prefill, decode))

    def with_link(self, near: Nearness, link: Link) -> PdLinks:
        """With this one in place of the one for workers so near."""
        return replace(self, **{near: link})


class Overlap(StrEnum):
    """Whether a chunk's next stage runs beside the stages of the chunks after it."""

    SERIAL = "serial"
    PIPELINED = "pipelined"


Stage = Link | float
"""A link, or seconds for the whole payload whatever its size (layout, synchronisation)."""


def path_s(stages: Sequence[Stage], payload_bytes: float, *, overlap: Overlap, chunks: float = 1) -> float:
    """Seconds from the first byte's request until the payload, in equal chunks, is through every stage.

    Serial: the sum of all stages of all chunks. Pipelined: all stages of one chunk (start and tail), and the
    slowest stage once for every further chunk. Each chunk pays the latency of each link; a fraction of one is
    a partial last chunk. ValueError for less than one.
    """
    if chunks < 1:
        raise ValueError(f"chunks: {chunks} is not above 0; 1 or more is expected")
    if payload_bytes <= 0:
        return 0.0
    chunk_s = [_chunk_s(stage, payload_bytes / chunks, chunks) for stage in stages]
    if overlap is Overlap.SERIAL:
        return chunks * sum(chunk_s)
    return sum(chunk_s) + (chunks - 1) * max(chunk_s, default=0.0)


def _chunk_s(stage: Stage, chunk_bytes: float, chunks: float) -> float:
    return stage.transfer_s(chunk_bytes) if isinstance(stage, Link) else stage / chunks


@dataclass(frozen=True, slots=True)
class Handoff:
    """From a prompt's prefill worker to its decode worker. The link's latency is the set-up."""

    link: Link
    bytes_per_token: int
    block_tokens: int = 16
    share: float = 1.0
    """Of the link's bandwidth that this transfer gets, above 0 and up to 1."""

    def payload_bytes(self, tokens: int) -> int:
        """Whole blocks travel: the last one too."""
        return math.ceil(tokens / self.block_tokens) * self.block_tokens * self.bytes_per_token

    def transfer_s(self, tokens: int) -> float:
        """Seconds on the wire, without the set-up."""
        return self.payload_bytes(tokens) / (self.link.bytes_per_s * self.share)

    def seconds(self, tokens: int, *, hidden_s: float = 0.0) -> float:
        """Set-up and what of the transfer is not hidden; 0 for no tokens.

        T = setup + ceil(n / bs) bs bytes_per_token / (bandwidth x share) - hidden
        """
        if tokens <= 0:
            return 0.0
        return self.link.latency_s + max(0.0, self.transfer_s(tokens) - hidden_s)

    def hidden_s(self, tokens: int, prefill_s: float, pieces: int) -> float:
        """Seconds of the transfer that pass beside a prefill which sends each of `pieces` (layers) at once.

        Two pipelined stages, prefill and wire: what is left after the prefill is the last piece's transfer,
        and the backlog if the wire is the slower one.
        """
        wire_s = self.transfer_s(tokens)
        left_s = wire_s / pieces + (pieces - 1) / pieces * max(0.0, wire_s - prefill_s)
        return wire_s - left_s


@dataclass(slots=True, eq=False)
class LinkQueue:
    """A link's book of transfers, first come first served, in the caller's (virtual) time. Mutable.

    Bytes hold the link, its latency does not: `send` agrees with `Link.transfer_s` behind queued bytes.
    """

    link: Link
    free_at_s: float = 0.0

    def wait_s(self, now_s: float) -> float:
        """Until a transfer asked for now would begin."""
        return max(0.0, self.free_at_s - now_s)

    def send(self, payload_bytes: float, now_s: float) -> float:
        """Book a transfer asked for at `now_s`; returns when its last byte is there."""
        if payload_bytes <= 0:
            return now_s
        self.free_at_s = max(now_s, self.free_at_s) + payload_bytes / self.link.bytes_per_s
        return self.free_at_s + self.link.latency_s
