"""Event faults: what becomes of batches between the publisher and its socket. Pure: no sockets, no clock."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from kvroute.loadtests.mock_engine.faults import Faults

Frames = tuple[bytes, ...]


class Disturbance:
    """Of one publisher."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._held: Frames | None = None

    def pass_on(self, frames: Frames, faults: Faults) -> list[Frames]:
        """What is sent now in place of these frames, in order."""
        chance = self._dice.random
        if faults.event_drop and chance() < faults.event_drop:
            return []
        if faults.event_malformed and chance() < faults.event_malformed:
            frames = self._malformed(frames)
        sent = [frames]
        if faults.event_duplicate and chance() < faults.event_duplicate:
            sent.append(frames)
        if self._held is not None:
            sent.append(self._held)
            self._held = None
        elif faults.event_reorder and chance() < faults.event_reorder:
            self._held = sent.pop()
        return sent

    def _malformed(self, frames: Frames) -> Frames:
        topic, seq, payload = frames
        at = self._dice.randrange(len(payload))
        return self._dice.choice(
            (
                (topic, seq),
                (topic, seq[1:], payload),
                (topic, b"\xff" * 8, payload),
                (topic, seq, payload[:at]),
                (topic, seq, b"\xc1" + payload[1:]),
                (topic, seq, b""),
                (topic, seq, payload, b"more"),
            )
        )


def shaped(events: list[dict[str, Any]], faults: Faults) -> list[Any]:
    """Events in the shape that the faults ask for."""
    if faults.event_pages:
        events = [page for event in events for page in _pages(event)]
    if faults.event_digests:
        events = [_digests(event) for event in events]
    return [_array(event) for event in events] if faults.event_arrays else list(events)


_TAILS = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
        *("extra_keys", "group_idx", "kv_cache_spec_kind"),
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
}


def _array(event: dict[str, Any]) -> list[Any]:
    return [event["type"], *(event.get(name) for name in _TAILS.get(event["type"], ()))]


def _pages(event: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if event["type"] != "BlockStored" or not event["token_ids"]:
        yield event
        return
    parent, size = event["parent_block_hash"], event["block_size"]
    for index, block_hash in enumerate(event["block_hashes"]):
        ids = event["token_ids"][index * size : (index + 1) * size]
        extras = event["extra_keys"][index : index + 1]
        page = {"block_hashes": [block_hash], "parent_block_hash": parent, "token_ids": ids}
        yield event | page | {"extra_keys": extras}
        parent = block_hash


def _digests(event: dict[str, Any]) -> dict[str, Any]:
    changed = dict(event)
    if "block_hashes" in event:
        changed["block_hashes"] = [_digest(block_hash) for block_hash in event["block_hashes"]]
    if event.get("parent_block_hash") is not None:
        changed["parent_block_hash"] = _digest(event["parent_block_hash"])
    return changed


def _digest(block_hash: int) -> bytes:
    return block_hash.to_bytes(8, "big") * 4
