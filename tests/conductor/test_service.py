"""The conductor as a process: engines' real events in, the truth out, also after a restart."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from xxhash import xxh3_128

from kvroute.conductor import service
from kvroute.conductor.core import Engine, Service
from kvroute.conductor.events import Watermark
from kvroute.conductor.index import Holder, PrefixIndex
from kvroute.conductor.keys import token_keys
from kvroute.conductor.remote import RemoteConductor, RemoteOptions
from kvroute.conductor.service import ConductorOptions, ConductorServer, conducting
from kvroute.conductor.snapshot import Snapshot
from kvroute.conductor.snapshot_format import End, Rank, Section, framed
from kvroute.listening import CannotListen
from kvroute.loadtests.mock_engine import MockFleet, MockOptions
from kvroute.types import Trust
from tests.conductor.storm import MODEL, Driven, Prompts, known
from tests.kit import HANG_S, until
from tests.process import clean_environment

BLOCK = 16
END_BYTES = len(framed(End(bytes(16))))
ENGINES = MockOptions(
    engines=2,
    speed=math.inf,
    kv_events=True,
    block_size_tokens=BLOCK,
    kv_blocks=120,
    kv_event_replay_batches=20,
    adapters=("ad1",),
)


class Town:
    """Engines under traffic, and how a conductor is told of them."""

    def __init__(self, fleet: MockFleet, seed: int) -> None:
        self.fleet = fleet
        self.engines = [Driven(engine, BLOCK) for engine in fleet.engines]
        self.dice = random.Random(seed)
        self.prompts = Prompts(self.dice, BLOCK, 12)

    def traffic(self, requests: int) -> None:
        """More than the engines' buffers replay when there are many."""
        for _ in range(requests):
            self.dice.choice(self.engines).run(self.prompts.draw(), self.dice.randrange(1, 40))

    @property
    def services(self) -> tuple[Service, ...]:
        return tuple(
            Service(one.source.endpoint, f"p{i}", "mock", BLOCK, replay_endpoint=one.source.replay_endpoint)
            for i, one in enumerate(self.engines)
        )

    def holders(self, server: ConductorServer) -> list[Holder]:
        registrations = server.conductor.registrations
        return [Holder(registrations[service.key].worker_id) for service in self.services]

    async def caught_up(self, server: ConductorServer) -> None:
        """Wait until every engine's last batch is in the index."""
        await until(server.restored.is_set)
        feed = server.conductor.feed

        def all_applied() -> bool:
            for engine, holder in zip(self.engines, self.holders(server), strict=True):
                health = feed.health(holder.worker_id)
                if health is None or health.holders[0].last_seq != engine.last_seq:
                    return False
            return True

        for holder in self.holders(server):
            await asyncio.wait_for(feed.settled(holder.worker_id), HANG_S)
        await until(all_applied)

    async def followed(self, server: ConductorServer, requests: int) -> None:
        """Traffic of which nothing is lost: a subscription may not stand yet, and the engines' buffers replay
        little.
        """
        for _ in range(requests):
            self.traffic(1)
            await self.caught_up(server)

    def held(self, server: ConductorServer) -> list[set[int]]:
        return [known(server.conductor.index, holder) for holder in self.holders(server)]

    def truth(self) -> list[set[int]]:
        return [engine.truth() for engine in self.engines]

    def trusts(self, server: ConductorServer) -> list[Trust]:
        return [server.conductor.trust(holder.worker_id) for holder in self.holders(server)]


@contextlib.asynccontextmanager
async def town(seed: int = 1, requests: int = 4) -> AsyncIterator[Town]:
    async with MockFleet(ENGINES) as fleet:
        town = Town(fleet, seed)
        town.traffic(requests)
        yield town


def options(tmp_path: Path, *services: Service, **fields: Any) -> ConductorOptions:
    return ConductorOptions(port=0, services=services, snapshot_file=tmp_path / "snapshot", **fields)


def client(server: ConductorServer) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=HANG_S)


