"""Replicas on a real Redis server, which is killed, paused and filled with rubbish."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from kvroute.conductor.approximate import ApproximateIndex
from kvroute.conductor.shared import (
    Dropped,
    Ignored,
    Intent,
    LocalWorker,
    Lost,
    OthersLoad,
    SharedOptions,
    SharedState,
    SharedWorker,
    SnapshotFailure,
    link,
    reader,
    state,
    streams,
    writer,
)
from kvroute.conductor.shared.messages import MAX_ENTRY_BYTES, MAX_KEYS, VERSION
from kvroute.types import EngineKind, KeyMode, PromptKeys
from tests.conductor.sharing import URL, Replica, prompt, sharing
from tests.kit import HANG_S, until
from tests.redis import RedisServer, redis_server

OTHER_URL = "http://10.0.0.2:8000"


@pytest_asyncio.fixture
async def server() -> AsyncIterator[RedisServer]:
    async with redis_server() as started:
        yield started


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rules, with less waiting."""
    monkeypatch.setattr(link, "LAST_PAUSE_S", 0.2)
    monkeypatch.setattr(reader, "BLOCK_S", 0.1)
    monkeypatch.setattr(writer, "HEARTBEAT_S", 0.1)


# --- predictions -------------------------------------------------------------------------------


async def test_what_one_replica_routed_the_other_knows(server: RedisServer) -> None:
    here, there = Replica(), Replica(workers={URL: LocalWorker("its own name~7", 100.0)})
    async with sharing(server, here, "a") as a, sharing(server, there, "b") as b:
        keys = prompt(40, seed=1)
        a.routed(URL, 100.0, keys)
        await until(lambda: len(there.predicted) == 1)
        assert there.predicted == [("its own name~7", keys)]
        byte_keys = PromptKeys(KeyMode.BYTES, [2**64 - 1, 0], 128, 300)
        a.routed(URL, None, byte_keys)
        await until(lambda: len(there.predicted) == 2)
        assert there.predicted[1] == ("its own name~7", byte_keys)
        await until(lambda: a.stats.told == 2)  # its own call may end after the other has heard
        assert (b.stats.heard, a.stats.heard, b.stats.told) == (2, 0, 0)
        assert here.predicted == []  # its own words come back to it, and are not news


async def test_a_fresh_replica_picks_as_the_one_that_has_been_there(server: RedisServer) -> None:
    """It finds for each prompt the worker that holds it, before its first request."""
    workers = {f"http://10.0.0.{n}:8000": LocalWorker(f"w{n}~1", float(n)) for n in range(4)}
    generator = random.Random(7)
    sent = [(generator.choice(list(workers)), prompt(generator.randint(1, 200), seed=n)) for n in range(300)]
    async with sharing(server, Replica(), "a") as a:
        for url, keys in sent:
            a.routed(url, workers[url].started_at, keys)
        await until(lambda: a.stats.told == len(sent))
    late = Replica(workers=workers)
    async with sharing(server, late, "b") as b:
        assert b.stats.heard == len(sent)
        index = ApproximateIndex(2**24)
        for worker_id, keys in late.predicted:
            index.insert(worker_id, keys.keys)
        ids = [worker.worker_id for worker in workers.values()]
        for url, keys in sent:
            held = dict(zip(ids, index.match(keys.keys, ids), strict=True))
            assert held == {i: len(keys.keys) if i == workers[url].worker_id else 0 for i in ids}


async def test_a_fresh_replica_reads_back_no_further_than_asked(server: RedisServer) -> None:
    async with sharing(server, Replica(), "a") as a:
        a.routed(URL, 100.0, prompt(2, seed=1))
        await until(lambda: a.stats.told == 1)
    late = Replica()
    async with sharing(server, late, "b", warm_s=0) as b:
        await until(lambda: b.stats.connected)
        assert late.predicted == []


