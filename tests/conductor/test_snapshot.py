"""Snapshots: the same index after it as before it, and no file that breaks a start."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from pathlib import Path
from typing import cast

import pytest
from xxhash import xxh3_128

from kvroute.clock import monotonic
from kvroute.conductor.block_index import CPU, DISK, GPU
from kvroute.conductor.core import Engine, Service
from kvroute.conductor.events import EventFeed, EventSource, Watermark
from kvroute.conductor.index import Holder, PrefixIndex
from kvroute.conductor.keys import VERSION as KEY_VERSION
from kvroute.conductor.keys import Namespace, token_keys
from kvroute.conductor.snapshot import Snapshot, save
from kvroute.conductor.snapshot_format import (
    MAGIC,
    PREAMBLE,
    Blocks,
    End,
    Head,
    Rank,
    Record,
    Run,
    Section,
    SnapshotRefused,
    framed,
)
from tests.conductor.still_feed import StillFeed, packed, store

MODEL = Namespace(model="m")


def engine(number: int = 1, ranks: int = 1, replay: str | None = "tcp://a:9") -> Engine:
    sources = tuple(EventSource(f"tcp://a:{number + rank}", replay, rank) for rank in range(ranks))
    return Engine(f"http://a:{number}", MODEL, sources, 16)


SERVICE = Service("tcp://b:1", "p1", "m", 32, replay_endpoint="tcp://b:2", dp_rank=3)


def fresh(max_bytes: int = 2**24) -> tuple[PrefixIndex, StillFeed, EventFeed]:
    index = PrefixIndex(max_bytes, monotonic)
    feed = StillFeed(index)
    return index, feed, cast(EventFeed, feed)


def follow(feed: StillFeed, worker: Engine | Service, worker_id: str) -> None:
    sources = [worker.source] if isinstance(worker, Service) else worker.sources
    tokens = worker.block_size if isinstance(worker, Service) else worker.block_tokens
    feed.follow(worker_id, sources, MODEL, block_tokens=tokens)


def content(index: PrefixIndex, holder: Holder) -> Counter[tuple[int | None, ...]]:
    return Counter(index.blocks.export(index.slot(holder)))


def scatter(index: PrefixIndex, holders: list[Holder], dice: random.Random, prompts: int = 40) -> None:
    """Store shared and own prompts, in all tiers, some twice, some partly removed."""
    stem = [dice.randrange(1000) for _ in range(400)]
    for _ in range(prompts):
        holder = dice.choice(holders)
        ids = stem[: dice.randrange(16, 400)] + [dice.randrange(1000) for _ in range(dice.randrange(200))]
        tier = dice.choice([GPU, GPU, CPU, DISK])
        hashes = store(index, holder, tier, ids, hash_seed=dice.choice([1, 2]))
        if dice.random() < 0.3:
            removed = dice.sample(hashes, dice.randrange(len(hashes)))
            index.blocks.remove(index.slot(holder), tier, packed(removed))


@pytest.mark.parametrize("seed", range(5))
async def test_the_same_index_after_it_as_before_it(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    index, still, feed = fresh()
    workers: dict[Engine | Service, str] = {engine(1, 2): "w1", engine(5): "w2", SERVICE: "w3"}
    for worker, worker_id in workers.items():
        follow(still, worker, worker_id)
    holders = [holder for worker_id in workers.values() for holder in index.holders_of(worker_id)]
    scatter(index, holders, dice)
    saved = await save(tmp_path / "s", index, feed, workers.items())
    assert (saved.workers, saved.skipped) == (3, {})
    assert saved.bytes == (tmp_path / "s").stat().st_size
    assert saved.blocks == sum(sum(content(index, holder).values()) for holder in holders)
    assert not still.paused

    other, _, _ = fresh()
    snapshot = await Snapshot.open(tmp_path / "s")
    assert list(snapshot.sections) == list(workers)
    marks = await asyncio.gather(
        *(snapshot.load(worker, other, f"new-{worker_id}") for worker, worker_id in workers.items())
    )
    snapshot.close()
    assert marks == [still.watermarks(worker_id) for worker_id in workers.values()]
    other.check_integrity()
    for holder in holders:
        twin = Holder(f"new-{holder.worker_id}", holder.dp_rank)
        assert content(other, twin) == content(index, holder), f"seed {seed}"
        assert other.block_tokens(twin) == index.block_tokens(holder)


async def test_what_was_stored_twice_and_is_removed_once_is_still_there(tmp_path: Path) -> None:
    index, still, feed = fresh()
    follow(still, engine(), "w")
    holder = Holder("w")
    hashes = store(index, holder, GPU, range(48))
    store(index, holder, GPU, range(32))
    await save(tmp_path / "s", index, feed, [(engine(), "w")])
    other, _, _ = fresh()
    snapshot = await Snapshot.open(tmp_path / "s")
    await snapshot.load(engine(), other, "w")
    slot = other.slot(holder)
    assert other.blocks.remove(slot, GPU, packed(hashes)) == 3
    assert other.blocks.held(slot) == (2, 0, 0, 0)
    assert other.blocks.remove(slot, GPU, packed(hashes)) == 2
    assert other.blocks.held(slot) == (0, 0, 0, 0)


async def test_workers_that_cannot_be_continued_are_left_out(tmp_path: Path) -> None:
    index, still, feed = fresh()
    workers: dict[Engine | Service, str] = {
        engine(1, replay=None): "no-replay",
        Engine("http://a:2", MODEL): "no-events",
        engine(3): "unknown",
        engine(4): "nothing-yet",
        engine(5): "good",
    }
    for worker, worker_id in workers.items():
        if worker_id in ("no-replay", "nothing-yet", "good"):
            follow(still, worker, worker_id)
    still.marks["nothing-yet"] = {0: Watermark()}
    saved = await save(tmp_path / "s", index, feed, workers.items())
    assert (saved.workers, saved.skipped) == (1, {"no_replay": 2, "nothing": 2})
    assert list((await Snapshot.open(tmp_path / "s")).sections) == [engine(5)]


async def test_a_worker_whose_events_did_not_wait_is_left_out(tmp_path: Path) -> None:
    class Restless(StillFeed):
        def watermarks(self, worker_id: str) -> dict[int, Watermark]:
            self.marks[worker_id] = {0: Watermark(self.marks[worker_id][0].seq + 1, 77)}
            return super().watermarks(worker_id)

    index = PrefixIndex(2**24, monotonic)
    feed = Restless(index)
    follow(feed, engine(), "w")
    saved = await save(tmp_path / "s", index, cast(EventFeed, feed), [(engine(), "w")])
    assert (saved.workers, saved.skipped) == (0, {"torn": 1})
    assert not feed.paused


async def test_events_wait_while_a_worker_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvroute.conductor.snapshot.SLICE_S", 0.0)
    index, still, feed = fresh()
    for number, name in ((1, "a"), (2, "b")):
        follow(still, engine(number), name)
        store(index, Holder(name), GPU, range(number, 16 * 2000))
    seen: list[frozenset[str]] = []

    async def watch() -> None:
        while True:
            seen.append(frozenset(still.paused))
            await asyncio.sleep(0)

    watcher = asyncio.create_task(watch())
    await save(tmp_path / "s", index, feed, [(engine(1), "a"), (engine(2), "b")])
    watcher.cancel()
    # The loop had turns while each was read, and only one waited at a time.
    assert seen.count(frozenset("a")) >= 4
    assert seen.count(frozenset("b")) >= 4
    assert frozenset("ab") not in seen


async def test_the_old_file_stays_when_a_new_one_cannot_be_written(tmp_path: Path) -> None:
    class Broken(StillFeed):
        def pause(self, worker_id: str) -> None:
            raise OSError(28, "No space left on device")

    index, still, feed = fresh()
    follow(still, engine(), "w")
    await save(tmp_path / "s", index, feed, [(engine(), "w")])
    before = (tmp_path / "s").read_bytes()
    with pytest.raises(OSError, match="No space left"):
        await save(tmp_path / "s", index, cast(EventFeed, Broken(index)), [(engine(), "w")])
    assert (tmp_path / "s").read_bytes() == before
    assert os.listdir(tmp_path) == ["s"]
    with pytest.raises(OSError, match="No such file"):
        await save(tmp_path / "nowhere" / "s", index, feed, [(engine(), "w")])


@pytest.mark.parametrize("call", ["fsync", "replace"])
async def test_a_file_that_is_not_whole_on_the_disk_never_has_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    index, still, feed = fresh()
    follow(still, engine(), "w")
    await save(tmp_path / "s", index, feed, [(engine(), "w")])
    before = (tmp_path / "s").read_bytes()
    store(index, Holder("w"), GPU, range(320))
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="Input/output error"):
        await save(tmp_path / "s", index, feed, [(engine(), "w")])
    assert (tmp_path / "s").read_bytes() == before
    assert os.listdir(tmp_path) == ["s"]


async def test_whoever_reads_the_old_file_meanwhile_reads_it_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvroute.conductor.snapshot.WRITE_BYTES", 1)
    index, still, feed = fresh()
    follow(still, engine(), "w")
    path = tmp_path / "s"
    await save(path, index, feed, [(engine(), "w")])
    before = path.read_bytes()
    store(index, Holder("w"), GPU, range(16 * 2000))
    with path.open("rb") as reader:
        saving = asyncio.create_task(save(path, index, feed, [(engine(), "w")]))
        seen = set()
        while not saving.done():
            seen.add(path.read_bytes())
            await asyncio.sleep(0)
        await saving
        assert seen <= {before, path.read_bytes()}
        assert before in seen
        assert reader.read() == before, "it was replaced, not written over"
    assert os.listdir(tmp_path) == ["s"]


async def some_file(path: Path) -> None:
    index, still, feed = fresh()
    follow(still, engine(1, 2), "w")
    scatter(index, index.holders_of("w"), random.Random(1), prompts=6)
    await save(path, index, feed, [(engine(1, 2), "w")])


async def reason_of(path: Path) -> str:
    with pytest.raises(SnapshotRefused) as refused:
        await Snapshot.open(path)
    assert str(path) in str(refused.value)
    return refused.value.reason


async def test_any_changed_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    await some_file(path)
    good = path.read_bytes()
    dice = random.Random(7)
    for at in {*range(80), *dice.sample(range(len(good)), 80), *range(len(good) - 25, len(good))}:
        bad = bytearray(good)
        bad[at] ^= 1 << dice.randrange(8)
        path.write_bytes(bad)
        assert await reason_of(path) in {"foreign", "version", "corrupt", "malformed"}, f"byte {at}, seed 7"


async def test_a_file_that_is_cut_or_longer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s"
    await some_file(path)
    good = path.read_bytes()
    for length in {*range(60), *random.Random(7).sample(range(len(good)), 60), len(good) - 1}:
        path.write_bytes(good[:length])
        assert await reason_of(path) in {"foreign", "version", "corrupt"}
    path.write_bytes(good + b"x")
    assert await reason_of(path) == "corrupt"


async def test_files_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "s"
    assert await reason_of(path) == "missing"
    path.mkdir()
    assert await reason_of(path) == "unreadable"
    path.rmdir()
    for content, reason in (
        (b"", "foreign"),
        (b"\x00" * 1000, "foreign"),
        (MAGIC + b"\x00\x02" + b"x" * 100, "version"),
        (PREAMBLE, "corrupt"),
        (PREAMBLE + b"\xff\xff\xff\xff", "corrupt"),
        (whole([]), "malformed"),
        (whole([Head(0.0, b"kvroute/routing-key/0")]), "version"),
        (whole([End(b"")]), "malformed"),
    ):
        path.write_bytes(content)
        assert await reason_of(path) == reason


def whole(records: list[Record]) -> bytes:
    """A file of these records whose checksum is right."""
    data = PREAMBLE + b"".join(map(framed, records))
    return data + framed(End(xxh3_128(data).digest()))


CHAIN = packed(list(token_keys(range(64), MODEL.root("ids"), 16).keys))
GOOD = Run(GPU, None, 1, CHAIN, CHAIN)
HOSTILE = [
    Blocks(0, [GOOD, Run(GPU, None, 1, CHAIN[:-8], CHAIN)]),
    Blocks(0, [GOOD, Run(GPU, None, 1, CHAIN[:-3], CHAIN[:-3])]),
    Blocks(0, [GOOD, Run(3, None, 1, CHAIN, CHAIN)]),
    Blocks(0, [GOOD, Run(-1, None, 1, CHAIN, CHAIN)]),
    Blocks(0, [GOOD, Run(2**40, None, 1, CHAIN, CHAIN)]),
    Blocks(0, [GOOD, Run(GPU, -5, 1, CHAIN, CHAIN)]),
    Blocks(0, [GOOD, Run(GPU, None, 0, CHAIN, CHAIN)]),
    Blocks(0, [GOOD, Run(GPU, None, 2**40, CHAIN, CHAIN)]),
    Blocks(5, [GOOD]),
]


@pytest.mark.parametrize("blocks", HOSTILE)
async def test_a_section_that_cannot_be_leaves_nothing(tmp_path: Path, blocks: Blocks) -> None:
    head = Head(0.0, KEY_VERSION)
    bad = Section(engine(1), (Rank(0, 16, Watermark(5, 5)),))
    good = Section(engine(2), (Rank(0, 16, Watermark(6, 6)),))
    (tmp_path / "s").write_bytes(whole([head, bad, Blocks(0, [GOOD]), blocks, good, Blocks(0, [GOOD])]))
    index, _, _ = fresh()
    snapshot = await Snapshot.open(tmp_path / "s")
    with pytest.raises(SnapshotRefused) as refused:
        await snapshot.load(engine(1), index, "bad")
    assert refused.value.reason == "malformed"
    assert index.held_blocks("bad") == 0
    assert await snapshot.load(engine(2), index, "good") == {0: Watermark(6, 6)}
    assert index.held_blocks("good") == 4
    index.check_integrity()


async def test_a_rank_with_impossible_blocks_is_refused(tmp_path: Path) -> None:
    section = Section(engine(1), (Rank(0, 0, Watermark(5, 5)),))
    (tmp_path / "s").write_bytes(whole([Head(0.0, KEY_VERSION), section, Blocks(0, [GOOD])]))
    index, _, _ = fresh()
    with pytest.raises(SnapshotRefused, match="block_tokens must be at least 1"):
        await (await Snapshot.open(tmp_path / "s")).load(engine(1), index, "bad")


async def test_a_worker_removed_while_it_is_loaded_stays_removed(tmp_path: Path) -> None:
    await some_file(tmp_path / "s")
    index, _, _ = fresh()
    index.remove_worker("w")
    with pytest.raises(SnapshotRefused):
        await (await Snapshot.open(tmp_path / "s")).load(engine(1, 2), index, "w")
    assert index.entries == 0


async def test_an_index_too_small_for_it_keeps_its_bound(tmp_path: Path) -> None:
    index, still, feed = fresh(2**26)
    follow(still, engine(), "w")
    dice = random.Random(3)
    for _ in range(100):
        store(index, Holder("w"), GPU, [dice.randrange(9999) for _ in range(16 * 400)])
    await save(tmp_path / "s", index, feed, [(engine(), "w")])
    small, _, _ = fresh(2**20)
    await (await Snapshot.open(tmp_path / "s")).load(engine(), small, "w")
    assert small.evicted_confirmed > 0
    assert small.bytes_used <= small.max_bytes
    small.check_integrity()
