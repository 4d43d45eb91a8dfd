"""Gateways and a conductor in another process: lookups in batches, within a budget, whatever it does."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from kvroute.conductor import wire
from kvroute.conductor.block_index import CPU, GPU
from kvroute.conductor.index import Holder
from kvroute.conductor.keys import Namespace, byte_keys
from kvroute.conductor.lookups import LookupServer
from kvroute.conductor.remote import MAX_KEY_BYTES, Fallback, RemoteConductor, RemoteOptions
from kvroute.types import NO_MATCH, PrefixMatch, PromptKeys, Trust
from tests.conductor.lookup_kit import (
    HELLO,
    IDS,
    MODEL,
    PATIENT_S,
    keys_of,
    matched,
    paired,
    read_frame,
    scripted,
    source,
    told,
)
from tests.conductor.still_feed import still_conductor, store
from tests.kit import HANG_S, until


async def test_matches_as_the_index_gives_them(tmp_path: Path) -> None:
    async with paired(tmp_path) as pair:
        client = await pair.gateway()
        client.follow("w1", "http://a:1", MODEL, [source(1), source(2, 1)], block_tokens=16)
        client.follow("w2", "http://a:2", MODEL, [source(3)], block_tokens=64)
        client.follow("w3", "http://a:3", MODEL)
        await told(client)
        index = pair.conductor.index
        store(index, pair.holder("tcp://1.1.1.1:1"), GPU, IDS[:64])
        store(index, pair.holder("tcp://1.1.1.1:2", 1), CPU, IDS[:128])
        store(index, pair.holder("tcp://1.1.1.1:3"), GPU, IDS[:256])
        pair.feed.trusts[pair.holder("tcp://1.1.1.1:3").worker_id] = Trust.LOAD_ONLY
        client.predict("w3", byte_keys(b"x" * 4096, 1, 512))
        keys = [keys_of(), keys_of(block=64), byte_keys(b"x" * 4096, 1, 512)]
        found = await client.match(keys, ["w1", "w2", "w3", "w4"])
        assert found.fallback is None
        assert found.matches == [
            PrefixMatch(tokens=128, gpu_tokens=0, cpu_tokens=128, confirmed_tokens=128, dp_rank=1),
            PrefixMatch(tokens=256, gpu_tokens=256, cpu_tokens=256, confirmed_tokens=256),
            PrefixMatch(tokens=1024, predicted_tokens=1024),
            NO_MATCH,
        ]
        assert found.trusts == [Trust.EXACT, Trust.LOAD_ONLY, Trust.APPROXIMATE, Trust.LOAD_ONLY]
        assert pair.conductor.counts.unknown_workers == 1


async def test_byte_keys_beside_blocks_of_as_many_tokens(tmp_path: Path) -> None:
    async with paired(tmp_path) as pair:
        client = await pair.gateway()
        client.follow("ids", "http://a:1", MODEL, [source(1)], block_tokens=128)
        client.follow("bytes", "http://a:2", MODEL)
        await told(client)
        store(pair.conductor.index, pair.holder("tcp://1.1.1.1:1"), GPU, IDS[:128])
        text = byte_keys(b"x" * 2048, 1, 512)
        assert text.block_tokens == 128
        client.predict("bytes", text)
        for keys in ([keys_of(block=128), text], [text, keys_of(block=128)]):
            found = await client.match(keys, ["ids", "bytes"])
            assert [match.tokens for match in found.matches] == [128, 512]


async def test_lookups_of_one_turn_are_one_frame(tmp_path: Path) -> None:
    async with paired(tmp_path) as pair:
        client = await pair.gateway()
        client.follow("w", "http://a:1", MODEL)
        await told(client)
        sent, read = client.frames_sent, pair.server.frames
        found = await asyncio.gather(*(client.match([keys_of()], ["w"]) for _ in range(200)))
        assert all(one.fallback is None for one in found)
        assert (client.frames_sent - sent, pair.server.frames - read) == (1, 1)
        assert pair.conductor.counts.matches == 201


async def test_a_batch_is_cut_where_a_frame_would_be_too_long(tmp_path: Path) -> None:
    async with paired(tmp_path) as pair:
        client = await pair.gateway()
        sent = client.frames_sent
        long = keys_of([1] * 16 * 2**12)
        found = await asyncio.gather(*(client.match([long], []) for _ in range(6)))
        assert all(one.fallback is None for one in found)
        assert client.frames_sent - sent == 3
        sent = client.frames_sent
        many = wire.MAX_MESSAGES + 10
        client_many = await pair.gateway(max_pending=many)
        found = await asyncio.gather(*(client_many.match([], []) for _ in range(many)))
        assert all(one.fallback is None for one in found)
        assert client_many.frames_sent == 2
        assert not pair.server.closed


async def test_the_conductor_restarts(tmp_path: Path) -> None:
    async with paired(tmp_path) as pair:
        client = await pair.gateway()
        client.follow("w", "http://a:1", MODEL, [source(1)], block_tokens=16)
        await told(client)
        await pair.server.close()
        await until(lambda: not client.connected)
        assert (await client.match([keys_of()], ["w"])).fallback is Fallback.UNAVAILABLE
        client.predict("w", keys_of())
        assert client.dropped == {Fallback.UNAVAILABLE: 1}
        conductor, feed = still_conductor()
        pair.server = LookupServer(conductor)
        await pair.server.start(pair.address)
        await until(lambda: client.connected)
        await told(client)
        (worker_id,) = feed.workers
        store(conductor.index, Holder(worker_id), GPU, IDS[:32])
        assert (await client.match([keys_of()], ["w"])).matches[0].gpu_tokens == 32
        assert client.connects == 2


async def test_a_burst_is_no_overload(tmp_path: Path) -> None:
    async with paired(tmp_path) as pair:
        client = await pair.gateway()
        keys = keys_of([1] * 16 * 1000)
        for _ in range(3):
            found = await asyncio.gather(*(client.match([keys], []) for _ in range(200)))
            assert {one.fallback for one in found} == {None}


def test_the_same_on_uvloop(tmp_path: Path) -> None:
    async def run() -> None:
        async with paired(tmp_path) as pair:
            client = await pair.gateway()
            client.follow("w", "http://a:1", MODEL, [source(1)], block_tokens=16)
            await told(client)
            store(pair.conductor.index, pair.holder("tcp://1.1.1.1:1"), GPU, IDS)
            found = await asyncio.gather(*(client.match([keys_of()], ["w"]) for _ in range(50)))
            assert {one.matches[0].gpu_tokens for one in found} == {512}
            await pair.server.close()
            await until(lambda: not client.connected)
            await pair.server.start(pair.address)
            await until(lambda: client.connected)
            assert (await client.match([keys_of()], ["w"])).matches[0].gpu_tokens == 512

    uvloop.run(run())


# A conductor of which every byte is written by the test.


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    assert await read_frame(reader) == [wire.Hello(wire.PROTOCOL)]
    writer.write(HELLO)


async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await greet(reader, writer)
    while await reader.read(65536):
        pass


def nothing_left(client: RemoteConductor) -> bool:
    return not client._pending and not client._queue and not client._queued_lookups


async def test_a_conductor_that_hangs_costs_the_budget_and_no_more() -> None:
    async with scripted(hang, stall_s=60.0) as client:
        await until(lambda: client.connected)
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        found = await asyncio.gather(*(client.match([keys_of()], ["a", "b"]) for _ in range(10)))
        assert 0.02 <= loop.time() - start_s < 1.0
        assert {one.fallback for one in found} == {Fallback.TIMEOUT}
        assert found[0].matches == [NO_MATCH, NO_MATCH]
        assert found[0].trusts == [Trust.LOAD_ONLY, Trust.LOAD_ONLY]
        assert client.fallbacks == {Fallback.TIMEOUT: 10}
        assert nothing_left(client)
        assert client.connected


async def test_a_conductor_that_hangs_for_long_is_dropped_and_tried_again() -> None:
    async with scripted(hang, stall_s=0.5) as client:
        await until(lambda: client.connected)

        async def ask() -> None:
            while client.connects < 2:
                await client.match([], ["a"])
                await asyncio.sleep(0)  # while not connected, a lookup ends without it

        await asyncio.wait_for(ask(), HANG_S)
        assert client.fallbacks[Fallback.TIMEOUT] >= 2


async def test_an_answer_that_is_late_is_ignored() -> None:
    release = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greet(reader, writer)
        while True:
            requests = await read_frame(reader)
            await release.wait()
            writer.write(matched(requests))

    async with scripted(slow) as client:
        await until(lambda: client.connected)
        assert (await client.match([], ["a"])).fallback is Fallback.TIMEOUT
        release.set()
        await until(lambda: client.late_answers == 1)
        found = await client.match([], ["a"])
        assert (found.fallback, found.matches[0].tokens) == (None, 7)
        assert nothing_left(client)


async def test_a_lookup_that_its_caller_gave_up_leaves_nothing() -> None:
    async with scripted(hang) as client:
        await until(lambda: client.connected)
        task = asyncio.create_task(client.match([], ["a"]))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: nothing_left(client))
        assert not client.fallbacks


async def test_a_conductor_that_dies_within_an_answer() -> None:
    connections = 0

    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await greet(reader, writer)
        requests = await read_frame(reader)
        answer = matched(requests)
        writer.write(answer if connections > 1 else answer[:-3])
        await writer.drain()
        if connections > 1:
            await reader.read()
        writer.close()
        await writer.wait_closed()

    async with scripted(die, budget_s=PATIENT_S) as client:
        await until(lambda: client.connected)
        found = await asyncio.gather(*(client.match([], ["a"]) for _ in range(3)))
        assert {one.fallback for one in found} == {Fallback.UNAVAILABLE}
        await until(lambda: client.connects == 2)
        assert (await client.match([], ["a"])).fallback is None


@pytest.mark.parametrize(
    "answer",
    [
        b"\x00\x00\x00\x01\xc1",
        b"\xff\xff\xff\xff",
        wire.frame([wire.Match(1, [], [])]),
        HELLO,
        wire.frame([wire.Matched(1, [])]),
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
    ],
    ids=["no msgpack", "too long", "a request", "a second hello", "too few rows", "http"],
)
async def test_an_answer_that_is_none(answer: bytes) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greet(reader, writer)
        await read_frame(reader)
        writer.write(answer)
        await reader.read()

    async with scripted(talk, budget_s=PATIENT_S) as client:
        await until(lambda: client.connected)
        assert (await client.match([], ["a"])).fallback is Fallback.PROTOCOL
        await until(lambda: client.connects == 2)


@pytest.mark.parametrize(
    "greeting",
    [
        wire.frame([wire.Hello(2)]),
        wire.frame([]),
        wire.frame([wire.Matched(1, [])]),
        b"SSH-2.0-OpenSSH_9\r\n",
        b"",
    ],
    ids=["another version", "nothing", "no hello", "another protocol", "closed"],
)
async def test_a_conductor_that_is_none_is_never_asked(greeting: bytes) -> None:
    connections = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        writer.write(greeting)
        await writer.drain()
        if greeting:
            await reader.read()

    async with scripted(talk) as client:
        await until(lambda: connections >= 3)
        assert not client.connected
        assert (await client.match([], ["a"])).fallback is Fallback.UNAVAILABLE


async def test_a_conductor_that_never_greets_is_given_up() -> None:
    connections = 0

    async def silent(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.read()

    async with scripted(silent, connect_s=0.02) as client:
        await until(lambda: connections >= 3)
        assert not client.connected


async def test_nobody_there() -> None:
    client = RemoteConductor(RemoteOptions("tcp://127.0.0.1:1", reconnect_min_s=0.01))
    client.start()
    async with asyncio.timeout(PATIENT_S):
        found = await client.match([keys_of()], ["a"])
        assert (found.fallback, found.matches) == (Fallback.UNAVAILABLE, [NO_MATCH])
        await client.close()
        await client.close()


async def test_it_ends_whatever_it_is_at(tmp_path: Path) -> None:
    async with paired(tmp_path) as pair:
        for address in (pair.address, f"unix://{tmp_path}/nobody", "tcp://127.0.0.1:1"):
            for turns in range(12):
                client = RemoteConductor(RemoteOptions(address, reconnect_min_s=0.0, reconnect_max_s=0.0))
                client.start()
                for _ in range(turns):
                    await asyncio.sleep(0)
                async with asyncio.timeout(HANG_S):
                    await client.close()
                assert not client.connected
        await until(lambda: not pair.server.connections)


async def test_too_many_lookups_and_prompts_too_long_are_done_without() -> None:
    async with scripted(hang, max_pending=4) as client:
        await until(lambda: client.connected)
        found = await asyncio.gather(*(client.match([], ["a"]) for _ in range(6)))
        assert [one.fallback for one in found] == [Fallback.TIMEOUT] * 4 + [Fallback.OVERLOADED] * 2
        long = keys_of([1] * (wire.MAX_FRAME_BYTES // 8), block=1)
        assert (await client.match([long, long], ["a"])).fallback is Fallback.TOO_LONG
        client.predict("a", PromptKeys(long.mode, [*long.keys, 1], 1, 1))
        assert client.dropped == {Fallback.TOO_LONG: 1}


async def test_a_conductor_that_reads_nothing_bounds_what_is_sent() -> None:
    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greet(reader, writer)
        await asyncio.Event().wait()

    async with scripted(deaf, stall_s=60.0) as client:
        await until(lambda: client.connected)
        keys = keys_of([1] * 2**17, block=1)
        for _ in range(100):
            client.predict("a", keys)
            await asyncio.sleep(0)
        assert client.dropped[Fallback.OVERLOADED] > 50
        assert (await client.match([], ["a"])).fallback is Fallback.OVERLOADED


async def test_what_one_turn_may_queue_is_bounded() -> None:
    async with scripted(hang) as client:
        await until(lambda: client.connected)
        keys = keys_of([1] * 2**17, block=1)
        room = MAX_KEY_BYTES * 4 // (2**17 * wire.KEY_BYTES)
        for _ in range(room + 5):  # none leaves before this turn of the loop ends
            client.predict("a", keys)
        assert client.dropped == {Fallback.OVERLOADED: 5}
        sent = client.frames_sent
        await until(lambda: client.frames_sent > sent)
        assert nothing_left(client)
        await until(client._may_tell)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("place", ["turn", "reader"])
def test_an_answer_that_waits_to_be_read_is_not_late(run: Callable[..., None], place: str) -> None:
    """It came in time; the loop was busy with something else until the budget was over."""
    go, answered = threading.Event(), threading.Event()

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as reader:
            reader.read(int.from_bytes(reader.read(4), "big"))
            connection.sendall(HELLO)
            body = reader.read(int.from_bytes(reader.read(4), "big"))
            assert go.wait(PATIENT_S)
            connection.sendall(matched(wire.decode(wire.requests_decoder, body)))
            answered.set()
            reader.read()

    def stand_still() -> None:
        go.set()
        assert answered.wait(PATIENT_S)
        threading.Event().wait(0.05)  # longer than the budget

    async def ask(port: int) -> None:
        loop = asyncio.get_running_loop()
        client = RemoteConductor(RemoteOptions(f"tcp://127.0.0.1:{port}", budget_s=0.02))
        client.start()
        async with asyncio.timeout(PATIENT_S):
            await until(lambda: client.connected)
            lookup = asyncio.create_task(client.match([], ["a"]))
            for _ in range(2):
                await asyncio.sleep(0)
            assert client.frames_sent == 1
            if place == "turn":
                stand_still()
            else:  # a loop may look at its timers between this and the sockets
                mine, other = socket.socketpair()
                loop.add_reader(mine, lambda: (loop.remove_reader(mine), stand_still()))
                other.send(b"x")
            assert (await lookup).fallback is None
            await client.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=serve, args=(listener,), daemon=True)
        server.start()
        run(ask(listener.getsockname()[1]))
        server.join(PATIENT_S)


def test_an_address_that_is_none_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="lookup address 'x' cannot be used"):
        RemoteConductor(RemoteOptions("x"))


async def test_the_end_leaves_no_task_and_no_waiter() -> None:
    before = asyncio.all_tasks()
    async with scripted(hang, budget_s=PATIENT_S) as client:
        await until(lambda: client.connected)
        waiting = asyncio.create_task(client.match([], ["a"]))
        await asyncio.sleep(0)
        await client.close()
        assert (await waiting).fallback is Fallback.UNAVAILABLE
        assert not client.connected
        assert (await client.match([], ["a"])).fallback is Fallback.UNAVAILABLE
        client.predict("a", keys_of())
    await until(lambda: asyncio.all_tasks() <= before)


async def test_a_message_too_long_for_a_frame_holds_up_no_lookup() -> None:
    async with scripted(hang, stall_s=60.0) as client:
        await until(lambda: client.connected)
        lookup = asyncio.create_task(client.match([keys_of()], ["a"]))
        await asyncio.sleep(0)
        client._send(wire.Unfollow("b" * (wire.MAX_FRAME_BYTES + 1)))
        async with asyncio.timeout(HANG_S):
            assert (await lookup).fallback is Fallback.TIMEOUT
        assert client.dropped == {Fallback.TOO_LONG: 1}
        assert client.frames_sent == 1
        assert client.connected
        assert nothing_left(client)


@pytest.mark.parametrize("size", [600, wire.MAX_FRAME_BYTES + 1])
async def test_an_engine_that_cannot_be_told_of_costs_the_others_nothing(tmp_path: Path, size: int) -> None:
    async with paired(tmp_path) as both:
        client = await both.gateway()
        client.follow("odd", "http://odd:1", Namespace(model="m"), [])
        client.follow("bad", "http://bad:1/" + "x" * size, MODEL, [])
        client.follow("good", "http://good:1", MODEL, [source(1)])
        await until(lambda: len(both.conductor.instances) == 2)
        assert list(client.follow_errors) == ["bad"]
        assert (await client.match([keys_of()], ["good"])).fallback is None
        assert client.connects == 1


async def test_more_block_sizes_than_a_lookup_may_have_are_done_without(tmp_path: Path) -> None:
    async with paired(tmp_path) as both:
        client = await both.gateway()
        sizes = [keys_of(block=size) for size in range(1, wire.MAX_KEY_SETS + 2)]
        assert (await client.match(sizes[1:], ["a"])).fallback is None
        assert (await client.match(sizes, ["a"])).fallback is Fallback.TOO_LONG