async def test_registered_engines_are_answered_for_as_they_are(tmp_path: Path) -> None:
    async with (
        town(requests=0) as engines,
        conducting(ConductorOptions(port=0)) as server,
        client(server) as http,
    ):
        for service in engines.services:
            body = {name: getattr(service, name) for name in service.__struct_fields__}
            answer = await http.post("/register", json=body)
            assert answer.status_code == 200, answer.text
        await until(lambda: engines.trusts(server) == [Trust.EXACT] * 2)
        await engines.followed(server, 60)
        assert engines.held(server) == engines.truth()
        await until(lambda: engines.trusts(server) == [Trust.EXACT] * 2)
        hits = 0
        for _ in range(60):
            ids, adapter, salt = engines.prompts.draw()
            body = {"model": "mock", "token_ids": list(ids), "block_size": BLOCK}
            body |= {"lora_name": adapter, "cache_salt": salt}
            answer = (await http.post("/query", json=body)).json()["default"]
            for i, engine in enumerate(engines.engines):
                root = root_of(adapter, salt)
                tokens = engine.cached_tokens(list(token_keys(ids, root, BLOCK).keys))
                assert answer[f"p{i}"] == {
                    "longest_matched": tokens, "GPU": tokens, "DP": {"0": tokens}, "CPU": 0, "DISK": 0
                }  # fmt: skip
                hits += tokens > 0
        assert hits > 20
        services = (await http.get("/services")).json()["services"]
        assert [(one["InstanceID"], one["Trust"]) for one in services] == [("p0", "exact"), ("p1", "exact")]
        await http.post("/unregister", json={"instance_id": "p0"})
        await http.post("/unregister", json={"instance_id": "p1"})
        index = server.conductor.index
        await until(lambda: index.blocks.blocks == 0)
        index.check_integrity()


def root_of(adapter: str | None, salt: str | None) -> int:
    return replace(MODEL, adapter=adapter, cache_salt=salt).root("ids")


async def stopped(engines: Town, tmp_path: Path) -> None:
    """A conductor has learnt of the engines, and is gone."""
    async with conducting(options(tmp_path, *engines.services)) as server:
        await engines.caught_up(server)
        await engines.followed(server, 60)
    assert server.snapshots["saved"] == 1


async def test_a_restarted_conductor_goes_on_where_it_was(tmp_path: Path) -> None:
    async with town() as engines:
        await stopped(engines, tmp_path)
        for requests in (0, 3):  # while it is away
            engines.traffic(requests)
            async with conducting(options(tmp_path)) as server:
                await engines.caught_up(server)
                assert server.snapshots["restored"] == 2
                assert engines.held(server) == engines.truth()
                # Their buffers have far less than what is known, so it came from the file.
                assert all(engine.last_seq > 40 for engine in engines.engines)
                await engines.followed(server, 20)
                assert engines.held(server) == engines.truth()
                server.conductor.index.check_integrity()


async def test_an_engine_that_restarted_meanwhile_leaves_no_phantom(tmp_path: Path) -> None:
    async with town() as engines:
        await stopped(engines, tmp_path)
        for requests in (0, 3, None):  # since its restart; None: until it is past where it was before
            before = [engine.last_seq for engine in engines.engines]
            for engine in engines.fleet.engines:
                await engine.restart()
            if requests is None:
                while any(one.last_seq <= seq for one, seq in zip(engines.engines, before, strict=True)):
                    engines.traffic(1)
            engines.traffic(requests or 0)
            async with conducting(options(tmp_path)) as server:
                await (nothing_held(engines, server) if requests == 0 else engines.caught_up(server))
                assert server.snapshots["restored"] == 2
                assert_no_phantom(engines, server)
                engines.traffic(20)
                await engines.caught_up(server)
                assert_no_phantom(engines, server)
                assert all(engines.held(server))


def assert_no_phantom(engines: Town, server: ConductorServer) -> None:
    for held, truth in zip(engines.held(server), engines.truth(), strict=True):
        assert held <= truth


async def nothing_held(engines: Town, server: ConductorServer) -> None:
    await until(server.restored.is_set)
    await until(lambda: engines.held(server) == [set(), set()])


async def test_batches_that_nobody_can_replay_any_more_are_not_passed_over(tmp_path: Path) -> None:
    async with town() as engines:
        await stopped(engines, tmp_path)
        engines.traffic(80)
        async with conducting(options(tmp_path)) as server:
            await engines.caught_up(server)
            assert_no_phantom(engines, server)
            assert Trust.EXACT not in engines.trusts(server)


async def test_until_its_engine_confirms_it_a_restored_index_is_judged_by_load_alone(tmp_path: Path) -> None:
    async with town() as engines:
        await stopped(engines, tmp_path)
        truth = engines.truth()
        for engine in engines.fleet.engines:
            await engine.stop()
        async with conducting(options(tmp_path)) as server, client(server) as http:
            await until(server.restored.is_set)
            assert engines.trusts(server) == [Trust.LOAD_ONLY] * 2
            assert engines.held(server) == truth
            services = (await http.get("/services")).json()["services"]
            assert [(one["InstanceID"], one["Trust"]) for one in services] == [
                ("p0", "load_only"),
                ("p1", "load_only"),
            ]


