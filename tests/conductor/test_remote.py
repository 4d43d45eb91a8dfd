"""Gateways and a conductor in another process: lookups in batches, within a budget, whatever it does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.conductor import lookups, wire
from kvroute.conductor.block_index import CPU, GPU
from kvroute.conductor.core import Conductor
from kvroute.conductor.events import EventSource
from kvroute.conductor.index import Holder
from kvroute.conductor.keys import Namespace, byte_keys, token_keys
from kvroute.conductor.lookups import LookupServer
from kvroute.conductor.remote import Fallback, RemoteConductor, RemoteOptions
from kvroute.types import NO_MATCH, PrefixMatch, PromptKeys, Trust
from tests.conductor.still_feed import StillFeed, still_conductor, store
from tests.kit import until

IDS = list(range(1000, 1512))
MODEL = Namespace(model="m")
PATIENT_S = 5.0


def keys_of(ids: Sequence[int] = IDS, block: int = 16) -> PromptKeys:
    return token_keys(ids, MODEL.root("ids"), block)


def source(port: int, rank: int = 0) -> EventSource:
    return EventSource(f"tcp://1.1.1.1:{port}", dp_rank=rank)


class Pair:
    """A lookup server over a conductor without engines, and gateways of it."""

    def __init__(self, path: Path, linger_s: float) -> None:
        self.address = f"unix://{path}"
        self.conductor, self.feed = still_conductor(linger_s)
        self.server = LookupServer(self.conductor)
        self.clients: list[RemoteConductor] = []

    async def gateway(self, **options: Any) -> RemoteConductor:
        given = {"budget_s": PATIENT_S, "reconnect_min_s": 0.01, "reconnect_max_s": 0.02, **options}
        client = RemoteConductor(RemoteOptions(self.address, **given))
        client.start()
        self.clients.append(client)
        await until(lambda: client.connected)
        return client

    def holder(self, endpoint: str, rank: int = 0) -> Holder:
        """Of whoever follows that endpoint."""
        (worker_id,) = [
            name
            for name, sources in self.feed.workers.items()
            if any(one.endpoint == endpoint for one in sources)
        ]
        return Holder(worker_id, rank)


@contextlib.asynccontextmanager
async def paired(tmp_path: Path, linger_s: float = 60.0) -> AsyncIterator[Pair]:
    pair = Pair(tmp_path / "s", linger_s)
    await pair.server.start(pair.address)
    try:
        yield pair
    finally:
        for client in pair.clients:
            await client.close()
        await pair.server.close()
        await pair.conductor.close()


async def told(client: RemoteConductor) -> None:
    """What was sent before has been dealt with: requests of a connection are answered in order."""
    assert (await client.match([], [])).fallback is None


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


async def test_news_reach_the_conductor(tmp_path: Path) -> None:
    async with paired(tmp_path) as pair:
        client = await pair.gateway()
        client.follow("w", "http://a:1", MODEL, [source(1)], block_tokens=16, silent_tier_blocks=9)
        await told(client)
        worker_id = pair.holder("tcp://1.1.1.1:1").worker_id
        client.predict("w", keys_of(IDS[:48]))
        client.observe("w", 48, 32, 512)
        client.observe("other", 48, 32, 512)
        found = await client.match([keys_of()], ["w"])
        assert found.matches[0].predicted_tokens == 48
        assert pair.feed.observed == [(worker_id, 48, 32, 512)]
        assert pair.conductor.counts.unknown_workers == 1
        client.unfollow("w")
        await told(client)
        assert not pair.feed.workers
        assert not pair.conductor.instances


async def test_gateways_that_follow_the_same_engine_share_what_is_known(tmp_path: Path) -> None:
    async with paired(tmp_path) as pair:
        one, other = await pair.gateway(), await pair.gateway()
        for client, name in ((one, "mine"), (other, "yours")):
            client.follow(name, "http://a:1", MODEL, [source(1)], block_tokens=16)
            client.follow(f"{name}-silent", "http://a:2", MODEL)
            await told(client)
        assert len(pair.conductor.instances) == 2
        one.predict("mine", keys_of())
        one.predict("mine-silent", keys_of())
        await told(one)
        asked = await other.match([keys_of()], ["yours", "yours-silent", "mine"])
        assert [match.tokens for match in asked.matches] == [512, 512, 0]
        # One says that both have left. Events will tell the other of the first's end; nothing would of the
        # second's.
        one.unfollow("mine")
        one.unfollow("mine-silent")
        await told(one)
        asked = await other.match([keys_of()], ["yours", "yours-silent"])
        assert [match.tokens for match in asked.matches] == [512, 0]
        other.unfollow("yours")
        other.unfollow("yours-silent")
        await told(other)
        assert not pair.conductor.instances


async def test_an_engine_outlives_its_gateways_connection_for_a_while(tmp_path: Path) -> None:
    async with paired(tmp_path, linger_s=0.05) as pair:
        client = await pair.gateway()
        client.follow("w", "http://a:1", MODEL, [source(1)], block_tokens=16)
        await told(client)
        holder = pair.holder("tcp://1.1.1.1:1")
        await client.close()
        again = await pair.gateway()
        again.follow("w", "http://a:1", MODEL, [source(1)], block_tokens=16)
        await told(again)
        assert pair.holder("tcp://1.1.1.1:1") == holder
        await asyncio.sleep(0.1)  # beyond the time of the first connection's end
        assert pair.conductor.instances
        await again.close()
        await until(lambda: not pair.conductor.instances)
        assert not pair.feed.workers


async def test_following_another_engine_by_the_same_name(tmp_path: Path) -> None:
    async with paired(tmp_path) as pair:
        client = await pair.gateway()
        client.follow("w", "http://a:1", MODEL, [source(1)])
        client.follow("w", "http://a:1", MODEL, [source(2)])
        await told(client)
        assert [[one.endpoint for one in sources] for sources in pair.feed.workers.values()] == [
            ["tcp://1.1.1.1:2"]
        ]


async def test_what_cannot_be_followed_is_said(tmp_path: Path) -> None:
    async with paired(tmp_path) as pair:
        client = await pair.gateway()
        client.follow("w", "http://a:1", MODEL, [source(1)])
        await told(client)
        pair.feed.workers["engine-2"] = []
        client.follow("w2", "http://a:2", MODEL, [source(2)])
        await told(client)
        assert client.follow_errors == {"w2": "engine-2 cannot be followed"}
        assert (await client.match([keys_of()], ["w2"])).trusts == [Trust.LOAD_ONLY]
        client.unfollow("w2")
        assert not client.follow_errors


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


async def test_it_speaks_tcp_as_well() -> None:
    conductor, _ = still_conductor()
    server = LookupServer(conductor)
    await server.start("tcp://127.0.0.1:0")
    client = RemoteConductor(RemoteOptions(server.address, budget_s=PATIENT_S))
    client.start()
    await until(lambda: client.connected)
    await told(client)
    await client.close()
    await server.close()


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


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_unix_socket_left_behind_is_taken_over_and_removed(
    tmp_path: Path, run: Callable[..., None]
) -> None:
    path = tmp_path / "s"

    async def take_over() -> None:
        servers = []
        for _ in range(2):
            server = LookupServer(still_conductor()[0])
            await server.start(f"unix://{path}")
            assert path.is_socket()
            assert path.stat().st_mode & 0o777 == 0o660
            servers.append(server)
        await servers[0].close()
        assert path.is_socket(), "it is the second one's by now"
        await servers[1].close()
        assert not path.exists()

    run(take_over())


@pytest.mark.parametrize(
    "address",
    ["", "x", "unix://rel", "unix:/x", "unix:///" + "x" * 107, "unix:///a%00", "tcp://:1", "tcp://a", "tcp://a:",
     "tcp://a:x", "tcp://a:65536", "tcp://::1:5", "tcp://[::1:5", "http://a:1", "tcp://a:²"],
)  # fmt: skip
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(ValueError, match=r"cannot be used; accepted: unix:///path/to.sock, tcp://host:port"):
        RemoteConductor(RemoteOptions(address))


def test_addresses() -> None:
    assert wire.SocketAddress.parse("tcp://[::1]:5") == wire.SocketAddress("::1", 5)
    assert wire.SocketAddress.parse("tcp://a.b:5") == wire.SocketAddress("a.b", 5)
    assert wire.SocketAddress.parse("unix:///a%20b") == wire.SocketAddress(unix_path="/a b")


# A conductor of which every byte is written by the test.

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HELLO = wire.frame([wire.Hello(wire.PROTOCOL)])


async def read_frame(reader: asyncio.StreamReader) -> list[wire.Request]:
    length = int.from_bytes(await reader.readexactly(4), "big")
    requests: list[wire.Request] = wire.requests_decoder.decode(await reader.readexactly(length))
    return requests


def matched(requests: list[wire.Request], rows: int | None = None) -> bytes:
    nothing = wire.Row.pack(PrefixMatch(tokens=7), Trust.EXACT)
    return wire.frame(
        [
            wire.Matched(one.id, [nothing] * (len(one.worker_ids) if rows is None else rows))
            for one in requests
            if isinstance(one, wire.Match)
        ]
    )


@contextlib.asynccontextmanager
async def scripted(handler: Handler, **options: Any) -> AsyncIterator[RemoteConductor]:
    """A gateway of a conductor whose connections `handler` serves."""
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await handler(reader, writer)
        writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    given = {"budget_s": 0.02, "reconnect_min_s": 0.01, "reconnect_max_s": 0.02, **options}
    client = RemoteConductor(RemoteOptions(f"tcp://127.0.0.1:{port}", **given))
    client.start()
    try:
        yield client
    finally:
        await client.close()
        server.close()
        for writer in writers:
            writer.transport.abort()


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
    async with scripted(hang, stall_s=0.03) as client:
        await until(lambda: client.connected)

        async def ask() -> None:
            while client.connects < 2:
                await client.match([], ["a"])
                await asyncio.sleep(0)  # while not connected, a lookup ends without it

        await asyncio.wait_for(ask(), 5.0)
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
                async with asyncio.timeout(5.0):
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


# A gateway of which every byte is written by the test.


@contextlib.asynccontextmanager
async def served(tmp_path: Path) -> AsyncIterator[tuple[LookupServer, Conductor, StillFeed]]:
    conductor, feed = still_conductor()
    server = LookupServer(conductor)
    await server.start(f"unix://{tmp_path}/s")
    try:
        yield server, conductor, feed
    finally:
        await server.close()


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"\xff\xff\xff\xff", "oversized"),
        ((wire.MAX_FRAME_BYTES + 1).to_bytes(4, "big"), "oversized"),
        (framed(b"\xc1"), "malformed"),
        (framed(b""), "malformed"),
        (framed(b"\x91" * 100_000), "malformed"),
        (framed(b"\xdd\xff\xff\xff\xff"), "malformed"),
        (framed(b"\x91\x92\x63\x01"), "malformed"),
        (framed(b"\xdc\x10\x01" + b"\x92\x00\x01" * 4097), "malformed"),
        (wire.frame([wire.Match(1, [], [])]), "protocol"),
        (wire.frame([wire.Hello(9)]), "protocol"),
        (HELLO + HELLO, "protocol"),
        (HELLO + wire.frame([wire.Matched(1, [])]), "malformed"),
        (HELLO + wire.frame([wire.Match(1, [wire.Keys(keys_of().mode, 16, 0, b"x" * 9)], [])]), "malformed"),
        (b"GET / HTTP/1.1\r\n\r\n", "oversized"),
    ],
)
async def test_a_gateway_that_is_none_is_closed_and_counted(tmp_path: Path, sent: bytes, reason: str) -> None:
    async with served(tmp_path) as (server, _, _):
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
        writer.write(sent)
        with contextlib.suppress(ConnectionError):
            while await asyncio.wait_for(reader.read(65536), 5.0):
                pass
        assert server.closed == {reason: 1}
        assert not server.connections
        writer.close()


async def test_a_gateway_that_says_nothing_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "HELLO_S", 0.01)
    async with served(tmp_path) as (server, _, _):
        _, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
        await until(lambda: server.closed == {"silent": 1})
        writer.close()


async def test_connections_and_unfinished_frames_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "MAX_CONNECTIONS", 2)
    monkeypatch.setattr(lookups, "MAX_BUFFERED_BYTES", 100_000)
    async with served(tmp_path) as (server, _, _):
        peers = [await asyncio.open_unix_connection(str(tmp_path / "s")) for _ in range(3)]
        await until(lambda: server.closed == {"too_many": 1})
        for _, writer in peers[:2]:
            writer.write(HELLO + (wire.MAX_FRAME_BYTES).to_bytes(4, "big") + b"x" * 60_000)
        await until(lambda: server.closed == {"too_many": 1, "buffered": 1})
        await until(lambda: server.buffered_bytes < 100_000)
        for _, writer in peers:
            writer.close()


async def test_a_gateway_that_reads_nothing_may_ask_no_more(tmp_path: Path) -> None:
    async with served(tmp_path) as (server, conductor, _):
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
        writer.write(HELLO)
        ask = wire.frame([wire.Match(1, [], ["w"] * 2000)] * 20)
        waiting = asyncio.create_task(_pour(writer, ask))
        await until(lambda: any(client._write_paused for client in server.connections))
        answered = conductor.counts.matches
        await asyncio.sleep(0.05)
        assert conductor.counts.matches - answered <= 2 * 20
        waiting.cancel()
        reader.feed_eof()
        writer.close()


async def _pour(writer: asyncio.StreamWriter, data: bytes) -> None:
    while True:
        writer.write(data)
        await writer.drain()


FRAMES = st.lists(st.binary(max_size=200), max_size=6)


@settings(max_examples=50, deadline=None)
@given(bodies=FRAMES, cuts=st.lists(st.integers(1, 50), max_size=20))
def test_frames_are_the_same_however_they_are_cut(bodies: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(map(framed, bodies))
    reader = wire.FrameReader()
    found: list[bytes] = []
    for cut in cuts:
        piece, stream = stream[:cut], stream[cut:]
        found += reader.feed(piece)
    found += reader.feed(stream)
    assert found == bodies
    assert reader.buffered_bytes == 0


NUMBERS = st.integers(0, 2**64 - 1)
PACKED = st.builds(
    wire.Keys, st.just(keys_of().mode), st.integers(1, 64), st.integers(0, 99), st.binary(max_size=40)
)
REQUESTS = st.one_of(
    st.builds(
        wire.Match,
        st.integers(0, 9),
        st.lists(PACKED, max_size=3),
        st.lists(st.sampled_from("abc"), max_size=3),
    ),
    st.builds(wire.Predict, st.sampled_from("abc"), PACKED),
    st.builds(wire.Observe, st.sampled_from("abc"), *[st.integers(0, 2**32 - 1)] * 3),
    st.builds(
        wire.Follow,
        st.integers(0, 9),
        st.sampled_from("abc"),
        st.text(min_size=1, max_size=9),
        st.builds(Namespace, model=st.none() | st.text(max_size=5)),
        st.lists(
            st.builds(
                wire.Source,
                st.sampled_from(["tcp://a:1", "tcp://b:2", "x"]),
                st.none(),
                st.integers(0, 2000),
                st.just(""),
                st.booleans(),
            ),
            max_size=2,
        ),
        st.none() | st.integers(1, 64),
    ),
    st.builds(wire.Unfollow, st.sampled_from("abc")),
    st.just(wire.Hello(wire.PROTOCOL)),
)


@settings(max_examples=40, deadline=None, print_blob=True)
@given(
    requests=st.lists(REQUESTS, max_size=12),
    noise=st.binary(max_size=30),
    flips=st.lists(st.integers(0, 10_000), max_size=2),
)
def test_no_frame_makes_it_fail(
    tmp_path_factory: pytest.TempPathFactory, requests: list[wire.Request], noise: bytes, flips: list[int]
) -> None:
    body = bytearray(wire.frame(requests)[4:])
    for flip in flips:
        body[flip % len(body)] ^= 1 + flip % 255

    async def talk() -> None:
        async with served(tmp_path_factory.getbasetemp()) as (server, conductor, _):
            path = str(tmp_path_factory.getbasetemp() / "s")
            for sent in (HELLO + framed(bytes(body)) + noise, noise, framed(noise)):
                reader, writer = await asyncio.open_unix_connection(path)
                writer.write(sent)
                writer.write_eof()
                with contextlib.suppress(ConnectionError):
                    await asyncio.wait_for(reader.read(), 5.0)
                writer.close()
            await until(lambda: not server.connections)
            assert set(server.closed) <= {"malformed", "protocol", "oversized"}
            assert server.buffered_bytes == 0
            assert all(instance.followers == 0 for instance in conductor.instances.values())
            conductor.index.check_integrity()

    asyncio.run(talk())
