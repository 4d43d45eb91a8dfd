"""What the shared state counts; every reason comes from a fixed set, so each can be a metric label."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum


class Dropped(StrEnum):
    """Why something routed here was not told to the others."""

    QUEUE_FULL = "queue_full"
    DISCONNECTED = "disconnected"
    """While Redis could not be reached."""
    UNSURE = "unsure"
    """The call that carried it failed or timed out: it may have arrived or not."""
    REFUSED = "refused"
    """Redis answered with an error."""


class Ignored(StrEnum):
    """Why something found in Redis had no effect here."""

    MALFORMED = "malformed"
    TOO_LARGE = "too_large"
    UNKNOWN_VERSION = "unknown_version"
    """Of the message, which another release wrote."""
    WRONG_TYPE = "wrong_type"
    """A key of ours that holds something else."""
    UNKNOWN_WORKER = "unknown_worker"
    OTHER_INCARNATION = "other_incarnation"
    """The engine has been restarted between there and here."""
    WAITING_FULL = "waiting_full"
    TOO_MANY_REPLICAS = "too_many_replicas"
    TOO_MANY_WORKERS = "too_many_workers"
    FROM_THE_FUTURE = "from_the_future"
    """A decision whose version lies beyond any honest clock."""
    BAD_URL = "bad_url"
    HOST_FAILED = "host_failed"
    """The gateway raised when told of it."""


class Lost(StrEnum):
    """Why a call to Redis failed."""

    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"
    AUTH = "auth"
    ERROR_REPLY = "error_reply"
    PROTOCOL = "protocol"


class SnapshotFailure(StrEnum):
    """Why a snapshot was neither stored nor fetched."""

    TOO_LARGE = "too_large"
    CALL_FAILED = "call_failed"
    MALFORMED = "malformed"
    """The header is none, or the chunks are not what it says."""
    GONE = "gone"
    """Chunks that the header names have expired or were replaced while they were read."""


@dataclass(slots=True)
class SharedStats:
    """Counters since the start, and gauges."""

    connected: bool = False
    """Gauge: both directions work; otherwise this replica stands on local knowledge."""
    replicas: int = 0
    """Gauge: others that have been heard of within the last seconds."""
    queue_bytes: int = 0
    """Gauge: estimated size of what waits to be told to the others."""
    waiting_bytes: int = 0
    """Gauge: predictions of others for workers that are not known here yet."""
    told: int = 0
    """Prompts that were routed here and written to Redis."""
    heard: int = 0
    """Prompts that others routed and that reached the index."""
    coalesced: int = 0
    """Prompts that were waiting to be told already."""
    truncated: int = 0
    """Prompts of which only the beginning was told."""
    connects: int = 0
    disconnects: int = 0
    dropped: Counter[Dropped] = field(default_factory=Counter)
    ignored: Counter[Ignored] = field(default_factory=Counter)
    lost: Counter[Lost] = field(default_factory=Counter)
    snapshot_failures: Counter[SnapshotFailure] = field(default_factory=Counter)
