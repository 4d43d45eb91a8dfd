"""What an engine's KV memory is made of: eviction in the GPU, tiers below it, peers to pull from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from kvroute.conductor.tiers.registry import ADMISSIONS, EVICTIONS, WRITE_BACKS
from kvroute.policies.costs.links import TIER_LINKS, Link
from kvroute.types import Tier

BOUNDS = ("belady", "endless")
"""Caches that no engine can have: one knows the future, the other never evicts and is everywhere at once."""
TierNews = Literal["events", "size", "none"]
PullFrom = Literal["cpu", "any"]


@dataclass(frozen=True, slots=True)
class Memory:
    """Of each engine. Validated once; errors name the field. Sizes of 0 are tiers that it has not."""

    gpu_eviction: str = "lru"
    """One of `conductor.tiers`, leaves first, or of `BOUNDS`."""
    cpu_tokens: int = 0
    cpu_write: str = "back"
    """When a block is written there: "through" at once, "back" when the GPU evicts it, "selective" when it
    has been read.
    """
    cpu_eviction: str = "lru"
    cpu_admission: str = "always"
    cpu_link: Link = TIER_LINKS[Tier.CPU]
    """The way up to the GPU; the same for the disk."""
    disk_tokens: int = 0
    """Takes what leaves the CPU tier, or the GPU where there is none; LRU."""
    disk_link: Link = TIER_LINKS[Tier.DISK]
    tier_news: TierNews = "events"
    """What the router knows of the tiers: each block by events, their size alone (what leaves the GPU is then
    thought to lie there, until as much has followed it), or that there is none."""
    peer_link: Link | None = None
    """The way out of each worker for KV that others pull; None: none is pulled."""
    pull_from: PullFrom = "cpu"
    """What a worker gives to others: its tiers below the GPU, as vLLM does, or what its GPU holds as well."""

    def __post_init__(self) -> None:
        for name, value, known in (
            ("gpu_eviction", self.gpu_eviction, [*EVICTIONS.names, *BOUNDS]),
            ("cpu_write", self.cpu_write, WRITE_BACKS.names),
            ("cpu_eviction", self.cpu_eviction, EVICTIONS.names),
            ("cpu_admission", self.cpu_admission, ADMISSIONS.names),
            ("tier_news", self.tier_news, get_args(TierNews)),
            ("pull_from", self.pull_from, get_args(PullFrom)),
        ):
            if value not in known:
                raise ValueError(f"{name} {value!r} is unknown; known: {', '.join(known)}")
        for name in ("cpu_tokens", "disk_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if self.gpu_eviction in BOUNDS and (self.lower_tokens or self.peer_link is not None):
            raise ValueError(
                f"gpu_eviction {self.gpu_eviction!r} is a bound on GPUs alone; no tier or peer link"
            )

    @property
    def knows_future(self) -> bool:
        """Whether all arrivals have to be known before the first."""
        return self.gpu_eviction == "belady"

    @property
    def is_shared(self) -> bool:
        """Whether all engines hold what one of them does."""
        return self.gpu_eviction == "endless"

    @property
    def lower_tokens(self) -> int:
        """Room below the GPU."""
        return self.cpu_tokens + self.disk_tokens
