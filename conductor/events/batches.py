"""What publishers say: batches of events, and how blocks and media are named."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from xxhash import xxh3_64_intdigest

from kvroute.types import Tier

_U64 = 2**64 - 1

TIERS: dict[str, Tier] = {
    **dict.fromkeys(("gpu", "cuda", "hbm", "device", "npu", "xpu"), Tier.GPU),
    **dict.fromkeys(("cpu", "cpu_pinned", "host", "host_pinned", "dram", "memory"), Tier.CPU),
    **dict.fromkeys(("disk", "storage", "ssd", "nvme", "file"), Tier.DISK),
}
"""Names of media, in lower case."""


class Stored(Struct, frozen=True, gc=False):
    """Blocks of one chain are now in a tier."""

    hashes: bytes
    """The engine's names, packed u64; longer names are folded."""
    parent: int | None
    """Hash of the block before the first; None: it begins a prompt, or the event does not say."""
    token_ids: bytes
    """Of all blocks, packed little-endian uint32; empty when the event has none."""
    block_tokens: int
    tier: Tier | None
    """None: a medium that is not known."""
    lora_id: int | str | None = None
    lora_name: str | None = None
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None = None
    """By block, as the engine lists them; None when no block has any."""
    group: int | None = None
    kind: str | None = None
    """Of the group's attention; None where the engine does not say."""


class Removed(Struct, frozen=True, gc=False):
    """Blocks left a tier, once each."""

    hashes: bytes
    tier: Tier | None
    group: int | None = None


class Cleared(Struct, frozen=True, gc=False):
    """The whole cache was emptied."""


class StoreChange(Struct, frozen=True, gc=False):
    """What the master of a store says of one object."""

    action: str
    """stored, removed or cleared."""
    hashes: bytes
    tier: Tier | None
    object_key: str = ""


Event = Stored | Removed | Cleared | StoreChange


class Batch(Struct, frozen=True, gc=False):
    """One message of a publisher."""

    seq: int
    digest: int
    """xxh3_64 of the payload: the same batch, live or replayed, has the same."""
    ts_s: float
    """The engine's wall clock; 0 when it gives none."""
    dp_rank: int | None
    events: tuple[Event, ...]
    size_bytes: int
    bad: int = 0
    """Events that could not be understood."""
    unknown: int = 0
    """Events of a type that is not known."""


class Undecodable(Struct, frozen=True, gc=False):
    """A message that gives no batch."""

    reason: str
    """frames, seq, size, payload or events."""
    seq: int | None = None
    """None when that could not be read either."""


def tier_of(medium: str | None) -> Tier | None:
    """GPU when an engine names no medium; None for a name that is not known."""
    return TIERS.get(medium.lower()) if medium else Tier.GPU


def fold(hashes: Sequence[int | bytes]) -> bytes:
    """Engine hashes as packed u64."""
    try:
        return array("Q", hashes).tobytes()  # type: ignore[type-var]
    except (TypeError, OverflowError):
        return array("Q", [fold_one(hash) for hash in hashes]).tobytes()


def fold_one(block_hash: int | bytes) -> int:
    """An integer is taken as it is (a negative one as its bits), 8 bytes as big-endian, more are hashed."""
    if isinstance(block_hash, int):
        return block_hash & _U64
    if len(block_hash) <= 8:
        return int.from_bytes(block_hash, "big")
    return xxh3_64_intdigest(block_hash)
