"""Events and frames as engines write them, and readers of captured ones."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvroute.conductor.events.batches import Batch, Event
from kvroute.conductor.events.decode import decode

FRAMES = Path(__file__).parent / "frames"
TOPIC = b"kv@127.0.0.1:8000@m"
encode = msgspec.msgpack.encode


def captured(path: Path) -> list[bytes]:
    """Frames of a message: [u32 BE count], then [u32 BE length][bytes] each."""
    data, at = path.read_bytes(), 4
    frames = []
    for _ in range(int.from_bytes(data[:4], "big")):
        size = int.from_bytes(data[at : at + 4], "big")
        frames.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    assert at == len(data)
    return frames


def stored(
    hashes: Sequence[int | bytes],
    tokens: Sequence[int],
    parent: int | bytes | None = None,
    block_size: int = 4,
    **fields: Any,
) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": block_size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * len(hashes),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    } | fields


def removed(*hashes: int | bytes, medium: str | None = "GPU", group_idx: int | None = 0) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium, "group_idx": group_idx}


CLEARED = {"type": "AllBlocksCleared"}


def as_array(event: dict[str, Any]) -> list[Any]:
    """The positional twin of a map."""
    return list(event.values())


def frames(seq: int, *events: Any, ts_s: float = 1.0, rank: int | None = 0) -> list[bytes]:
    return [TOPIC, seq.to_bytes(8, "big"), encode([ts_s, list(events), rank])]


def batch(seq: int, *events: Any, ts_s: float = 1.0) -> Batch:
    decoded = decode(frames(seq, *events, ts_s=ts_s))
    assert isinstance(decoded, Batch)
    return decoded


def only(*events: Any) -> Event:
    """The one event of a batch of one."""
    (event,) = batch(0, *events).events
    return event


def packed(*values: int) -> bytes:
    return array("Q", values).tobytes()
