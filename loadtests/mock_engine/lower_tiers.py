"""The tiers below a mock engine's GPU, as its options want them."""

from __future__ import annotations

from kvroute.clock import Clock
from kvroute.conductor.tiers.base import Link
from kvroute.conductor.tiers.registry import ADMISSIONS, EVICTIONS, WRITE_BACKS
from kvroute.conductor.tiers.stack import BlockModel
from kvroute.conductor.tiers.tier import Tier
from kvroute.loadtests.mock_engine.kv_hints import HintedTiers
from kvroute.loadtests.mock_engine.options import MockOptions


def make_lower_tiers(options: MockOptions, clock: Clock) -> HintedTiers | None:
    """None when the options name no tier. Disk takes what leaves the tier above it."""
    speed, block_tokens = options.step_speed, options.block_size_tokens
    block_bytes = speed.kv_bytes_per_token * block_tokens
    tiers = []
    for medium, blocks, admission, eviction, write, bytes_per_s in (
        (
            "CPU",
            options.cpu_blocks,
            options.cpu_admission,
            options.cpu_eviction,
            options.cpu_write,
            options.cpu_load_bytes_per_s,
        ),
        ("DISK", options.disk_blocks, "always", "lru", "back", options.disk_load_bytes_per_s),
    ):
        if blocks:
            tiers.append(
                Tier(
                    medium,
                    blocks * block_bytes,
                    ADMISSIONS.make(admission),
                    EVICTIONS.make(eviction),
                    WRITE_BACKS.make(write),
                    Link(bytes_per_s),
                )
            )
    if not tiers:
        return None
    model = BlockModel(block_bytes, lambda depth: speed.block_s(depth, block_tokens))
    return HintedTiers(tiers, model, clock)
