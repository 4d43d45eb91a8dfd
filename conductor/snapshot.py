"""The index in a file, so that a restart need not learn it anew.

    file    = magic, version (uint16, big endian), records
    record  = length (uint32, big endian), msgpack array [tag, fields...]

`Head` first, then for each worker a `Section` and its `Blocks`, and `End` with a checksum of all before it.
With its blocks a section has, per rank, the watermark of the events that made them. Who loads it follows the
engine from there: the feed has the publisher confirm the last batch and replays the rest, so that the worker
is judged by its load alone until then, exact after it, and never by blocks of an engine that restarted.

Predictions are not kept: they would be too old. Nor are workers whose publishers do not replay: what they
sent meanwhile could not be known.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter, time
from typing import BinaryIO

from msgspec import Struct
from xxhash import xxh3_128

from kvroute.conductor.block_index import Entry
from kvroute.conductor.core import Engine, Service
from kvroute.conductor.events import EventFeed, Watermark
from kvroute.conductor.index import Holder, PrefixIndex
from kvroute.conductor.keys import VERSION as KEY_VERSION
from kvroute.conductor.packing import pack_keys
from kvroute.conductor.snapshot_format import (
    PREAMBLE,
    Blocks,
    End,
    Head,
    Rank,
    Record,
    Run,
    Section,
    SnapshotRefused,
    check_preamble,
    checked_head,
    decoded,
    framed,
    kind_of,
    next_body,
)

WRITE_BYTES = 2**20
SLICE_S = 0.002
"""Work at a stretch, before the event loop gets its turn."""
SLICE_BLOCKS = 512
"""Blocks between two looks at the clock."""
ATTEMPTS = 3


class Saved(Struct, frozen=True):
    """What a snapshot has."""

    workers: int
    blocks: int
    bytes: int
    seconds: float
    skipped: Mapping[str, int]
    """Workers left out, by reason: no_replay, nothing, torn."""


async def save(
    path: Path, index: PrefixIndex, feed: EventFeed, workers: Iterable[tuple[Service | Engine, str]]
) -> Saved:
    """Write what `index` holds of these workers (with their ids) to `path`, all or nothing.

    Each worker's events wait while its blocks are read; the loop is not held for long. `OSError` when the
    file cannot be written.
    """
    started_s = perf_counter()
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    skipped: dict[str, int] = {}
    saved = blocks = 0
    try:
        with part.open("wb") as file:
            out = _Writer(file)
            await out.add(PREAMBLE)
            await out.record(Head(time(), KEY_VERSION))
            for worker, worker_id in workers:
                records = await _read_worker(index, feed, worker, worker_id)
                if isinstance(records, str):
                    skipped[records] = skipped.get(records, 0) + 1
                    continue
                for record in records:
                    await out.record(record)
                    if isinstance(record, Blocks):
                        blocks += sum(len(run.keys) for run in record.runs) // 8
                saved += 1
            await out.record(End(out.hash.digest()))
            size = await out.finish()
        await asyncio.to_thread(os.replace, part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    return Saved(saved, blocks, size, perf_counter() - started_s, skipped)


class Snapshot:
    """A file that was found whole; `sections` are loaded one by one, as their engines are followed."""

    def __init__(self, file: BinaryIO, created_s: float, sections: Mapping[Service | Engine, int]) -> None:
        self._file = file
        self.created_s = created_s
        """Wall clock."""
        self.sections = sections
        """Worker -> where its section begins in the file."""

    @classmethod
    async def open(cls, path: Path) -> Snapshot:
        """Check all of it. Raises `SnapshotRefused`; its reasons: missing, unreadable, foreign, version,
        corrupt, malformed.
        """
        try:
            file = path.open("rb")
        except FileNotFoundError:
            raise SnapshotRefused("missing", f"{path}: no such file") from None
        except OSError as error:
            raise SnapshotRefused("unreadable", f"{path}: {error.strerror}") from None
        try:
            return await cls._check(file, path)
        except BaseException:
            file.close()
            raise

    @classmethod
    async def _check(cls, file: BinaryIO, path: Path) -> Snapshot:
        start = check_preamble(file, path)
        seen = xxh3_128(start)
        sections: dict[Service | Engine, int] = {}
        head: Head | None = None
        pace = _Pace()
        while True:
            position = file.tell()
            body = next_body(file, path)
            before = seen.digest()
            seen.update(len(body).to_bytes(4, "big") + body)
            kind = kind_of(body)
            if head is None or kind in (Section, End):
                record = decoded(body, path)
                if head is None:
                    head = checked_head(record, path)
                elif isinstance(record, Section):
                    sections[record.worker] = position
                elif isinstance(record, End):
                    break
            await pace.rest()
        if record.digest != before or file.read(1):
            raise SnapshotRefused("corrupt", f"{path}: its checksum differs")
        return cls(file, head.created_s, sections)

    async def load(
        self, worker: Service | Engine, index: PrefixIndex, worker_id: str
    ) -> dict[int, Watermark]:
        """Bring a worker's section into `index` under this id, which must be new there; watermarks by rank.

        Raises `SnapshotRefused` (malformed, unreadable) when it cannot be; nothing of it counts then.
        """
        try:
            return await self._load(worker, index, worker_id)
        except (ValueError, KeyError, OverflowError) as error:
            refused = SnapshotRefused("malformed", f"snapshot of {worker_id}: {error}")
        except OSError as error:
            refused = SnapshotRefused("unreadable", f"snapshot of {worker_id}: {error.strerror}")
        except SnapshotRefused as error:
            refused = error
        for holder in index.holders_of(worker_id):
            index.clear(holder)
        raise refused

    async def _load(
        self, worker: Service | Engine, index: PrefixIndex, worker_id: str
    ) -> dict[int, Watermark]:
        name = Path(self._file.name)
        position = self.sections[worker]
        self._file.seek(position)
        section = decoded(next_body(self._file, name), name)
        assert isinstance(section, Section)
        silent = worker.silent_tier_blocks if isinstance(worker, Engine) else 0
        for rank in section.ranks:
            index.add_holder(Holder(worker_id, rank.dp_rank), rank.block_tokens, silent)
        position = self._file.tell()
        pace = _Pace()
        while True:
            self._file.seek(position)  # another section may be loaded meanwhile
            body = next_body(self._file, name)
            position = self._file.tell()
            if kind_of(body) is not Blocks:
                return {rank.dp_rank: rank.watermark for rank in section.ranks}
            record = decoded(body, name)
            assert isinstance(record, Blocks)
            for run in record.runs:
                slot = index.slot(Holder(worker_id, record.dp_rank))
                for _ in range(run.count):
                    index.blocks.store(slot, run.tier, run.parent_key, run.hashes, run.keys)
            index.sweep()
            await pace.rest()

    def close(self) -> None:
        """Idempotent; nothing can be loaded any more."""
        self._file.close()


async def _read_worker(
    index: PrefixIndex, feed: EventFeed, worker: Service | Engine, worker_id: str
) -> Sequence[Section | Blocks] | str:
    """Its records as of one moment of its events, or why it is left out."""
    sources = [worker.source] if isinstance(worker, Service) else worker.sources
    if not sources or any(source.replay_endpoint is None for source in sources):
        return "no_replay"
    for _ in range(ATTEMPTS):
        feed.pause(worker_id)
        try:
            marks = feed.watermarks(worker_id)
            records = await _export(index, worker, worker_id, marks)
            if feed.watermarks(worker_id) == marks:
                return records or "nothing"
        except (KeyError, ValueError, RuntimeError):  # the holder was cleared or evicted from under it
            continue
        finally:
            feed.resume(worker_id)
    return "torn"


async def _export(
    index: PrefixIndex, worker: Service | Engine, worker_id: str, marks: Mapping[int, Watermark]
) -> list[Section | Blocks]:
    ranks: list[Rank] = []
    blocks: list[Section | Blocks] = []
    pace = _Pace()
    for dp_rank, mark in marks.items():
        holder = Holder(worker_id, dp_rank)
        block_tokens = index.block_tokens(holder)
        if block_tokens is None or mark.seq < 0:
            continue
        ranks.append(Rank(dp_rank, block_tokens, mark))
        await asyncio.sleep(0)  # what comes next is one piece: some 10 ms for 200,000 blocks
        entries: Iterator[Entry] = iter(index.blocks.export(index.slot(holder)))
        await asyncio.sleep(0)
        while runs := _runs(entries):
            blocks.append(Blocks(dp_rank, runs))
            await pace.rest()
    return [Section(worker, tuple(ranks)), *blocks] if ranks else []


def _runs(entries: Iterator[Entry]) -> list[Run]:
    """The next `SLICE_BLOCKS` blocks as chains; empty at the end."""
    runs: list[Run] = []
    hashes: list[int] = []
    keys: list[int] = []
    first: Entry | None = None
    for number, entry in enumerate(entries, 1):
        tier, parent, name, key, count = entry
        follows = first is not None and keys and parent == keys[-1] and (tier, count) == (first[0], first[4])
        if not follows:
            if first is not None:
                runs.append(_run(first, hashes, keys))
            first, hashes, keys = entry, [], []
        hashes.append(name)
        keys.append(key)
        if number == SLICE_BLOCKS:
            break
    if first is not None:
        runs.append(_run(first, hashes, keys))
    return runs


def _run(first: Entry, hashes: list[int], keys: list[int]) -> Run:
    tier, parent, _, _, count = first
    return Run(tier, parent, min(count, 1024), pack_keys(hashes), pack_keys(keys))


class _Writer:
    """Gathers records into large writes, made off the loop; hashes all of them."""

    def __init__(self, file: BinaryIO) -> None:
        self.hash = xxh3_128()
        self._file = file
        self._buffer = bytearray()
        self._size = 0
        self._pace = _Pace()

    async def add(self, data: bytes) -> None:
        self.hash.update(data)
        self._buffer += data
        self._size += len(data)
        if len(self._buffer) >= WRITE_BYTES:
            chunk, self._buffer = self._buffer, bytearray()
            await asyncio.to_thread(self._file.write, chunk)
        await self._pace.rest()

    async def record(self, record: Record) -> None:
        await self.add(framed(record))

    async def finish(self) -> int:
        """Bytes of the file, which is on the disk then."""

        def flush() -> None:
            self._file.write(self._buffer)
            self._file.flush()
            os.fsync(self._file.fileno())

        await asyncio.to_thread(flush)
        return self._size


class _Pace:
    """Gives the event loop its turn after `SLICE_S` of work."""

    def __init__(self) -> None:
        self._until = perf_counter() + SLICE_S

    async def rest(self) -> None:
        if perf_counter() > self._until:
            await asyncio.sleep(0)
            self._until = perf_counter() + SLICE_S
