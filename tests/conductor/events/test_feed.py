"""The feed over real ZMQ: a scripted publisher, and the mock engine's."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvloop
import zmq
import zmq.asyncio

from kvroute.conductor.events import (
    EventFeed,
    EventSource,
    FeedLimits,
    HolderHealth,
    Watermark,
)
from kvroute.conductor.index import Holder, PrefixIndex
from kvroute.conductor.keys import Namespace, token_keys
from kvroute.loadtests.mock_engine import MockFleet, MockOptions
from kvroute.types import Trust
from tests.conductor.events.wire import CLEARED, frames, stored
from tests.kit import until

MODEL = Namespace(model="m")
END = [b"", b"", b"\xff" * 8, b""]
QUICK = FeedLimits(verify_s=0.1, replay_timeout_s=0.1, retry_s=0.03)


class Publisher:
    """A PUB and a ROUTER that do what the test says; batch n stores block n of one chain."""

    def __init__(self) -> None:
        self.context = zmq.asyncio.Context()
        self.pub = self.context.socket(zmq.PUB)
        self.router = self.context.socket(zmq.ROUTER)
        self.ports = [one.bind_to_random_port("tcp://127.0.0.1") for one in (self.pub, self.router)]
        self.buffer: list[list[bytes]] = []
        self.asked: list[int] = []
        self.silent = False
        self._task = asyncio.get_running_loop().create_task(self._serve())

    @property
    def source(self) -> EventSource:
        return EventSource(*(f"tcp://127.0.0.1:{port}" for port in self.ports))

    def add(self, *events: Any, send: bool = True) -> None:
        """Publish a batch of these events, or of the next block."""
        seq = len(self.buffer)
        message = frames(seq, *(events or (block(seq),)), ts_s=time.time())
        self.buffer.append(message)
        if send:
            self.send(message)

    def send(self, message: list[bytes]) -> None:
        self.pub.send_multipart(message)

    async def _serve(self) -> None:
        while True:
            client, _, first = await self.router.recv_multipart()
            self.asked.append(int.from_bytes(first, "big"))
            if not self.silent:
                for message in self.buffer:
                    if message[1] >= first:
                        await self.router.send_multipart([client, b"", *message])
                await self.router.send_multipart([client, *END])

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        self.context.destroy(linger=0)


def block(number: int) -> dict[str, Any]:
    ids = range(number * 4, number * 4 + 4)
    return stored([number + 1], ids, number or None)


class Bench:
    def __init__(self, limits: FeedLimits = QUICK) -> None:
        self.index = PrefixIndex(2**24, time.monotonic)
        self.seen: list[tuple[str, Trust]] = []
        self.feed = EventFeed(
            self.index, limits=limits, on_trust=lambda worker, trust, _: self.seen.append((worker, trust))
        )

    def tokens(self, worker: str = "w", rank: int = 0) -> int:
        """GPU tokens that the index knows of the chain."""
        keys = {4: token_keys(range(400), MODEL.root("ids"), 4)}
        rows = {row.holder: row.gpu_tokens for row in self.index.lookup(keys)}
        return rows.get(Holder(worker, rank), 0)

    def health(self) -> HolderHealth:
        health = self.feed.health("w")
        assert health is not None
        return health.holders[0]

    async def reaches(self, blocks: int) -> None:
        await until(lambda: self.tokens() == blocks * 4)


@pytest.fixture
async def publisher() -> AsyncIterator[Publisher]:
    publisher = Publisher()
    yield publisher
    await publisher.close()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    await bench.feed.close()
    assert len(asyncio.all_tasks()) <= 3  # the test, the publisher, pytest's own


async def test_a_fresh_subscriber_knows_what_is_resident_before_anything_new_happens(
    bench: Bench, publisher: Publisher
) -> None:
    for _ in range(5):
        publisher.add()
    bench.feed.follow("w", [publisher.source], MODEL, min_block_tokens=4)
    assert bench.feed.trust("w") is Trust.APPROXIMATE
    await asyncio.wait_for(bench.feed.settled("w"), 5)
    assert bench.tokens() == 20
    assert bench.feed.trust("w") is Trust.EXACT
    assert bench.seen == [("w", Trust.EXACT)]
    assert publisher.asked[0] == 0
    publisher.add()
    await bench.reaches(6)
    assert bench.health().last_seq == 5
    assert bench.health().lag_s is not None


async def test_a_gap_is_asked_for_from_the_last_batch_on(bench: Bench, publisher: Publisher) -> None:
    publisher.add()
    bench.feed.follow("w", [publisher.source], MODEL, min_block_tokens=4)
    await bench.reaches(1)
    await until(lambda: bench.health().counters["replays"] >= 2)  # the check after the handshake
    publisher.add()
    await bench.reaches(2)
    publisher.asked.clear()
    publisher.add(send=False)
    publisher.add()
    await bench.reaches(4)
    assert 1 in publisher.asked
    assert bench.health().counters["gaps"] == 1
    assert bench.feed.trust("w") is Trust.EXACT


async def test_an_event_missed_at_the_end_is_found_though_nothing_follows(
    bench: Bench, publisher: Publisher
) -> None:
    publisher.add()
    bench.feed.follow("w", [publisher.source], MODEL, min_block_tokens=4)
    await bench.reaches(1)
    publisher.add(send=False)
    await bench.reaches(2)
    assert bench.health().counters["gaps"] == 0


async def test_garbage_is_counted_and_what_it_was_is_asked_for(bench: Bench, publisher: Publisher) -> None:
    bench.feed.follow("w", [publisher.source], MODEL, min_block_tokens=4)
    await asyncio.wait_for(bench.feed.settled("w"), 5)
    publisher.add(send=False)
    for junk in ([b"only a topic"], [b"t", b"\0" * 8, b"\xc1\xc1"], [b"", b"1", b""], [b"a"] * 7):
        publisher.send(junk)
    await bench.reaches(1)
    await until(lambda: bench.health().counters["undecodable"] == 4)
    publisher.add()
    await bench.reaches(2)


async def test_a_publisher_that_answers_nothing_leaves_an_approximate_index(
    bench: Bench, publisher: Publisher
) -> None:
    publisher.silent = True
    for _ in range(5):
        publisher.add(send=False)
    bench.feed.follow("w", [publisher.source], MODEL, min_block_tokens=4)
    await until(lambda: len(publisher.asked) == 1)
    publisher.add(CLEARED, block(0))
    publisher.add(block(1))
    await until(lambda: bench.health().last_seq == 6)
    assert bench.health().counters["replay_failures"] == 3
    assert bench.tokens() == 8
    publisher.silent = False
    await until(lambda: bench.feed.trust("w") is Trust.EXACT)  # it was cleared within what was seen


async def test_without_a_replay_endpoint_what_is_missed_is_forgotten(
    bench: Bench, publisher: Publisher
) -> None:
    source = EventSource(publisher.source.endpoint)
    bench.feed.follow("w", [source], MODEL, min_block_tokens=4)
    await until(lambda: bench.health().reasons == ("incomplete",))
    publisher.add(CLEARED, block(0))
    await bench.reaches(1)
    assert bench.feed.trust("w") is Trust.EXACT
    publisher.add(send=False)
    publisher.add(block(0))
    await until(lambda: bench.health().last_seq == 2)
    assert (bench.tokens(), bench.health().reasons) == (4, ("incomplete",))


async def test_an_engine_that_connects_to_us(bench: Bench) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        endpoint = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    bench.feed.follow("w", [EventSource(endpoint, bind=True)], MODEL, min_block_tokens=4)
    with zmq.asyncio.Context() as context, context.socket(zmq.PUB) as pub:
        pub.linger = 0
        pub.connect(endpoint)
        await until(lambda: bench.health().reasons == ("incomplete",))
        await pub.send_multipart(frames(0, block(0)))
        await bench.reaches(1)
    await until(lambda: "disconnected" in bench.health().reasons)


async def test_ranks_are_holders_of_their_own(bench: Bench, publisher: Publisher) -> None:
    other = Publisher()
    second = EventSource(other.source.endpoint, other.source.replay_endpoint, dp_rank=9)
    publisher.add()
    for _ in range(3):
        other.add()
    bench.feed.follow("w", [publisher.source, second], MODEL, min_block_tokens=4)
    await asyncio.wait_for(bench.feed.settled("w"), 5)
    assert (bench.tokens(rank=0), bench.tokens(rank=9)) == (4, 12)
    await other.close()
    await until(lambda: bench.feed.trust("w") is Trust.APPROXIMATE)
    health = bench.feed.health("w")
    assert health is not None
    assert [holder.trust for holder in health.holders] == [Trust.EXACT, Trust.APPROXIMATE]


async def test_a_restored_holder_is_load_only_until_its_last_batch_is_confirmed(publisher: Publisher) -> None:
    for _ in range(3):
        publisher.add()
    first = Bench()
    first.feed.follow("w", [publisher.source], MODEL, min_block_tokens=4)
    await first.reaches(3)
    marks = first.feed.watermarks("w")
    rows = list(first.index.blocks.export(first.index.slot(Holder("w"))))
    await first.feed.close()
    publisher.add()
    for changed in (False, True):
        second = Bench()
        second.index.add_holder(Holder("w"), 4)
        slot = second.index.slot(Holder("w"))
        for tier, parent, name, key, _ in rows:
            packed = [value.to_bytes(8, "little") for value in (name, key)]
            second.index.blocks.store(slot, tier, parent, *packed)
        if changed:  # the engine restarted meanwhile, and has as many batches again
            publisher.buffer[:] = [frames(seq, block(0), ts_s=9.0) for seq in range(4)]
        publisher.silent = True
        second.feed.follow("w", [publisher.source], MODEL, min_block_tokens=4, restored=marks)
        assert second.tokens() == 12
        assert second.feed.trust("w") is Trust.LOAD_ONLY
        publisher.silent = False
        await until(lambda second=second: second.feed.trust("w") is Trust.EXACT)  # type: ignore[misc]
        assert second.tokens() == (4 if changed else 16)
        await second.feed.close()


async def test_what_is_not_restored_does_not_stay(bench: Bench, publisher: Publisher) -> None:
    bench.index.add_holder(Holder("w"), 4)
    bench.index.blocks.store(bench.index.slot(Holder("w")), 0, None, bytes(8), b"\1" * 8)
    bench.feed.follow("w", [publisher.source], MODEL, restored={0: Watermark(-1)})
    assert bench.index.blocks.entries == 0


async def test_a_paused_worker_stands_still_and_catches_up(bench: Bench, publisher: Publisher) -> None:
    publisher.add()
    bench.feed.follow("w", [publisher.source], MODEL, min_block_tokens=4)
    await bench.reaches(1)
    bench.feed.pause("w")
    before = bench.feed.watermarks("w")
    for _ in range(20):
        publisher.add()
    await until(lambda: "replaying" in bench.health().reasons)
    assert (bench.tokens(), bench.feed.watermarks("w")) == (4, before)
    bench.feed.resume("w")
    await bench.reaches(21)


async def test_answers_that_belie_the_index_lower_trust(bench: Bench, publisher: Publisher) -> None:
    publisher.add()
    bench.feed.follow("w", [publisher.source], MODEL, min_block_tokens=4)
    await asyncio.wait_for(bench.feed.settled("w"), 5)
    for _ in range(20):
        bench.feed.observe("w", 400, 0, 1000)
    assert bench.feed.trust("w") is Trust.LOAD_ONLY
    health = bench.feed.health("w")
    assert health is not None
    assert (health.reasons, health.overpredicted) == (("overpredicted",), 20)
    for _ in range(64):
        bench.feed.observe("w", 400, 400, 1000)
    assert bench.feed.trust("w") is Trust.EXACT


async def test_a_worker_is_followed_once_and_gone_without_a_trace(bench: Bench, publisher: Publisher) -> None:
    for _ in range(50):
        publisher.add()
    with pytest.raises(ValueError, match="one per rank"):
        bench.feed.follow("w", [publisher.source, publisher.source], MODEL)
    for wild in (EventSource("tcp://*:5557"), EventSource("tcp://*:1", "tcp://[::]:2", bind=True)):
        with pytest.raises(ValueError, match="names no host"):
            bench.feed.follow("w", [wild], MODEL)
    with pytest.raises(ValueError, match="at least one"):
        bench.feed.follow("w", [], MODEL)
    bench.feed.follow("w", [publisher.source], MODEL, min_block_tokens=4)
    with pytest.raises(ValueError, match="followed already"):
        bench.feed.follow("w", [publisher.source], MODEL)
    await bench.reaches(50)
    bench.feed.unfollow("w")
    bench.feed.unfollow("w")
    assert bench.tokens() == 0
    assert bench.feed.health("w") is None
    assert bench.feed.followed == ()
    await until(lambda: bench.index.blocks.blocks == 0)
    assert bench.feed.trust("w") is Trust.APPROXIMATE
    with pytest.raises(KeyError):
        await bench.feed.settled("w")


async def test_the_loop_gets_its_turn_while_much_is_applied(publisher: Publisher) -> None:
    bench = Bench(FeedLimits(slice_s=0.001))
    for number in range(400):
        names = [number * 100 + i for i in range(1, 65)]
        publisher.add(stored(names, range(number, number + 256)))
    bench.feed.follow("w", [publisher.source], MODEL, min_block_tokens=4)
    turns = 0
    while bench.health().last_seq < 399:
        await asyncio.sleep(0)
        turns += 1
    assert bench.health().counters["slow_slices"] > 5
    assert turns > 10
    await bench.feed.close()


def test_on_uvloop_through_a_restart_of_the_engine() -> None:
    async def run() -> None:
        bench = Bench()
        options = MockOptions(speed=math.inf, kv_events=True)
        async with MockFleet(options) as fleet:
            engine = fleet.engines[0]
            assert engine.events is not None
            source = EventSource(
                engine.events.source()["endpoint"], engine.events.source()["replay_endpoint"]
            )
            bench.feed.follow("w", [source], MODEL)
            await asyncio.wait_for(bench.feed.settled("w"), 5)
            await engine.restart()
            await until(lambda: bench.health().counters["connections"] == 2)
            await asyncio.wait_for(bench.feed.settled("w"), 5)
            assert bench.feed.trust("w") is Trust.EXACT
        await bench.feed.close()
        assert len(asyncio.all_tasks()) == 1

    uvloop.run(run())
