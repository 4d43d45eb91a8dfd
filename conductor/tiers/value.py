"""What a block is worth per byte that it takes, as a heuristic.

value = (expected reuses x (recompute_s - read_s) - write_s - copies x copy_s) / bytes
"""

from __future__ import annotations

from dataclasses import dataclass

from kvroute.conductor.tiers.base import BlockInfo, at_least


@dataclass(frozen=True, slots=True)
class Costs:
    """What a tier's traffic costs, and how reuse is foretold. ValueError names the field at fault."""

    read_s_per_byte: float = 0.0
    """Paid at every reuse, as far as it delays the request."""
    write_s_per_byte: float = 0.0
    copy_s_per_byte: float = 0.0
    """For each copy beyond the first."""
    prior_reuses: float = 0.5
    """Expected of a block just computed."""
    half_life_s: float = 300.0
    """Idle time after which the expectation has halved."""

    def __post_init__(self) -> None:
        for name in ("read_s_per_byte", "write_s_per_byte", "copy_s_per_byte", "prior_reuses"):
            at_least(name, getattr(self, name), 0.0)
        at_least("half_life_s", self.half_life_s, 1e-3)

    def expected_reuses(self, block: BlockInfo, now_s: float) -> float:
        """As many as there were, and the prior, fading while nobody asks."""
        idle_s = max(0.0, now_s - block.last_access_s)
        return float((self.prior_reuses + block.reads) * 0.5 ** (idle_s / self.half_life_s))

    def saved_s(self, block: BlockInfo) -> float:
        """Seconds that one reuse saves; negative where reading is slower than computing."""
        return block.recompute_s - self.read_s_per_byte * block.bytes

    def value_per_byte(self, block: BlockInfo, now_s: float, copies: int = 0) -> float:
        """Seconds per byte for a block yet to be written; 0 is not worth it."""
        gain_s = self.expected_reuses(block, now_s) * self.saved_s(block)
        spent_s = (self.write_s_per_byte + copies * self.copy_s_per_byte) * block.bytes
        return (gain_s - spent_s) / block.bytes