async def test_a_replica_has_started_when_it_can_tell(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = writer.StreamWriter.run

    async def run_late(self: writer.StreamWriter) -> None:
        await asyncio.sleep(0.1)
        await run(self)

    monkeypatch.setattr(writer.StreamWriter, "run", run_late)
    async with sharing(server, Replica(), "a") as a:
        a.routed(URL, 100.0, prompt(1, seed=1))
        await until(lambda: a.stats.told == 1)
        assert not a.stats.dropped


async def test_a_burst_of_one_prompt_is_told_once_and_a_long_one_in_part(server: RedisServer) -> None:
    there = Replica()
    async with sharing(server, Replica(), "a") as a, sharing(server, there, "b"):
        same, long = prompt(3, seed=1), prompt(MAX_KEYS + 5, seed=2)
        for _ in range(64):
            a.routed(URL, 100.0, same)
        a.routed(URL, 100.0, long)
        a.routed(URL, 100.0, PromptKeys(KeyMode.TOKENS, [], 16, 5))
        await until(lambda: len(there.predicted) == 2)
        cut = msgspec.structs.replace(long, keys=long.keys[:MAX_KEYS])
        assert [keys for _, keys in there.predicted] == [same, cut]
        await until(lambda: a.stats.told == 2)
        assert (a.stats.coalesced, a.stats.truncated) == (63, 1)


async def test_a_full_queue_drops_and_counts(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "LOADS_S", 60.0)  # nothing but the queue itself drives its emptying
    there = Replica()
    async with sharing(server, Replica(), "a") as a, sharing(server, there, "b"):
        keys = [prompt(MAX_KEYS, seed=1).keys] * 200
        for n, one in enumerate(keys):
            a.routed(f"http://10.0.1.{n}:80", None, PromptKeys(KeyMode.TOKENS, one, 16, 0))
            assert a.stats.queue_bytes <= writer.QUEUE_BYTES
        kept = 200 - a.stats.dropped[Dropped.QUEUE_FULL]
        assert 10 < kept < 100
        await until(lambda: a.stats.told == kept)
        assert a.stats.queue_bytes == 0
        a.routed(URL, 100.0, prompt(1, seed=2))
        await until(lambda: len(there.predicted) == 1)


async def test_what_is_kept_in_redis_is_bounded_and_expires(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "MIN_ENTRIES", 1)
    async with sharing(server, Replica(), "a", stream_bytes=2**20) as a, server.client() as client:
        for n in range(60):
            a.routed(URL, 100.0, prompt(MAX_KEYS, seed=n))
            await until(lambda n=n: a.stats.told == n + 1)
        used = await client.memory_usage("kvroute:routed", samples=0)
        assert 2**19 < used < 3 * 2**20  # nearly 4 MiB were told; the mean size is only learned
        await until(lambda: a.stats.connected)
        a.decided(SharedWorker(URL, Intent.DRAINING))
        names = sorted([key async for key in client.scan_iter("*")])
        assert set(names) <= {b"kvroute:routed", b"kvroute:loads", b"kvroute:workers"}
        for name in names:
            assert 0 < await client.pttl(name) <= 400_000, name


# --- incarnations ------------------------------------------------------------------------------


async def test_another_incarnation_of_the_engine_gets_no_credit(server: RedisServer) -> None:
    """The engine was restarted: what its predecessor was sent is not there any more."""
    there = Replica(workers={URL: LocalWorker("w~2", 200.0)})
    async with sharing(server, Replica(), "a") as a, sharing(server, there, "b") as b:
        a.routed(URL, 100.0, prompt(2, seed=1))
        a.routed(URL, 200.0, prompt(2, seed=2))
        await until(lambda: len(there.predicted) == 1)
        assert there.predicted == [("w~2", prompt(2, seed=2))]
        assert b.stats.ignored == {Ignored.OTHER_INCARNATION: 1}


async def test_a_prediction_waits_for_its_worker_its_start_time_and_its_restart(server: RedisServer) -> None:
    there = Replica(workers={OTHER_URL: LocalWorker("x~1", None), "http://c:80": LocalWorker("c~1", 1.0)})
    async with sharing(server, Replica(), "a") as a, sharing(server, there, "b") as b:
        a.routed(URL, 100.0, prompt(2, seed=1))
        a.routed(OTHER_URL, 300.0, prompt(2, seed=2))
        a.routed("http://c:80", 2.0, prompt(2, seed=3))
        await until(lambda: b.stats.waiting_bytes > 1000)
        there.workers = {
            URL: LocalWorker("w~1", 100.0),
            OTHER_URL: LocalWorker("x~1", 300.0),
            "http://c:80": LocalWorker("c~2", 2.0),
        }
        await until(lambda: len(there.predicted) == 3)
        expected = [("w~1", prompt(2, seed=1)), ("x~1", prompt(2, seed=2)), ("c~2", prompt(2, seed=3))]
        assert there.predicted == expected
        assert b.stats.waiting_bytes == 0
        assert not b.stats.ignored


# --- loads -------------------------------------------------------------------------------------


async def test_loads_are_those_of_all_others(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A herd at one replica is seen by the next, which must not fill the same engine."""
    monkeypatch.setattr(state, "LOAD_TTL_S", 600)  # nothing ages out here
    one, two, three = Replica(), Replica(), Replica()
    async with (
        sharing(server, one, "a") as a,
        sharing(server, two, "b") as b,
        sharing(server, three, "c") as c,
    ):
        one.loads = {URL: (64, 12_000), OTHER_URL: (0, 0)}
        two.loads = {URL: (1, 10), OTHER_URL: (2, 0)}
        await until(lambda: c.others_load(URL) == OthersLoad(65, 12_010))
        await until(lambda: a.others_load(URL) == OthersLoad(1, 10))
        await until(lambda: b.others_load(URL) == OthersLoad(64, 12_000))
        assert c.others_load(OTHER_URL) == three.others[OTHER_URL] == OthersLoad(2, 0)
        assert OTHER_URL not in two.others
        assert (a.stats.replicas, b.stats.replicas, c.stats.replicas) == (2, 2, 2)
        one.loads = {}
        await until(lambda: three.others[URL] == OthersLoad(1, 10))
        await b.stop()  # in order: the others know at once
        await until(lambda: three.others == {URL: OthersLoad(), OTHER_URL: OthersLoad()})


async def test_the_load_of_a_dead_replica_ages_out(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "LOAD_TTL_S", 0.5)
    dead, alive = Replica(loads={URL: (5, 500)}), Replica()
    async with sharing(server, alive, "b") as b, sharing(server, dead, "a") as a:
        await until(lambda: alive.others.get(URL) == OthersLoad(5, 500))
        for task in a._tasks:  # as kill -9 would: no goodbye
            task.cancel()
        a._writer._works = False
        assert await until(lambda: alive.others[URL] == OthersLoad()) > 0.2
        await until(lambda: b.stats.replicas == 0)


# --- workers -----------------------------------------------------------------------------------


async def test_decisions_about_workers_reach_all_and_the_last_one_holds(server: RedisServer) -> None:
    one, two = Replica(), Replica()
    added = SharedWorker(OTHER_URL, Intent.SERVING, EngineKind.VLLM, ("m", "lora"), 16)
    async with sharing(server, one, "a") as a, sharing(server, two, "b") as b:
        a.decided(added)
        await until(lambda: len(two.adopted) == 1)
        told = two.adopted[0]
        assert msgspec.structs.replace(told, version=0, origin="") == added
        assert told.origin.startswith("a/")
        b.decided(SharedWorker(OTHER_URL, Intent.REMOVED))
        await until(lambda: [worker.intent for worker in one.adopted] == [Intent.REMOVED])
        a.decided(added)
        await until(lambda: [w.intent for w in two.adopted] == [Intent.SERVING, Intent.SERVING])
        a.decided(added)  # says nothing new
        late, deaf = Replica(), Replica()
        async with sharing(server, late, "c"), sharing(server, deaf, "d", adopt_workers=False):
            await until(lambda: late.adopted == [two.adopted[-1]])
        assert deaf.adopted == []
        assert (len(one.adopted), len(two.adopted)) == (1, 2)  # nothing was passed back and forth


async def test_a_removal_outlives_the_replica_that_decided_it(server: RedisServer) -> None:
    """And the server: every replica repeats what it knows."""
    keeper = Replica()
    async with sharing(server, keeper, "keeper") as k:
        async with sharing(server, Replica(), "a") as a:
            a.decided(SharedWorker(OTHER_URL, Intent.REMOVED))
            await until(lambda: len(keeper.adopted) == 1)
        server.kill()
        await until(lambda: not k.stats.connected)
        await server.start()
        returned = Replica()
        async with sharing(server, returned, "a"):
            await until(lambda: [worker.intent for worker in returned.adopted] == [Intent.REMOVED])
        assert len(keeper.adopted) == 1


# --- trouble -----------------------------------------------------------------------------------


async def test_redis_is_killed_in_the_middle_of_traffic(server: RedisServer) -> None:
    one, two = Replica(loads={URL: (3, 30)}), Replica()
    with capture_logs() as logs:
        async with sharing(server, one, "a") as a, sharing(server, two, "b") as b:
            await until(lambda: a.stats.connected and b.others_load(URL).requests == 3)
            calls: dict[bool, list[float]] = {True: [], False: []}
            sent = 0

            async def traffic() -> None:
                nonlocal sent
                while True:
                    started = time.perf_counter()
                    a.routed(URL, 100.0, prompt(4, seed=sent))
                    calls[a.stats.connected].append(time.perf_counter() - started)
                    sent += 1
                    await asyncio.sleep(0.002)

            task = asyncio.create_task(traffic())
            await until(lambda: len(two.predicted) > 20)
            server.kill()
            await until(lambda: not a.stats.connected and not b.stats.connected)
            before = a.stats.dropped[Dropped.DISCONNECTED]
            await until(lambda: a.stats.dropped[Dropped.DISCONNECTED] > before + 20)
            assert a.stats.queue_bytes == 0  # nothing gathers while nobody could be told
            await server.start()
            heard = b.stats.heard
            await until(lambda: a.stats.connected and b.stats.connected and b.stats.heard > heard + 20)
            await until(lambda: b.others_load(URL) == OthersLoad(3, 30))
            task.cancel()
            await until(lambda: a.stats.told + sum(a.stats.dropped.values()) == sent)
            waited_s = {connected: statistics.median(all_s) for connected, all_s in calls.items()}
            assert waited_s[False] < 10 * waited_s[True], "nobody waits for what is not there"
            assert b.stats.lost[Lost.UNREACHABLE] > 0
    for event in ("shared state lost, on local knowledge now", "shared state connected"):
        assert sum(line["event"] == event for line in logs) == (2 if "lost" in event else 4)


async def test_a_redis_that_hangs_is_a_redis_that_is_gone(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "LOAD_TTL_S", 0.5)
    one, two = Replica(loads={URL: (3, 30)}), Replica()
    async with (
        sharing(server, one, "a", timeout_s=0.2) as a,
        sharing(server, two, "b", timeout_s=0.2) as b,
    ):
        await until(lambda: a.stats.connected and b.others_load(URL).requests == 3)
        server.pause()
        try:
            a.routed(URL, 100.0, prompt(4, seed=1))
            await until(lambda: not a.stats.connected and not b.stats.connected)
            assert a.stats.lost[Lost.TIMEOUT] > 0
            await until(lambda: b.others_load(URL) == OthersLoad())
            assert await a.store_snapshot("index", b"x", 1) is False
            assert await a.fetch_snapshot("index") is None
            assert a.stats.snapshot_failures == {SnapshotFailure.CALL_FAILED: 2}
        finally:
            server.resume()
        await until(lambda: a.stats.connected and b.stats.connected)
        await until(lambda: b.others_load(URL) == OthersLoad(3, 30))
        a.routed(URL, 100.0, prompt(4, seed=2))
        await until(lambda: ("w~1", prompt(4, seed=2)) in two.predicted)


async def test_without_redis_it_starts_and_stops_in_time() -> None:
    replica = Replica()
    options = SharedOptions("redis://127.0.0.1:1/0", timeout_s=0.3)
    alone = SharedState(options, "a", replica)
    started = time.monotonic()
    assert await alone.start(within_s=0.3) is False
    alone.routed(URL, 100.0, prompt(4, seed=1))
    alone.decided(SharedWorker(OTHER_URL, Intent.SERVING))
    assert alone.others_load(URL) == OthersLoad()
    await alone.stop()
    assert time.monotonic() - started < HANG_S
    assert alone.stats.dropped == {Dropped.DISCONNECTED: 1}
    assert alone.stats.lost[Lost.UNREACHABLE] > 0


async def test_a_password_is_asked_for() -> None:
    async with redis_server(password="s3cret") as guarded:
        with capture_logs() as logs:
            async with sharing(guarded, Replica(), "a", within_s=0.05, password="wrong") as a:
                await until(lambda: a.stats.lost[Lost.AUTH] > 0)
                assert not a.stats.connected
            async with sharing(guarded, Replica(), "b") as b:
                await until(lambda: b.stats.connected)
            unix = f"unix://:s3cret@{guarded.directory}/redis.sock"
            async with sharing(guarded, Replica(), "c", url=unix, password=None) as c:
                await until(lambda: c.stats.connected)
        assert "s3cret" not in str(logs)


async def test_a_gateway_that_fails_to_listen_harms_only_itself(server: RedisServer) -> None:
    broken = Replica(fails=True)
    async with sharing(server, Replica(loads={URL: (1, 1)}), "a") as a, sharing(server, broken, "b") as b:
        a.routed(URL, 100.0, prompt(1, seed=1))
        a.decided(SharedWorker(OTHER_URL, Intent.SERVING))
        await until(lambda: b.stats.ignored[Ignored.HOST_FAILED] >= 4)
        broken.fails = False
        a.routed(URL, 100.0, prompt(1, seed=2))
        await until(lambda: len(broken.predicted) == 1)


async def test_rubbish_in_redis_is_counted_and_passed_over(server: RedisServer) -> None:
    replica = Replica()
    rubbish: list[tuple[dict[bytes, bytes], Ignored]] = [
        ({b"2": b""}, Ignored.UNKNOWN_VERSION),
        ({VERSION: b""}, Ignored.MALFORMED),
        ({VERSION: b"\xc1"}, Ignored.MALFORMED),
        ({VERSION: b"\x91" * 5000}, Ignored.MALFORMED),
        ({VERSION: b"\xdd\xff\xff\xff\xff"}, Ignored.MALFORMED),
        ({VERSION: b"\x00" * (MAX_ENTRY_BYTES + 1)}, Ignored.TOO_LARGE),
        ({VERSION: msgspec.msgpack.encode(["x", [[URL, None, "tokens", 16, 5, b"123"]]])}, Ignored.MALFORMED),
        ({VERSION: msgspec.msgpack.encode(["x", [[URL, -1, 5]]])}, Ignored.MALFORMED),
    ]
    async with sharing(server, replica, "b") as b, server.client() as client:
        for name in ("routed", "loads", "workers"):
            for fields, _ in rubbish:
                await client.xadd(f"kvroute:{name}", fields)
        worker = msgspec.msgpack.encode(["x", [["gopher://y", "serving", None, [], None, 5, "x"]]])
        future = msgspec.msgpack.encode(["x", [[OTHER_URL, "serving", None, [], None, 2**53, "x"]]])
        await client.xadd("kvroute:workers", {VERSION: worker})
        await client.xadd("kvroute:workers", {VERSION: future})
        expected = {reason: 0 for _, reason in rubbish} | {Ignored.BAD_URL: 1, Ignored.FROM_THE_FUTURE: 1}
        for _, reason in rubbish:
            expected[reason] += 3
        await until(lambda: b.stats.ignored == expected)
        async with sharing(server, Replica(loads={URL: (1, 1)}), "a") as a:
            a.routed(URL, 100.0, prompt(1, seed=1))
            await until(lambda: len(replica.predicted) == 1 and b.others_load(URL).requests == 1)
        assert b.stats.connected
        assert replica.adopted == []


async def test_a_key_that_holds_something_else_costs_its_stream_alone(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "LOOK_AGAIN_S", 0.1)
    replica = Replica()
    async with server.client() as client:
        await client.set("kvroute:routed", b"not a stream")
        async with (
            sharing(server, Replica(loads={URL: (1, 1)}), "a") as a,
            sharing(server, replica, "b") as b,
        ):
            await until(lambda: b.others_load(URL).requests == 1)
            assert b.stats.ignored[Ignored.WRONG_TYPE] > 0
            for n in range(1, 6):
                a.routed(URL, 100.0, prompt(1, seed=n))
                await until(lambda n=n: a.stats.dropped == {Dropped.REFUSED: n})
            assert a.stats.lost == {Lost.ERROR_REPLY: 5}
            assert (a.stats.connected, a.stats.disconnects) == (True, 0)
            await client.delete("kvroute:routed")
            a.routed(URL, 100.0, prompt(1, seed=2))
            await until(lambda: replica.predicted == [("w~1", prompt(1, seed=2))])
    assert streams.LOAD_TTL_S > 2 * streams.HEARTBEAT_S


async def test_a_server_whose_clock_is_behind_is_heard_too(server: RedisServer) -> None:
    """Ids of entries are the server's time: one that has replaced another may give lower ones."""
    replica = Replica()
    async with sharing(server, Replica(), "a") as a, sharing(server, replica, "b") as b:
        await until(lambda: a.stats.connected and b.stats.connected)
        future_ms = int((time.time() + 3600) * 1000)
        for name in b._reader._last | {"kvroute:routed": ""}:
            b._reader._last[name] = f"{future_ms}-0"
        server.kill()
        await until(lambda: not a.stats.connected and not b.stats.connected)
        await server.start()
        await until(lambda: a.stats.connected and b.stats.connected)
        a.routed(URL, 100.0, prompt(1, seed=1))
        await until(lambda: len(replica.predicted) == 1)


# --- snapshots ---------------------------------------------------------------------------------


async def test_a_snapshot_is_stored_in_chunks_and_read_back(server: RedisServer) -> None:
    data = random.Random(3).randbytes(700_001)
    async with (
        sharing(server, Replica(), "a") as a,
        sharing(server, Replica(), "b") as b,
        server.client() as client,
    ):
        assert await b.fetch_snapshot("index") is None
        assert not b.stats.snapshot_failures
        for version, blob in ((1, b"old"), (2, data), (3, b""), (4, data)):
            assert await a.store_snapshot("index", blob, version)
            found = await b.fetch_snapshot("index")
            assert found is not None
            assert (found.data, found.version) == (blob, version)
            assert 0 <= found.age_s < 2
        names = [key async for key in client.scan_iter("kvroute:snapshot:*")]
        assert len(names) == 1 + 3  # the chunks of earlier ones are gone
        for name in names:
            assert 0 < await client.pttl(name) <= 3_600_000


async def test_a_snapshot_replaced_while_it_is_read_is_read_again(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sharing(server, Replica(), "a") as a:
        assert await a.store_snapshot("index", b"old", 1)
        header = a._snapshots._header
        seen = [await header("index", strict=True)]
        assert await a.store_snapshot("index", b"new", 2)

        async def seen_before(name: str, *, strict: bool) -> object:
            return seen.pop() if seen else await header(name, strict=strict)

        monkeypatch.setattr(a._snapshots, "_header", seen_before)
        found = await a.fetch_snapshot("index")
        assert found is not None
        assert (found.data, found.version) == (b"new", 2)
        assert not a.stats.snapshot_failures


async def test_a_broken_snapshot_is_none(server: RedisServer) -> None:
    data = b"x" * 600_000
    async with sharing(server, Replica(), "a") as a, server.client() as client:
        assert await a.store_snapshot("index", data, 1)
        chunks = sorted([key async for key in client.scan_iter("kvroute:snapshot:index:*")])
        spoiled = [
            (client.set(chunks[1], b"y" * 262_144), SnapshotFailure.MALFORMED),
            (client.set(chunks[1], b"short"), SnapshotFailure.MALFORMED),
            (client.delete(chunks[2]), SnapshotFailure.MALFORMED),
            (client.delete(chunks[0]), SnapshotFailure.GONE),
            (client.set("kvroute:snapshot:index", b"\x95rubbish"), SnapshotFailure.MALFORMED),
            (client.set("kvroute:snapshot:index", b"\x00" * 10_000_000), SnapshotFailure.MALFORMED),
            (client.delete("kvroute:snapshot:index"), None),
            (client.lpush("kvroute:snapshot:index", b"a list"), SnapshotFailure.CALL_FAILED),
        ]
        for spoil, reason in spoiled:
            a.stats.snapshot_failures.clear()
            await spoil
            assert await a.fetch_snapshot("index") is None
            assert a.stats.snapshot_failures == ({reason: 1} if reason else {})
        assert await a.store_snapshot("other", b"z", 2)
        assert (await a.fetch_snapshot("other")).data == b"z"  # type: ignore[union-attr]
