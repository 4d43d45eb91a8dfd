"""Frames of KV events to batches: vLLM (maps and arrays), SGLang (arrays), the master of a Mooncake store.

A frame is [topic][8-byte big-endian seq][msgpack]; an answer to a replay has an empty frame before, and in
older builds no topic. The payload is [ts, events, rank], shorter in older engines, or a map of the same.
One bad event never drops its batch. Work and memory are bounded by the payload's size: everything is decoded
into the types expected, so that a payload of a thousand times nothing is refused at its first element.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct
from xxhash import xxh3_64_intdigest

from kvroute.conductor.events.batches import (
    Batch,
    Cleared,
    Event,
    Removed,
    StoreChange,
    Stored,
    Undecodable,
    fold,
    fold_one,
    tier_of,
)
from kvroute.conductor.events.limits import DEFAULTS
from kvroute.conductor.keys import pack_ids

MAX_EVENTS = 2**18
"""Of one batch: engines with pages of one token send an event for each."""
MAX_NAME_CHARS = 1024
"""Of an adapter or an object: they are remembered."""
EXTRA_BYTES, EXTRA_BYTES_PER_BLOCK = 4096, 1024
"""Salts are remembered too, and parked blocks keep their extra keys."""
MAX_BLOCKS = 2**17
"""Of one event."""
END_OF_REPLAY = b"\xff" * 8
_FAILURES = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError, TypeError)


def decode(frames: Sequence[bytes], payload_bytes: int = DEFAULTS.payload_bytes) -> Batch | Undecodable:
    """One message, live or replayed; never raises."""
    if len(frames) == 4 and not frames[0]:
        frames = frames[1:]
    if len(frames) != 3:
        return Undecodable("frames")
    _, seq_frame, payload = frames
    if len(seq_frame) != 8 or seq_frame == END_OF_REPLAY:
        return Undecodable("seq")
    seq = int.from_bytes(seq_frame, "big")
    if len(payload) > payload_bytes:
        return Undecodable("size", seq)
    try:
        ts_s, rank, raws = _outer(payload)
    except _FAILURES:
        return Undecodable("payload", seq)
    if raws is None:
        return Undecodable("events", seq)
    events, bad, unknown = _events(raws)
    return Batch(seq, xxh3_64_intdigest(payload), ts_s, rank, events, len(payload), bad, unknown)


def ends_replay(frames: Sequence[bytes]) -> bool:
    """True for the marker after the last answer to a replay."""
    return len(frames) >= 2 and frames[-2] == END_OF_REPLAY and not frames[-1]


# Batches.


class _Batch(Struct):
    events: Raw
    ts: float = 0.0
    timestamp: float = 0.0
    data_parallel_rank: int | None = None
    dp_rank: int | None = None


_raw_list = msgspec.msgpack.Decoder(list[Raw]).decode
_number = msgspec.msgpack.Decoder(float).decode
_rank = msgspec.msgpack.Decoder(int | None).decode
_batch_map = msgspec.msgpack.Decoder(_Batch).decode


def _outer(payload: bytes) -> tuple[float, int | None, list[Raw] | None]:
    """(ts, rank, events); no events when they are too many."""
    if _is_map(payload):
        try:
            batch = _batch_map(payload)
        except msgspec.ValidationError:
            return 0.0, None, [Raw(payload)]  # a single event without a batch around it
        rank = batch.data_parallel_rank if batch.dp_rank is None else batch.dp_rank
        return batch.ts or batch.timestamp, rank, _raws(batch.events)
    if _array_length(payload) > 16:
        return 0.0, None, _raws(payload)
    parts = _raw_list(payload)
    if not parts or _is_map(parts[0]) or _array_length(parts[0]) >= 0:
        return 0.0, None, parts
    if len(parts) < 2:
        raise ValueError("a batch has a time and events")
    return _number(parts[0]), _rank(parts[2]) if len(parts) > 2 else None, _raws(parts[1])


def _raws(array: bytes | Raw) -> list[Raw] | None:
    return _raw_list(array) if _array_length(array) <= MAX_EVENTS else None


def _is_map(data: bytes | Raw) -> bool:
    first = memoryview(data)[:1].tobytes()
    return bool(first) and (0x80 <= first[0] <= 0x8F or first[0] in (0xDE, 0xDF))


def _array_length(data: bytes | Raw) -> int:
    """Elements that an array says it has; -1 for what is no array."""
    head = memoryview(data)[:5].tobytes()
    if not head:
        return -1
    if 0x90 <= head[0] <= 0x9F:
        return head[0] & 0x0F
    if head[0] == 0xDC:
        return int.from_bytes(head[1:3], "big")
    return int.from_bytes(head[1:5], "big") if head[0] == 0xDD else -1


# Events.

_Hash = int | bytes
_Hashes = Annotated[list[_Hash], Meta(max_length=MAX_BLOCKS)]
_few = msgspec.msgpack.Decoder(Annotated[list[Raw], Meta(max_length=64)]).decode
_any = msgspec.msgpack.Decoder().decode
_NIL = b"\xc0"


class _Map(Struct, tag_field="type"):
    pass


class _StoredMap(_Map, tag="BlockStored"):
    block_hashes: _Hashes
    parent_block_hash: _Hash | None = None
    token_ids: list[int] | None = None
    block_size: int = 0
    lora_id: int | str | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: Raw = Raw(_NIL)
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class _RemovedMap(_Map, tag="BlockRemoved"):
    block_hashes: _Hashes
    medium: str | None = None
    group_idx: int | None = None


class _ClearedMap(_Map, tag="AllBlocksCleared"):
    pass


class _Array(Struct, array_like=True, tag_field="type"):
    pass


class _StoredArray(_Array, tag="BlockStored"):
    block_hashes: _Hashes
    parent_block_hash: _Hash | None = None
    token_ids: list[int] | None = None
    block_size: int = 0
    lora_id: int | str | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: Raw = Raw(_NIL)
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class _RemovedArray(_Array, tag="BlockRemoved"):
    block_hashes: _Hashes
    medium: str | None = None
    group_idx: int | None = None


class _ClearedArray(_Array, tag="AllBlocksCleared"):
    pass


class _StoreMap(Struct):
    event_type: str
    seq_hashes: _Hashes = []
    medium: str | None = None
    object_key: str = ""


class _Kind(Struct):
    type: str | None = None
    event_type: str | None = None


_TYPES = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
_map_event = msgspec.msgpack.Decoder(_StoredMap | _RemovedMap | _ClearedMap).decode
_array_event = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray).decode
_store_event = msgspec.msgpack.Decoder(_StoreMap).decode
_kind = msgspec.msgpack.Decoder(_Kind).decode
_text = msgspec.msgpack.Decoder(str).decode


def _events(raws: list[Raw]) -> tuple[tuple[Event, ...], int, int]:
    """(events, how many were bad, how many of unknown type)"""
    events: list[Event] = []
    bad = unknown = 0
    for raw in raws:
        try:
            event = _event(raw)
        except _FAILURES:
            bad += 1
            continue
        if event is None:
            unknown += 1
        else:
            events.append(event)
    return tuple(events), bad, unknown


def _event(raw: Raw) -> Event | None:
    """None for a type that is not known; raises one of `_FAILURES` when it is bad."""
    try:
        wire = _map_event(raw) if _is_map(raw) else _array_event(raw)
    except msgspec.ValidationError:
        return _other(raw)
    if isinstance(wire, _StoredMap | _StoredArray):
        return _stored(wire)
    if isinstance(wire, _RemovedMap | _RemovedArray):
        return Removed(fold(wire.block_hashes), tier_of(wire.medium), wire.group_idx)
    return Cleared()


def _other(raw: Raw) -> Event | None:
    if not _is_map(raw):
        name = _text(_raw_list(raw)[0]) if 0 < _array_length(raw) <= 64 else "BlockStored"
    else:
        kind = _kind(raw)
        if kind.event_type is not None:
            return _store_change(raw, kind.event_type)
        name = kind.type or "BlockStored"
    if name in _TYPES:
        raise ValueError("an event of a known type is not shaped like one")
    return None


def _stored(wire: _StoredMap | _StoredArray) -> Stored:
    count, tokens = len(wire.block_hashes), wire.token_ids
    if tokens and (wire.block_size < 1 or len(tokens) != count * wire.block_size):
        raise ValueError(f"{len(tokens)} token ids for {count} blocks of {wire.block_size}")
    if wire.lora_name is not None and len(wire.lora_name) > MAX_NAME_CHARS:
        raise ValueError(f"lora_name of {len(wire.lora_name)} characters; at most {MAX_NAME_CHARS}")
    parent = wire.parent_block_hash
    return Stored(
        fold(wire.block_hashes),
        None if parent is None else fold_one(parent),
        pack_ids(tokens) if tokens else b"",
        wire.block_size,
        tier_of(wire.medium),
        wire.lora_id,
        wire.lora_name or None,
        _extra_keys(wire.extra_keys, count),
        wire.group_idx,
        wire.kv_cache_spec_kind,
    )


def _store_change(raw: Raw, action: str) -> StoreChange | None:
    if action not in ("stored", "removed", "cleared"):
        return None
    wire = _store_event(raw)
    if len(wire.object_key) > MAX_NAME_CHARS:
        raise ValueError(f"object_key of {len(wire.object_key)} characters; at most {MAX_NAME_CHARS}")
    return StoreChange(
        action,
        fold(wire.seq_hashes),
        tier_of(wire.medium or "cpu"),
        wire.object_key,
    )


def _extra_keys(raw: Raw, blocks: int) -> tuple[tuple[Any, ...] | None, ...] | None:
    length = _array_length(raw)
    if length <= 0:
        return None
    if length != blocks:
        raise ValueError(f"extra_keys of {length} blocks, for {blocks}")
    most = EXTRA_BYTES + blocks * EXTRA_BYTES_PER_BLOCK
    if len(bytes(raw)) > most:
        raise ValueError(f"extra_keys of {len(bytes(raw))} bytes; at most {most} for {blocks} blocks")
    lists = [None if item == _NIL else _extras(item) for item in map(bytes, _raw_list(raw))]
    return tuple(lists) if any(lists) else None


def _extras(item: bytes) -> tuple[Any, ...] | None:
    extras = tuple(
        tuple(map(_scalar, _few(extra))) if _array_length(extra) >= 0 else _scalar(extra)
        for extra in _few(item)
    )
    return extras or None


def _scalar(raw: Raw) -> Any:
    if _is_map(raw) or _array_length(raw) >= 0:
        raise ValueError("extra keys are text, bytes, numbers, or lists of these")
    return _any(raw)
