"""The conductor's end of lookups: what gateways share, and gateways of which every byte is written here."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.conductor import lookups, wire
from kvroute.conductor.keys import Namespace
from kvroute.conductor.lookups import LookupServer
from kvroute.conductor.remote import RemoteConductor, RemoteOptions
from kvroute.types import Trust
from tests.conductor.lookup_kit import (
    HELLO,
    IDS,
    MODEL,
    PATIENT_S,
    framed,
    keys_of,
    paired,
    served,
    source,
    told,
)
from tests.conductor.still_feed import still_conductor
from tests.kit import HANG_S, until


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


async def test_it_speaks_tcp_as_well() -> None:
    conductor, _ = still_conductor()
    server = LookupServer(conductor)
    await server.start("tcp://127.0.0.1:0")
    client = RemoteConductor(RemoteOptions(server.address, budget_s=PATIENT_S))
    client.start()
    async with asyncio.timeout(PATIENT_S):
        await until(lambda: client.connected)
        await told(client)
        await client.close()
        await server.close()


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
            while await asyncio.wait_for(reader.read(65536), HANG_S):
                pass
        assert server.closed == {reason: 1}
        assert not server.connections
        writer.close()


async def answers_to(path: Path, requests: list[wire.Match]) -> list[list[wire.Answer]]:
    """By frame, what comes after the conductor's hello."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(HELLO + wire.frame(requests))
    assert await reader.readexactly(len(HELLO)) == HELLO
    frames: list[list[wire.Answer]] = []
    while sum(map(len, frames)) < len(requests):
        length = int.from_bytes(await reader.readexactly(4), "big")
        frames.append(wire.decode(wire.answers_decoder, await reader.readexactly(length)))
    writer.close()
    return frames


async def test_the_first_of_many_answers_does_not_wait_for_the_last(tmp_path: Path) -> None:
    async with served(tmp_path):
        frames = await answers_to(tmp_path / "s", [wire.Match(number, [], []) for number in range(100)])
        assert max(map(len, frames)) <= lookups.ANSWERS_PER_FRAME
        assert [answer for frame in frames for answer in frame] == [wire.Matched(n, []) for n in range(100)]


async def test_a_frame_of_answers_is_cut_by_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "ROWS_PER_FRAME", 100)
    async with served(tmp_path):
        frames = await answers_to(tmp_path / "s", [wire.Match(n, [], ["w"] * 60) for n in range(12)])
        assert max(map(len, frames)) == 2
        assert sum(map(len, frames)) == 12


def test_the_longest_frame_of_answers_can_be_sent() -> None:
    row = wire.Row(*[2**32 - 1] * 5, dp_rank=2**32, trust=Trust.APPROXIMATE)
    fullest = wire.Matched(1, [row] * (lookups.ROWS_PER_FRAME // 10))
    last = wire.Matched(2, [row] * wire.MAX_WORKERS)
    (batch,) = lookups._batches([fullest] * 10 + [last])
    assert len(wire.frame(batch)) <= wire.MAX_FRAME_BYTES


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
        seen = [-1]

        def stands_still() -> bool:
            seen.append(conductor.counts.matches)
            return len(seen) > 50 and seen[-1] == seen[-50]

        await until(stands_still)  # however long what lies in sockets takes
        # Two frames' worth, and what both ends' buffers hold of answers of 20 KB each.
        assert conductor.counts.matches <= 200
        waiting.cancel()
        reader.feed_eof()
        writer.close()


async def _pour(writer: asyncio.StreamWriter, data: bytes) -> None:
    while True:
        writer.write(data)
        await writer.drain()


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


@settings(max_examples=40)
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
                    await asyncio.wait_for(reader.read(), HANG_S)
                writer.close()
            await until(lambda: not server.connections)
            assert set(server.closed) <= {"malformed", "protocol", "oversized"}
            assert server.buffered_bytes == 0
            assert all(instance.followers == 0 for instance in conductor.instances.values())
            conductor.index.check_integrity()

    asyncio.run(talk())