async def test_it_answers_while_it_restores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = asyncio.Event()
    real = Snapshot.load

    async def slow(self: Snapshot, worker: Service | Engine, index: PrefixIndex, worker_id: str) -> Any:
        await go_on.wait()
        return await real(self, worker, index, worker_id)

    async with town() as engines:
        await stopped(engines, tmp_path)
        saved = (tmp_path / "snapshot").read_bytes()
        monkeypatch.setattr(Snapshot, "load", slow)
        async with conducting(options(tmp_path)) as server, client(server) as http:
            ready = await http.get("/readyz")
            await until(lambda: server.conductor.restoring == 2)
            ready = await http.get("/readyz")
            assert (ready.status_code, ready.json()) == (200, {"status": "restoring", "restoring": 2})
            services = (await http.get("/services")).json()["services"]
            assert [one["Trust"] for one in services] == ["load_only", "load_only"]
        assert (tmp_path / "snapshot").read_bytes() == saved, "an index half restored replaces no file"
        async with conducting(options(tmp_path)) as server, client(server) as http:
            await until(lambda: server.conductor.restoring == 2)
            await http.post("/unregister", json={"instance_id": "p0"})
            go_on.set()
            await until(server.restored.is_set)
            assert [*server.conductor.registrations] == ["p1|default|0"]
            assert server.conductor.restoring == 0
            assert (await http.get("/readyz")).json() == {"status": "ready", "restoring": 0}


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: data[:16] + b"\x00\x00" + data[18:], "version"),
        (lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:], "corrupt"),
    ],
    ids=["version", "changed"],
)
async def test_a_file_that_cannot_be_used_is_counted_and_the_events_are_asked_for(
    tmp_path: Path, damage: Callable[[bytes], bytes], reason: str
) -> None:
    async with town() as engines:
        async with conducting(options(tmp_path, *engines.services)) as server:
            await engines.caught_up(server)
        path = tmp_path / "snapshot"
        path.write_bytes(damage(path.read_bytes()))
        async with conducting(options(tmp_path, *engines.services)) as server, client(server) as http:
            await engines.caught_up(server)
            assert server.snapshots[f"refused_{reason}"] == 1
            assert engines.held(server) == engines.truth()
            metrics = (await http.get("/metrics")).text
            assert f'kvroute_conductor_snapshots_total{{result="refused_{reason}"}} 1.0' in metrics


async def test_of_too_many_workers_in_a_file_the_rest_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with town() as engines:
        await stopped(engines, tmp_path)
        monkeypatch.setattr(service, "MAX_INSTANCES", 1)
        async with conducting(options(tmp_path)) as server:
            await until(server.restored.is_set)
            assert server.snapshots == {"restored": 1, "skipped_limit": 1}
            assert [*server.conductor.registrations] == ["p0|default|0"]


async def test_a_restored_service_that_cannot_be_followed_is_refused_and_forgotten(tmp_path: Path) -> None:
    async with town() as engines:
        await stopped(engines, tmp_path)
        path = tmp_path / "snapshot"
        good = path.read_bytes()[:-END_BYTES]
        wild = Service("tcp://*:1", "wild", "mock", BLOCK, replay_endpoint="tcp://*:2")
        data = good + framed(Section(wild, (Rank(0, BLOCK, Watermark(5, 5)),)))
        path.write_bytes(data + framed(End(xxh3_128(data).digest())))
        async with conducting(options(tmp_path)) as server:
            await engines.caught_up(server)
            assert (server.snapshots["restored"], server.snapshots["refused_malformed"]) == (2, 1)
            assert [*server.conductor.registrations] == ["p0|default|0", "p1|default|0"]
            assert engines.held(server) == engines.truth()


async def test_configured_services_are_stronger_than_the_file(tmp_path: Path) -> None:
    async with town() as engines:
        await stopped(engines, tmp_path)
        renamed = replace(engines.services[0], additionalsalt="new")
        async with conducting(options(tmp_path, renamed)) as server:
            await until(server.restored.is_set)
            services = [one.service for one in server.conductor.registrations.values()]
            assert sorted(services, key=lambda one: one.key) == [renamed, engines.services[1]]


