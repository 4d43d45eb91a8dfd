"""The mock engine's KV events, over real ZMQ, against captures of the real engine."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
import zmq
import zmq.asyncio

from kvroute.conductor.events.batches import Batch
from kvroute.conductor.events.decode import decode
from kvroute.loadtests.mock_engine import MockFleet, MockOptions
from kvroute.loadtests.mock_engine.faults import Faults
from tests.kit import HANG_S

STORED_FIELDS = [
    "type",
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
]
"""In the order of a batch captured from vLLM 0.32."""


@pytest.fixture
async def fleet() -> AsyncIterator[MockFleet]:
    options = MockOptions(speed=math.inf, kv_events=True, kv_blocks=12, adapters=("ad1",))
    async with MockFleet(options) as fleet:
        yield fleet


class Subscriber:
    """A SUB socket on engine 0, and a DEALER for its replays."""

    def __init__(self, source: dict[str, Any]) -> None:
        context = zmq.asyncio.Context.instance()
        self.topic = source["topic"]
        self.sub = context.socket(zmq.SUB)
        self.sub.subscribe(self.topic)
        self.sub.connect(source["endpoint"])
        self.context, self.replay_endpoint = context, source["replay_endpoint"]

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, *_: object) -> None:
        self.sub.close(linger=0)

    async def batch(self) -> tuple[int, list[dict[str, Any]]]:
        """The next batch: its seq and its events."""
        topic, seq, payload = await asyncio.wait_for(self.sub.recv_multipart(), HANG_S)
        assert topic.decode() == self.topic
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 0
        return int.from_bytes(seq, "big"), events

    async def replay(self, first: int) -> list[list[bytes]]:
        """Every answer to one request for what was missed, the end marker included."""
        # A socket of its own: one that was connected before a restart loses what is sent as it reconnects.
        with self.context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(self.replay_endpoint)
            await dealer.send_multipart([b"", first.to_bytes(8, "big")])
            answers = []
            while True:
                frames = await asyncio.wait_for(dealer.recv_multipart(), HANG_S)
                answers.append(frames)
                if frames[-2] == b"\xff" * 8:
                    return answers


async def subscribed(fleet: MockFleet) -> Subscriber:
    async with httpx.AsyncClient(base_url=fleet.urls[0], verify=False) as client:
        source = (await client.get("/kv_event_sources")).json()["0"]
    subscriber = Subscriber(source)
    # A subscription takes a moment to reach the publisher, as in life.
    await asyncio.sleep(0.1)
    return subscriber


async def complete(fleet: MockFleet, prompt: str, max_tokens: int = 1, **fields: Any) -> None:
    async with httpx.AsyncClient(base_url=fleet.urls[0], verify=False) as client:
        body = {"prompt": prompt, "max_tokens": max_tokens, **fields}
        assert (await client.post("/v1/completions", json=body)).status_code == 200


async def test_a_prompt_is_stored_in_one_event_of_the_real_shape(fleet: MockFleet) -> None:
    with await subscribed(fleet) as subscriber:
        await complete(fleet, "a" * 64 * 3)
        seq, events = await subscriber.batch()
    assert seq == 0
    (event,) = events
    assert list(event) == STORED_FIELDS
    assert event["type"] == "BlockStored"
    assert event["block_hashes"] == list(fleet.engines[0].scheduler.cache.keys())
    assert event["parent_block_hash"] is None
    assert (len(event["token_ids"]), event["block_size"]) == (48, 16)
    assert (event["medium"], event["group_idx"]) == ("GPU", 0)
    assert event["extra_keys"] == [None, None, None]
    assert event["kv_cache_spec_kind"] == "full_attention"


async def test_a_hit_says_nothing_and_a_longer_prompt_only_what_is_new(fleet: MockFleet) -> None:
    with await subscribed(fleet) as subscriber:
        await complete(fleet, "a" * 64 * 3 + "tail")
        await complete(fleet, "a" * 64 * 3 + "tail")
        await complete(fleet, "a" * 64 * 3 + "b" * 64 + "tail")
        _, (first,) = await subscriber.batch()
        seq, (second,) = await subscriber.batch()
    assert seq == 1
    assert len(second["block_hashes"]) == 1
    assert second["parent_block_hash"] == first["block_hashes"][-1]


async def test_blocks_filled_in_decode_come_one_by_one(fleet: MockFleet) -> None:
    with await subscribed(fleet) as subscriber:
        await complete(fleet, "a" * 64, max_tokens=40)
        batches = [await subscriber.batch() for _ in range(3)]
    assert [seq for seq, _ in batches] == [0, 1, 2]
    assert [len(events[0]["block_hashes"]) for _, events in batches] == [1, 1, 1]
    hashes = [events[0]["block_hashes"][0] for _, events in batches]
    assert [events[0]["parent_block_hash"] for _, events in batches] == [None, *hashes[:2]]


async def test_removals_precede_the_stores_that_needed_the_room(fleet: MockFleet) -> None:
    with await subscribed(fleet) as subscriber:
        await complete(fleet, "a" * 64 * 10)
        await complete(fleet, "b" * 64 * 4)
        _, (stored,) = await subscriber.batch()
        _, events = await subscriber.batch()
    assert [event["type"] for event in events] == ["BlockRemoved"] * 3 + ["BlockStored"]
    assert list(events[0]) == ["type", "block_hashes", "medium", "group_idx"]
    gone = [event["block_hashes"] for event in events[:-1]]
    assert gone == [[hash] for hash in stored["block_hashes"][:-4:-1]]


async def test_salt_and_adapter_are_extra_keys(fleet: MockFleet) -> None:
    with await subscribed(fleet) as subscriber:
        await complete(fleet, "a" * 128, cache_salt="tenant-1")
        await complete(fleet, "a" * 128, model="ad1")
        await complete(fleet, "a" * 128, model="ad1", cache_salt="tenant-1")
        salted, adapted, both = [(await subscriber.batch())[1][0] for _ in range(3)]
    assert (salted["lora_id"], salted["lora_name"]) == (None, None)
    assert salted["extra_keys"] == [["tenant-1"], None]
    assert (adapted["lora_id"], adapted["lora_name"]) == (1, "ad1")
    assert adapted["extra_keys"] == [["ad1"], ["ad1"]]
    assert both["extra_keys"] == [["ad1", "tenant-1"], ["ad1"]]
    assert len({event["block_hashes"][0] for event in (salted, adapted, both)}) == 3


async def test_a_cleared_cache_is_announced_with_the_next_step(fleet: MockFleet) -> None:
    with await subscribed(fleet) as subscriber:
        await complete(fleet, "a" * 64)
        await subscriber.batch()
        async with httpx.AsyncClient(base_url=fleet.urls[0], verify=False) as client:
            await client.post("/reset_prefix_cache")
        await complete(fleet, "a" * 64)
        _, events = await subscriber.batch()
    assert [event["type"] for event in events] == ["AllBlocksCleared", "BlockStored"]


async def test_replay_sends_what_was_asked_for_and_an_end_marker(fleet: MockFleet) -> None:
    for letter in "abc":
        await complete(fleet, letter * 64)
    with await subscribed(fleet) as subscriber:
        answers = await subscriber.replay(1)
        nothing = await subscriber.replay(3)
    assert [answer[:3] for answer in answers[:-1]] == [
        [b"", subscriber.topic.encode(), seq.to_bytes(8, "big")] for seq in (1, 2)
    ]
    assert msgspec.msgpack.decode(answers[0][3])[1][0]["type"] == "BlockStored"
    assert answers[-1] == [b"", b"", b"\xff" * 8, b""]
    assert nothing == answers[-1:]


async def test_a_restart_starts_the_numbers_again_with_other_hashes(fleet: MockFleet) -> None:
    with await subscribed(fleet) as subscriber:
        await complete(fleet, "a" * 64)
        await complete(fleet, "b" * 64)
        first = await subscriber.batch()
        await fleet.engines[0].restart()
        await complete(fleet, "a" * 64)
        answers = await subscriber.replay(0)
    assert len(answers) == 2
    assert int.from_bytes(answers[0][2], "big") == 0
    again = msgspec.msgpack.decode(answers[0][3])[1][0]
    assert again["token_ids"] == first[1][0]["token_ids"]
    assert again["block_hashes"] != first[1][0]["block_hashes"]


async def test_event_faults_lose_repeat_swap_and_spoil_what_a_replay_has_whole() -> None:
    options = MockOptions(seed=3, speed=math.inf, kv_events=True, kv_blocks=200)
    async with MockFleet(options) as fleet:
        with await subscribed(fleet) as subscriber:
            engine = fleet.engines[0]
            script = [
                {"event_drop": 1.0},
                {"event_duplicate": 1.0},
                {"event_reorder": 1.0},
                {},
                {"event_malformed": 1.0},
                {"event_delay": 0.05},
                {},
            ]
            for number, faults in enumerate(script):
                engine.faults = Faults(**faults)
                await complete(fleet, chr(97 + number) * 64)
            received = [await asyncio.wait_for(subscriber.sub.recv_multipart(), HANG_S) for _ in range(7)]
            answers = await subscriber.replay(0)
    whole = [answer[2:] for answer in answers[:-1]]
    assert [int.from_bytes(seq, "big") for seq, _ in whole] == list(range(7))
    order = [whole.index(frames[1:]) if frames[1:] in whole else None for frames in received]
    assert order == [1, 1, 3, 2, None, 6, 5]


async def test_a_replay_can_be_refused() -> None:
    async with MockFleet(MockOptions(speed=math.inf, kv_events=True)) as fleet:
        fleet.engines[0].faults = Faults(no_replay=True)
        with await subscribed(fleet) as subscriber, subscriber.context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(subscriber.replay_endpoint)
            await dealer.send_multipart([b"", bytes(8)])
            assert not await dealer.poll(100)


async def test_older_shapes_say_the_same() -> None:
    """Arrays, hashes of 32 bytes, an event for each page: decoded, they are what maps say."""
    told: list[Any] = []
    for settings in ({}, {"event_arrays": True}, {"event_digests": True}, {"event_pages": True}):
        options = MockOptions(speed=math.inf, kv_events=True, adapters=("ad1",), faults=Faults(**settings))
        async with MockFleet(options) as fleet:
            with await subscribed(fleet) as subscriber:
                await complete(fleet, "a" * 64 * 3, model="ad1", cache_salt="s")
                frames = await asyncio.wait_for(subscriber.sub.recv_multipart(), HANG_S)
        batch = decode(frames)
        assert isinstance(batch, Batch)
        told.append(batch.events)
        kind = type(msgspec.msgpack.decode(frames[2])[1][0])
        assert kind is (list if "event_arrays" in settings else dict)
    maps, arrays, digests, pages = told
    assert [len(events) for events in told] == [1, 1, 1, 3]
    assert (arrays[0].token_ids, arrays[0].extra_keys) == (maps[0].token_ids, maps[0].extra_keys)
    assert len(digests[0].hashes) == 3 * 8
    assert pages[1].parent == int.from_bytes(pages[0].hashes, "little")
    assert b"".join(page.token_ids for page in pages) == maps[0].token_ids
    assert pages[0].extra_keys == (("ad1", "s"),)
