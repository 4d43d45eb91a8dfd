"""Blobs in Redis: a header that names chunks, so that neither side ever moves much in one call."""

from __future__ import annotations

import secrets
from typing import Annotated, Any

import msgspec
import structlog
from msgspec import Meta, Struct
from redis.asyncio import Redis
from xxhash import xxh3_64

from kvroute.conductor.shared.link import Link, why_lost
from kvroute.conductor.shared.stats import SharedStats, SnapshotFailure

log = structlog.get_logger(__name__)

CHUNK_BYTES = 256 * 2**10
MAX_BYTES = 256 * 2**20
HEADER_BYTES = 1024
TTL_MS = 3_600_000

_encode = msgspec.msgpack.Encoder().encode


class Snapshot(Struct, frozen=True, gc=False):
    """Bytes that some replica stored; what they mean is the caller's business."""

    data: bytearray
    version: int
    """As the caller gave it when storing."""
    age_s: float
    """On the server's clock."""


class _Header(Struct, frozen=True, gc=False, array_like=True):
    version: int
    generation: Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
    size_bytes: Annotated[int, Meta(ge=0, le=MAX_BYTES)]
    checksum: bytes
    stored_ms: int

    @property
    def chunks(self) -> int:
        return -(-self.size_bytes // CHUNK_BYTES)


_decode = msgspec.msgpack.Decoder(_Header).decode


class SnapshotError(Exception):
    def __init__(self, reason: SnapshotFailure) -> None:
        super().__init__(reason.value)
        self.reason = reason


class Snapshots:
    """Failures are counted by reason, logged and answered with False or None; nothing is raised.

    The header is written last and names the chunks of its own generation: a reader sees the old snapshot or
    the new one. All of it expires after an hour.
    """

    def __init__(self, client: Redis, link: Link, prefix: str, stats: SharedStats) -> None:
        self._client = client
        self._link = link
        self._prefix = f"{prefix}:snapshot"
        self._stats = stats

    async def store(self, name: str, data: bytes | bytearray, version: int) -> bool:
        """Replace the snapshot `name`; True when it is stored."""
        try:
            if len(data) > MAX_BYTES:
                raise SnapshotError(SnapshotFailure.TOO_LARGE)
            await self._store(name, data, version)
        except Exception as error:
            self._failed("store", name, error)
            return False
        return True

    async def fetch(self, name: str) -> Snapshot | None:
        """The snapshot `name`; None when there is none or it cannot be had."""
        try:
            try:
                return await self._fetch(name)
            except SnapshotError as error:
                if error.reason is not SnapshotFailure.GONE:
                    raise
                return await self._fetch(name)  # it was replaced just now
        except Exception as error:
            self._failed("fetch", name, error)
            return None

    async def _store(self, name: str, data: bytes | bytearray, version: int) -> None:
        old = await self._header(name, strict=False)
        generation = secrets.token_hex(8)
        checksum = xxh3_64()
        for start in range(0, len(data), CHUNK_BYTES):
            chunk = data[start : start + CHUNK_BYTES]
            checksum.update(chunk)
            key = self._chunk_key(name, generation, start // CHUNK_BYTES)
            await self._link.call(self._client.set(key, chunk, px=TTL_MS))
        header = _Header(version, generation, len(data), checksum.digest(), await self._now_ms())
        await self._link.call(self._client.set(f"{self._prefix}:{name}", _encode(header), px=TTL_MS))
        if old is not None:
            for number in range(old.chunks):
                await self._link.call(self._client.unlink(self._chunk_key(name, old.generation, number)))

    async def _fetch(self, name: str) -> Snapshot | None:
        header = await self._header(name, strict=True)
        if header is None:
            return None
        data = bytearray(header.size_bytes)
        checksum = xxh3_64()
        for number in range(header.chunks):
            key = self._chunk_key(name, header.generation, number)
            chunk = await self._get(key, CHUNK_BYTES)
            if not chunk:
                raise SnapshotError(SnapshotFailure.GONE)
            start = number * CHUNK_BYTES
            if len(chunk) != min(CHUNK_BYTES, header.size_bytes - start):
                raise SnapshotError(SnapshotFailure.MALFORMED)
            data[start : start + len(chunk)] = chunk
            checksum.update(chunk)
        if checksum.digest() != header.checksum:
            raise SnapshotError(SnapshotFailure.MALFORMED)
        age_s = max(0.0, (await self._now_ms() - header.stored_ms) / 1000)
        return Snapshot(data, header.version, age_s)

    async def _header(self, name: str, *, strict: bool) -> _Header | None:
        raw = await self._get(f"{self._prefix}:{name}", HEADER_BYTES)
        if not raw:
            return None
        try:
            return _decode(raw)
        except (msgspec.DecodeError, ValueError, OverflowError, RecursionError):
            if strict:
                raise SnapshotError(SnapshotFailure.MALFORMED) from None
            return None

    async def _get(self, key: str, max_bytes: int) -> bytes:
        """The beginning of a value, since whatever stands in its place may be of any size."""
        found: Any = await self._link.call(self._client.getrange(key, 0, max_bytes - 1))
        return bytes(found)

    async def _now_ms(self) -> int:
        seconds, micros = await self._link.call(self._client.time())
        return int(seconds) * 1000 + int(micros) // 1000

    def _chunk_key(self, name: str, generation: str, number: int) -> str:
        return f"{self._prefix}:{name}:{generation}:{number}"

    def _failed(self, what: str, name: str, error: Exception) -> None:
        reason = error.reason if isinstance(error, SnapshotError) else SnapshotFailure.CALL_FAILED
        self._stats.snapshot_failures[reason] += 1
        detail = reason.value if isinstance(error, SnapshotError) else why_lost(error).value
        log.warning("no snapshot", doing=what, snapshot=name, reason=detail, error=str(error)[:300])
