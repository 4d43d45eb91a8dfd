"""What replicas tell each other: msgpack arrays, one message per stream entry.

The name of the entry's only field is the version of the format: a reader counts and skips what it does not
know. Fields may be appended to an array; readers ignore what they do not expect.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Generic, TypeVar

import msgspec
from msgspec import Meta, Struct

from kvroute.conductor.shared.stats import Ignored
from kvroute.types import EngineKind, KeyMode, PromptKeys

VERSION = b"1"
KEY_BYTES = 8
MAX_KEYS = 8192
"""Per prompt: the beginning of a longer one is told, 64 KiB."""
ENTRY_BYTES = 64 * 2**10
"""A writer ends an entry at this size; one more item may lie across."""
MAX_ENTRY_BYTES = 4 * ENTRY_BYTES
MAX_WORKERS = 4096
MAX_URL_LENGTH = 2048

Url = Annotated[str, Meta(min_length=1, max_length=MAX_URL_LENGTH)]
Name = Annotated[str, Meta(max_length=512)]
Sender = Annotated[str, Meta(min_length=1, max_length=256)]
Amount = Annotated[int, Meta(ge=0, le=2**40)]
T = TypeVar("T")


class Unreadable(Exception):
    """An entry that cannot be used; `reason` says why."""

    def __init__(self, reason: Ignored) -> None:
        super().__init__(reason.value)
        self.reason = reason


class Routed(Struct, frozen=True, gc=False, array_like=True):
    """A prompt that was sent to the engine behind `url`."""

    url: Url
    started_at: float | None
    """The engine's own process start time, as it reports it: tells one incarnation from the next."""
    mode: KeyMode
    block_tokens: Annotated[int, Meta(ge=1, le=2**20)]
    prompt_tokens: Amount
    keys: Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES * MAX_KEYS)]
    """Little-endian u64, first block first."""

    def __post_init__(self) -> None:
        if len(self.keys) % KEY_BYTES:
            raise ValueError(f"keys: {len(self.keys)} bytes, not a multiple of {KEY_BYTES}")

    @classmethod
    def of(cls, url: str, started_at: float | None, keys: PromptKeys) -> Routed:
        packed = pack(keys.keys[:MAX_KEYS])
        return cls(url, started_at, keys.mode, keys.block_tokens, min(keys.prompt_tokens, 2**40), packed)

    def prompt_keys(self) -> PromptKeys:
        keys = array("Q", self.keys)
        if sys.byteorder == "big":
            keys.byteswap()
        return PromptKeys(self.mode, keys.tolist(), self.block_tokens, self.prompt_tokens)


def pack(keys: Sequence[int]) -> bytes:
    """64-bit keys as little-endian bytes."""
    packed = array("Q", keys)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


class RoutedBatch(Struct, frozen=True, gc=False, array_like=True):
    sender: Sender
    items: Annotated[list[Routed], Meta(max_length=4096)]


class WorkerShare(Struct, frozen=True, gc=False, array_like=True):
    """What one replica has on one worker now."""

    url: Url
    requests: Amount
    pending_prefill_tokens: Amount


class LoadReport(Struct, frozen=True, gc=False, array_like=True):
    """All that one replica has in flight; a worker not listed carries nothing of it."""

    sender: Sender
    shares: Annotated[list[WorkerShare], Meta(max_length=MAX_WORKERS)]


class Intent(StrEnum):
    """What an operator decided about a worker."""

    SERVING = "serving"
    DRAINING = "draining"
    REMOVED = "removed"


class SharedWorker(Struct, frozen=True, array_like=True):
    """A decision about the worker behind `url`, with what the replica where it was taken knew of it.

    The highest (version, origin) holds. Secrets are not shared.
    """

    url: Url
    intent: Intent
    engine: EngineKind | None = None
    models: Annotated[tuple[Name, ...], Meta(max_length=256)] = ()
    block_size_tokens: Annotated[int, Meta(ge=1, le=2**20)] | None = None
    version: Annotated[int, Meta(ge=0, le=2**53)] = 0
    """Milliseconds since the epoch when it was taken, or one more than the version it replaces."""
    origin: Annotated[str, Meta(max_length=256)] = ""


class Decisions(Struct, frozen=True, gc=False, array_like=True):
    sender: Sender
    workers: Annotated[list[SharedWorker], Meta(max_length=MAX_WORKERS)]


encode = msgspec.msgpack.Encoder().encode


class Reader(Generic[T]):
    """Entries of one stream -> messages of one type."""

    def __init__(self, kind: type[T]) -> None:
        self._decode = msgspec.msgpack.Decoder(kind).decode

    def read(self, fields: Mapping[bytes, bytes]) -> T:
        """Raise `Unreadable` for what is too large, of another version or none of ours."""
        data = fields.get(VERSION)
        if data is None:
            raise Unreadable(Ignored.UNKNOWN_VERSION)
        if len(data) > MAX_ENTRY_BYTES:
            raise Unreadable(Ignored.TOO_LARGE)
        try:
            return self._decode(data)
        except (msgspec.DecodeError, ValueError, OverflowError, RecursionError):
            raise Unreadable(Ignored.MALFORMED) from None


def split(sender: str, workers: Sequence[SharedWorker]) -> list[bytes]:
    """Messages of about `ENTRY_BYTES` each that carry all the decisions."""
    messages: list[bytes] = []
    part: list[SharedWorker] = []
    size = 0
    for worker in workers:
        part.append(worker)
        size += len(encode(worker))
        if size >= ENTRY_BYTES:
            messages.append(encode(Decisions(sender, part)))
            part, size = [], 0
    if part:
        messages.append(encode(Decisions(sender, part)))
    return messages
