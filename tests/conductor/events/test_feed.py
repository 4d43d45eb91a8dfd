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
from structlog.testing import capture_logs

from kvroute.conductor.events import (
    EventFeed,
    EventSource,
    FeedLimits,
    HolderHealth,
    Watermark,
    subscriber,
)
from kvroute.conductor.events.apply import Applier
from kvroute.conductor.events.batches import Batch
from kvroute.conductor.events.trust import LEAST, WINDOW
from kvroute.conductor.index import Holder, PrefixIndex
from kvroute.conductor.keys import Namespace, token_keys
from kvroute.loadtests.mock_engine import MockFleet, MockOptions
from kvroute.types import Trust
from tests.conductor.events.wire import CLEARED, frames, stored
from tests.kit import HANG_S, until

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
                answers = [[b"", *message] for message in self.buffer if message[1] >= first]
                at_once: zmq.Socket[bytes] = zmq.Socket.shadow(self.router.underlying)
                for answer in (*answers, END):
                    at_once.send_multipart([client, *answer])

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
    await asyncio.wait_for(bench.feed.settled("w"), HANG_S)
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
    await asyncio.wait_for(bench.feed.settled("w"), HANG_S)
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
    await asyncio.wait_for(bench.feed.settled("w"), HANG_S)
    assert (bench.tokens(rank=0), bench.tokens(rank=9)) == (4, 12)
    await other.close()
    await until(lambda: bench.feed.trust("w") is Trust.APPROXIMATE)
    health = bench.feed.health("w")
    assert health is not None
    assert [holder.trust for holder in health.holders] == [Trust.EXACT, Trust.APPROXIMATE]


async def test_an_index_with_a_flaw_is_nothing_to_go_on_from(bench: Bench, publisher: Publisher) -> None:
    publisher.add()
    bench.feed.follow("w", [publisher.source], MODEL, min_block_tokens=4)
    await until(lambda: bench.feed.trust("w") is Trust.EXACT)
    assert bench.feed.watermarks("w")[0].seq == 0
    publisher.add({"type": "BlockRemoved", "block_hashes": "no list"})
    await until(lambda: bench.feed.trust("w") is Trust.APPROXIMATE)
    assert bench.feed.watermarks("w") == {0: Watermark()}


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
    await asyncio.wait_for(bench.feed.settled("w"), HANG_S)
    for _ in range(20):
        bench.feed.observe("w", 400, 0, 1000)
    assert bench.feed.trust("w") is Trust.LOAD_ONLY
    health = bench.feed.health("w")
    assert health is not None
    assert (health.reasons, health.overpredicted) == (("overpredicted",), 20)
    for _ in range(64):
        bench.feed.observe("w", 400, 400, 1000)
    assert bench.feed.trust("w") is Trust.EXACT


async def test_earlier_answers_say_nothing_of_an_engine_that_restarted(
    bench: Bench, publisher: Publisher
) -> None:
    publisher.add()
    bench.feed.follow("w", [publisher.source], MODEL, min_block_tokens=4)
    await asyncio.wait_for(bench.feed.settled("w"), HANG_S)
    for _ in range(20):
        bench.feed.observe("w", 400, 0, 1000)
    assert bench.feed.trust("w") is Trust.LOAD_ONLY
    publisher.buffer.clear()
    publisher.add(stored([70], range(4)))
    await until(lambda: bench.health().counters["restarts"] == 1)
    await until(lambda: bench.feed.trust("w") is Trust.EXACT)


async def test_what_was_missed_once_no_longer_matters_when_all_answers_agree(
    bench: Bench, publisher: Publisher
) -> None:
    bench.feed.follow("w", [EventSource(publisher.source.endpoint)], MODEL, min_block_tokens=4)
    await until(lambda: bench.health().reasons == ("incomplete",))
    publisher.add()
    await bench.reaches(1)
    for number in range(WINDOW):
        assert bench.feed.trust("w") is Trust.APPROXIMATE, number
        bench.feed.observe("w", 400, 400, 1000)
    assert bench.feed.trust("w") is Trust.EXACT
    bench.feed.observe("w", 400, 800, 1000)
    assert bench.feed.trust("w") is Trust.APPROXIMATE


@pytest.mark.parametrize("told", ["salt", "adapter", "token ids"])
async def test_a_worker_whose_events_are_of_another_namespace_is_not_believed_for_long(
    bench: Bench, publisher: Publisher, told: str
) -> None:
    """Its blocks are confirmed, and no request ever has their keys: only its answers can tell."""
    first = {
        "salt": stored([1, 2], range(8), extra_keys=[["not of the requests"], None]),
        "adapter": stored([1, 2], range(8), lora_id=1, lora_name="x", extra_keys=[["x"], ["x"]]),
        "token ids": stored([1, 2], range(1000, 1008)),
    }[told]
    publisher.add(first)
    bench.feed.follow("w", [publisher.source], MODEL, min_block_tokens=4)
    await asyncio.wait_for(bench.feed.settled("w"), HANG_S)
    await until(lambda: bench.feed.trust("w") is Trust.EXACT)
    assert bench.health().held_blocks == 2
    keys = {4: token_keys(range(400), MODEL.root("ids"), 4)}
    for _ in range(LEAST):
        (match,) = bench.index.match(keys, ["w"])
        bench.feed.observe("w", match.tokens, 8, 400)
    health = bench.feed.health("w")
    assert health is not None
    assert (health.trust, health.reasons) == (Trust.APPROXIMATE, ("underpredicted",))
    assert (health.observed, health.underpredicted) == (LEAST, LEAST)


