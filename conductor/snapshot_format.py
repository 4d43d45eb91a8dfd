"""The records of a snapshot file, as snapshot.py describes them, and how they are read back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
from msgspec import Meta, Struct

from kvroute.conductor.core import Engine, Service
from kvroute.conductor.events import Watermark
from kvroute.conductor.keys import VERSION as KEY_VERSION

MAGIC = b"kvroute-snapshot"
VERSION = 1
PREAMBLE = MAGIC + VERSION.to_bytes(2, "big")
MAX_RECORD_BYTES = 2**20


class SnapshotRefused(Exception):
    """The file cannot be used; `reason` is one of a small fixed set."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Record(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What all records have in common: arrays, in the order of their fields."""


class Head(Record, tag=0, frozen=True):
    """When it was written, and by what rule blocks are named."""

    created_s: float
    key_version: bytes


class Rank(Record, frozen=True):
    """One data-parallel rank of a worker."""

    dp_rank: int
    block_tokens: int
    watermark: Watermark


class Section(Record, tag=1, frozen=True):
    """A worker, of which blocks follow."""

    worker: Service | Engine
    ranks: tuple[Rank, ...]


class Run(Record, frozen=True):
    """A chain of blocks in one tier, each stored `count` times; keys and hashes are packed uint64."""

    tier: int
    parent_key: int | None
    count: Annotated[int, Meta(ge=1, le=1024)]
    hashes: bytes
    keys: bytes


class Blocks(Record, tag=2, frozen=True):
    """Some of the blocks of a rank of the section before."""

    dp_rank: int
    runs: list[Run]


class End(Record, tag=3, frozen=True):
    """Nothing follows; `digest` is xxh3_128 of every byte before this record."""

    digest: bytes


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Head | Section | Blocks | End)
_BY_TAG = (Head, Section, Blocks, End)


def framed(record: Record) -> bytes:
    """A record with its length before it."""
    body = _encode(record)
    return len(body).to_bytes(4, "big") + body


def check_preamble(file: BinaryIO, path: Path) -> bytes:
    """The first bytes, which must be those of a snapshot of this version."""
    start = file.read(len(PREAMBLE))
    if start[: len(MAGIC)] != MAGIC:
        raise SnapshotRefused("foreign", f"{path}: is no snapshot of an index")
    version = int.from_bytes(start[len(MAGIC) :], "big")
    if version != VERSION:
        raise SnapshotRefused("version", f"{path}: is of version {version}; accepted: {VERSION}")
    return start


def next_body(file: BinaryIO, path: Path) -> bytes:
    """The next record, not decoded; `SnapshotRefused` when the file ends before it does."""
    length = int.from_bytes(file.read(4), "big")
    if not 0 < length <= MAX_RECORD_BYTES:
        raise SnapshotRefused(
            "corrupt", f"{path}: a record of {length} bytes; accepted: 1 to {MAX_RECORD_BYTES}"
        )
    body = file.read(length)
    if len(body) < length:
        raise SnapshotRefused("corrupt", f"{path}: ends within a record")
    return body


def kind_of(body: bytes) -> type[Head | Section | Blocks | End] | None:
    """What kind of record it is, by its second byte: the tag, after the array's head."""
    return _BY_TAG[body[1]] if len(body) > 1 and body[1] < len(_BY_TAG) else None


def decoded(body: bytes, path: Path) -> Head | Section | Blocks | End:
    """The record; `SnapshotRefused` when it is none."""
    try:
        record: Head | Section | Blocks | End = _decoder.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise SnapshotRefused("malformed", f"{path}: {error}") from None
    return record


def checked_head(record: Record, path: Path) -> Head:
    """The head, which must name blocks as this version does."""
    if not isinstance(record, Head):
        raise SnapshotRefused("malformed", f"{path}: does not begin with its head")
    if record.key_version != KEY_VERSION:
        raise SnapshotRefused("version", f"{path}: names blocks by another rule than {KEY_VERSION.decode()}")
    return record
