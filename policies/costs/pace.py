"""How fast one worker is: its preset, and what its answers have taught since."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvroute.policies.costs.links import TIER_LINKS, Link
from kvroute.policies.costs.speeds import PRESETS, Speed
from kvroute.types import Tier

DEFAULT_PRESET = "llama-3.1-8b-h100-tp1"
"""Stands in for a worker of unknown speed until its answers have corrected it."""
UNKNOWN_KV_TOKENS = 2**40
"""Room enough for anything: what an engine that does not say is taken to have."""


@dataclass(slots=True, eq=False)
class Pace:
    """A preset and its corrections. Mutable: `calibration` writes it, policies only read it.

    Two workers of one preset that have not answered yet are equal in price.
    """

    version: int = field(default=0, init=False, repr=False)
    """Grows with every assignment to a field, whoever makes it. What is put into `links` is not seen."""
    speed: Speed = PRESETS[DEFAULT_PRESET]
    prefill_scale: float = 1.0
    """Seconds that a prefill second of the preset takes here."""
    decode_scale: float = 1.0
    """The same for decode steps."""
    overhead_s: float = 0.0
    """Part of every TTFT that is neither queue nor prefill: network, HTTP, tokenizing."""
    kv_tokens: int = UNKNOWN_KV_TOKENS
    """Tokens it has KV room for."""
    match_reliability: float = 1.0
    """Cached tokens reported per token predicted and not confirmed, 0..1."""
    links: dict[Tier, Link] = field(default_factory=lambda: dict(TIER_LINKS))
    """The way up to the GPU from each tier below it."""

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        object.__setattr__(self, "version", self.version + 1)

    def prefill_s(self, new_tokens: int, cached_tokens: int = 0) -> float:
        """Seconds to prefill alone, nothing being ahead."""
        return self.speed.prefill_s(new_tokens, cached_tokens) * self.prefill_scale

    def decode_s(self, decodes: int, context_tokens: float) -> float:
        """Seconds of one decode step."""
        return self.speed.decode_s(decodes, context_tokens) * self.decode_scale

    def load_s(self, tier: Tier, tokens: int) -> float:
        """Seconds to bring so many tokens' KV up from a tier, alone on its link."""
        return self.links[tier].transfer_s(tokens * self.speed.kv_bytes_per_token)