async def test_a_batch_that_cannot_be_applied_lowers_trust_and_the_next_is(
    bench: Bench, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Applier.apply

    def apply(self: Applier, batch: Batch, now_s: float) -> None:
        if batch.seq == 1:
            raise RuntimeError("no such case")
        real(self, batch, now_s)

    monkeypatch.setattr(Applier, "apply", apply)
    publisher.add()
    bench.feed.follow("w", [publisher.source], MODEL, min_block_tokens=4)
    await bench.reaches(1)
    await until(lambda: bench.feed.trust("w") is Trust.EXACT)
    with capture_logs() as logs:
        publisher.add(CLEARED)
        await until(lambda: bench.health().last_seq == 1)
    (line,) = [one for one in logs if one["event"] == "event batch not applied"]
    assert (line["worker"], line["dp_rank"], line["seq"]) == ("w", 0, 1)
    assert line["endpoint"] == publisher.source.endpoint
    publisher.add(stored([2], range(4, 8), 1))
    await bench.reaches(2)
    assert bench.health().reasons == ("bad_events",)
    assert bench.health().counters["failed_batches"] == 1


@pytest.mark.parametrize(("ts_s", "lag_s"), [(1000.0, 5.0), (1010.0, 0.0), (0.0, None)])
async def test_lag_by_the_clock_of_the_engine(publisher: Publisher, ts_s: float, lag_s: float | None) -> None:
    """Its clock may be ahead of ours, and it may have none."""
    bench = Bench()
    bench.feed = EventFeed(bench.index, limits=QUICK, wall_s=lambda: 1005.0)
    publisher.buffer = [frames(0, block(0), ts_s=999.0), frames(1, block(1), ts_s=ts_s)]
    bench.feed.follow("w", [publisher.source], MODEL, min_block_tokens=4)
    await bench.reaches(2)
    assert bench.health().lag_s == lag_s
    await bench.feed.close()


async def test_what_fell_between_the_connection_and_the_subscription_is_asked_for_soon(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriber, "_HANDSHAKE_S", 0.05)
    bench = Bench(FeedLimits(verify_s=60.0))
    publisher.add()
    bench.feed.follow("w", [publisher.source], MODEL, min_block_tokens=4)
    await asyncio.wait_for(bench.feed.settled("w"), HANG_S)
    publisher.add(send=False)
    await bench.reaches(2)
    assert bench.health().counters["gaps"] == 0
    await bench.feed.close()


async def test_answers_to_a_replay_that_another_has_replaced_are_ignored(
    bench: Bench, publisher: Publisher
) -> None:
    for _ in range(5):
        publisher.add()
    bench.feed.follow("w", [publisher.source], MODEL, min_block_tokens=4)
    await bench.reaches(5)
    # Another process has the same sockets. It is known by the first answer to the next check, and the
    # others are of a replay that began too late.
    publisher.buffer[:] = [frames(seq, block(seq), ts_s=9.0) for seq in range(60)]
    await bench.reaches(60)
    counters = bench.health().counters
    assert (counters["restarts"], counters["missing"], counters["replay_failures"]) == (1, 0, 0)
    assert bench.feed.trust("w") is Trust.EXACT
    (following,) = bench.feed._subscribers("w")
    await until(lambda: len(following._tasks) == 2)  # nobody waits for the first replay's end


@pytest.mark.parametrize("queue", ["stream", "actions"])
async def test_batches_still_queued_of_a_worker_that_left_add_nothing(
    bench: Bench, publisher: Publisher, queue: str
) -> None:
    publisher.silent = True
    bench.feed.follow("w", [publisher.source], MODEL, block_tokens=4, min_block_tokens=4)
    await until(lambda: bool(publisher.asked))
    for _ in range(100):
        publisher.add()
    await until(lambda: bench.health().waiting == 100)
    bench.feed.pause("w")
    (following,) = bench.feed._subscribers("w")
    if queue == "actions":  # the replay has nothing: what waited is to be applied now
        following._todo.extend(following.stream.replay_ended())
        following._spawn(following._catch_up())
        assert (following.stream.waiting, bench.health().waiting) == (0, 100)
    bench.feed.unfollow("w")
    following.resume()
    publisher.silent = False
    publisher.add()
    await bench.feed.close()  # when every task of it has ended
    assert (bench.index.entries, bench.index.blocks.blocks) == (0, 0)
    assert bench.index.holders_of("w") == []
    bench.index.check_integrity()


async def test_a_worker_known_by_predictions_alone_is_unfollowed_as_well(bench: Bench) -> None:
    keys = token_keys(range(40_000), MODEL.root("ids"), 4)
    bench.index.predict("w", keys)
    assert bench.index.match({4: keys}, ["w"])[0].predicted_tokens == 40_000
    bench.feed.unfollow("w")
    assert bench.index.match({4: keys}, ["w"])[0].predicted_tokens == 0
    await until(lambda: bench.index.entries == 0)
    bench.index.predict("w", keys)
    assert bench.index.entries == 0


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
            await asyncio.wait_for(bench.feed.settled("w"), HANG_S)
            await engine.restart()
            await until(lambda: bench.health().counters["connections"] == 2)
            await asyncio.wait_for(bench.feed.settled("w"), HANG_S)
            assert bench.feed.trust("w") is Trust.EXACT
        await bench.feed.close()
        assert len(asyncio.all_tasks()) == 1

    uvloop.run(run())