async def test_gateways_find_their_engines_again(tmp_path: Path) -> None:
    lookup = f"unix://{tmp_path}/lookup"
    async with town() as engines:
        gateway = RemoteConductor(RemoteOptions(lookup, budget_s=5.0, reconnect_min_s=0.01))
        gateway.start()
        for i, engine in enumerate(engines.engines):
            gateway.follow(f"w{i}", f"http://e:{i + 1}", MODEL, [engine.source], block_tokens=BLOCK)
        names = ["w0", "w1"]
        ids, _, _ = prompt = max((engines.prompts.draw() for _ in range(20)), key=lambda one: len(one[0]))
        for engine in engines.engines:
            engine.run((prompt[0], None, None), 1)
        keys = token_keys(ids, MODEL.root("ids"), BLOCK)
        whole = len(keys.keys) * BLOCK

        async def both_exact() -> None:
            found = await gateway.match([keys], names)
            while [match.gpu_tokens for match in found.matches] != [whole, whole]:
                await asyncio.sleep(0.005)
                found = await gateway.match([keys], names)

        for _ in range(2):
            async with conducting(options(tmp_path, lookup=lookup)) as server:
                await asyncio.wait_for(both_exact(), HANG_S)
                assert len(server.conductor.instances) == 2
                metrics = httpx.AsyncClient(base_url=server.url)
                text = (await metrics.get("/metrics")).text
                await metrics.aclose()
                assert "kvroute_conductor_followed_engines 2.0" in text
                assert "kvroute_conductor_lookup_connections 1.0" in text
                assert 'kvroute_conductor_event_last_seq{dp_rank="0",worker="http://e:1"}' in text
                assert 'kvroute_conductor_requests_total{kind="match"}' in text
        assert server.snapshots["restored"] == 2
        await gateway.close()


async def test_addresses_that_are_taken_are_named(tmp_path: Path) -> None:
    async with conducting(ConductorOptions(port=0)) as server:
        port = int(server.url.rpartition(":")[2])
        with pytest.raises(
            CannotListen, match=rf"^port: cannot listen on 127\.0\.0\.1:{port}: Address already"
        ):
            await ConductorServer(ConductorOptions(port=port)).start()
        with pytest.raises(CannotListen, match=r"^lookup: cannot listen on tcp://127"):
            await ConductorServer(ConductorOptions(port=0, lookup=f"tcp://127.0.0.1:{port}")).start()
        with pytest.raises(CannotListen, match=r"^lookup: cannot listen on unix:///nowhere/s: No such file"):
            await ConductorServer(ConductorOptions(port=0, lookup="unix:///nowhere/s")).start()
        with pytest.raises(CannotListen, match=r"^host: cannot resolve 'no\.such\.invalid'"):
            await ConductorServer(ConductorOptions("no.such.invalid", 0)).start()


async def test_the_end_leaves_no_task_and_no_socket(tmp_path: Path) -> None:
    before = asyncio.all_tasks()
    async with town(requests=2) as engines:
        given = options(
            tmp_path, *engines.services, lookup=f"unix://{tmp_path}/lookup", snapshot_interval_s=0.01
        )
        async with conducting(given) as server:
            await until(lambda: server.snapshots["saved"] >= 2)
            assert (tmp_path / "lookup").is_socket()
            url = server.url
        assert not (tmp_path / "lookup").exists()
        with pytest.raises(httpx.ConnectError):
            await httpx.AsyncClient().get(f"{url}/livez")
    await until(lambda: asyncio.all_tasks() <= before)


async def test_the_command_serves_until_it_is_told_to_end(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvroute", "conductor", "--port=0", f"--lookup=unix://{tmp_path}/s"),
        env=clean_environment(KVROUTE_CONDUCTOR__SNAPSHOT_FILE=str(tmp_path / "snapshot")),
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    async with asyncio.timeout(2 * HANG_S):
        said = json.loads(await process.stderr.readline())
        assert (said["event"], said["lookup"]) == ("conductor listening", f"unix://{tmp_path}/s")
        async with httpx.AsyncClient() as http:
            assert (await http.get(said["url"] + "/livez")).json() == {"status": "alive"}
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    assert (tmp_path / "snapshot").exists()


async def test_connections_that_ask_nothing_do_not_shut_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "ASK_WITHIN_S", 1.5)
    async with conducting(ConductorOptions(port=0)) as server, httpx.AsyncClient() as http:
        host, _, port = server.url.partition("://")[2].rpartition(":")
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(service.MAX_REQUESTS + 3)]
        assert (await http.get(server.url + "/livez")).status_code == 503
        async with asyncio.timeout(HANG_S):
            await asyncio.gather(*(reader.read() for reader, _ in idle))  # each is closed
        assert (await http.get(server.url + "/livez")).status_code == 200
        for _, writer in idle:
            writer.close()
