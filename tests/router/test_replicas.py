"""Several gateways on one real Redis: what one routed, carries or was told, the others know."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from kvroute.clock import monotonic
from kvroute.config_groups import WorkerConfig
from kvroute.router.request_view import parse_request
from kvroute.router.server import GatewayServer
from tests.kit import CHAT, HANG_S, Engine, ask, gateway, until
from tests.redis import RedisServer, redis_server
from tests.router.edge import EVENTS, Lasting, first_chunk

COMPLETIONS = "/v1/completions"
PROMPT = "The quick brown fox. " * 400


@asynccontextmanager
async def replica(redis: RedisServer, *engines: Engine, **fields: Any) -> AsyncIterator[GatewayServer]:
    fields = {"policy": "prefix_affinity", **fields}
    async with gateway(*engines, redis={"url": redis.url}, **fields) as server:
        yield server


def sharing(*servers: GatewayServer) -> bool:
    states = [server.replicas for server in servers]
    return all(s is not None and s.state.stats.replicas == len(servers) - 1 for s in states)


def matched_tokens(server: GatewayServer, body: dict[str, str]) -> int:
    """What the worker that holds most of it is thought to hold."""
    headers = {b"content-type": b"application/json"}
    request = parse_request(COMPLETIONS.encode(), headers, json.dumps(body).encode())
    knowledge = server.knowledge
    eligible = server.registry.eligible("m", monotonic())
    return max(match.tokens for match in knowledge.match(knowledge.prompt(request), eligible))


async def test_a_prefix_routed_by_one_is_found_by_the_other() -> None:
    async with (
        redis_server() as redis,
        Engine() as one,
        Engine() as two,
        Engine() as three,
        replica(redis, one, two, three) as a,
        replica(redis, one, two, three) as b,
    ):
        await until(lambda: sharing(a, b))
        held = b.knowledge.index.held_blocks
        for number in range(20):
            body = {"model": "m", "prompt": f"{number} {PROMPT}"}
            told = await ask(a.url, COMPLETIONS, body)
            blocks = len(f"{number} {PROMPT}") // 512
            await until(lambda n=number, k=blocks: sum(map(held, b.registry.members)) == (n + 1) * k)
            found = await ask(b.url, COMPLETIONS, body)
            assert found.header("x-kvroute-worker") == told.header("x-kvroute-worker")
            assert "reason=match" in (found.header("x-kvroute-decision") or "")


async def test_load_of_one_counts_in_the_choice_of_the_other() -> None:
    async with (
        redis_server() as redis,
        Engine(Lasting(EVENTS[0])) as busy,
        Engine(Lasting(EVENTS[0])) as idle,
        replica(redis, busy, idle, policy="least_loaded") as a,
        replica(redis, busy, idle, policy="least_loaded") as b,
    ):
        await until(lambda: sharing(a, b))
        for member in a.registry.members.values():
            if member.worker.url == idle.url:
                a.registry.drain(member)
        clients = [await first_chunk(a, CHAT, {"model": "m", "stream": True}) for _ in range(6)]
        load = {m.worker.url: m.load for m in b.registry.members.values()}
        await until(lambda: load[busy.url].requests == 6)
        for count in range(1, 6):
            clients.append(await first_chunk(b, CHAT, {"model": "m", "stream": True}))
            assert (load[busy.url].requests, load[idle.url].requests) == (6, count)
        for client in clients:
            client.abort()
        await until(lambda: load[busy.url].requests == load[idle.url].requests == 0)


async def test_a_worker_added_or_removed_at_one_is_so_at_the_other() -> None:
    async with (
        redis_server() as redis,
        Engine() as one,
        Engine() as two,
        replica(redis, one, admin={"enabled": True, "port": 0}) as a,
        replica(redis, one) as b,
        httpx.AsyncClient() as http,
    ):
        await until(lambda: sharing(a, b))
        (await http.post(f"{a.admin_url}/admin/workers", json={"url": two.url})).raise_for_status()

        def urls() -> set[str]:
            return {m.worker.url for m in b.registry.members.values()}

        await until(lambda: urls() == {one.url, two.url})
        added = next(m.worker.id for m in a.registry.members.values() if m.worker.url == two.url)
        (await http.delete(f"{a.admin_url}/admin/workers/{added}")).raise_for_status()
        await until(lambda: urls() == {one.url})
        assert {m.worker.url for m in a.registry.members.values()} == {one.url}


async def test_killing_redis_under_load_fails_no_request() -> None:
    async with (
        redis_server() as redis,
        Engine() as one,
        Engine() as two,
        replica(redis, one, two) as a,
        replica(redis, one, two) as b,
    ):
        await until(lambda: sharing(a, b))
        statuses: list[int] = []
        stop = asyncio.Event()

        async def load(server: GatewayServer, seed: int) -> None:
            number = 0
            while not stop.is_set():
                number += 1
                answer = await ask(
                    server.url, COMPLETIONS, {"model": "m", "prompt": f"{seed} {number % 7} {PROMPT}"}
                )
                statuses.append(answer.status)

        clients = [asyncio.create_task(load(server, seed)) for server in (a, b) for seed in range(4)]
        assert a.replicas is not None
        assert b.replicas is not None
        stats = [a.replicas.state.stats, b.replicas.state.stats]
        await until(lambda: len(statuses) > 100)
        redis.kill()
        await until(lambda: not any(one.connected for one in stats))
        before = len(statuses)
        await until(lambda: len(statuses) > before + 300)
        await redis.start()
        await until(lambda: all(one.connected for one in stats))
        before = len(statuses)
        await until(lambda: len(statuses) > before + 100)
        stop.set()
        await asyncio.gather(*clients)
        assert set(statuses) == {200}
        body = {"model": "m", "prompt": f"after {PROMPT}"}
        worker = (await ask(a.url, COMPLETIONS, body)).header("x-kvroute-worker")
        await until(lambda: matched_tokens(b, body) > 0)
        assert (await ask(b.url, COMPLETIONS, body)).header("x-kvroute-worker") == worker


async def test_a_fresh_replica_knows_what_was_routed_before_it_came() -> None:
    async with (
        redis_server() as redis,
        Engine() as one,
        Engine() as two,
        Engine() as three,
        replica(redis, one, two, three) as a,
    ):
        bodies = [{"model": "m", "prompt": f"{number} {PROMPT}"} for number in range(12)]
        told = [(await ask(a.url, COMPLETIONS, body)).header("x-kvroute-worker") for body in bodies]
        assert a.replicas is not None
        stats = a.replicas.state.stats
        await until(lambda: stats.told == len(bodies))
        async with replica(redis, one, two, three) as b:
            held = b.knowledge.index.held_blocks
            await until(lambda: sum(map(held, b.registry.members)) == 12 * (len(PROMPT) // 512))
            found = [(await ask(b.url, COMPLETIONS, body)).header("x-kvroute-worker") for body in bodies]
        assert found == told


async def test_a_redis_that_does_not_answer_does_not_hold_up_the_start() -> None:
    async with redis_server() as redis, Engine() as one:
        redis.pause()
        started = time.monotonic()
        async with replica(redis, one) as server:
            assert (await ask(server.url, COMPLETIONS, {"model": "m", "prompt": PROMPT})).status == 200
            assert time.monotonic() - started < HANG_S
            assert server.replicas is not None
            assert not server.replicas.state.stats.connected
            assert "kvroute_redis_connected 0.0" in server.metrics.render().decode()
        redis.resume()


async def test_a_worker_with_a_key_of_its_own_is_not_shared() -> None:
    async with (
        redis_server() as redis,
        Engine() as one,
        Engine() as two,
        Engine() as three,
        replica(redis, one, admin={"enabled": True, "port": 0}) as a,
        replica(redis, one) as b,
        httpx.AsyncClient() as http,
    ):
        await until(lambda: sharing(a, b))
        for worker in ({"url": two.url, "api_key": "k"}, {"url": three.url}):
            (await http.post(f"{a.admin_url}/admin/workers", json=worker)).raise_for_status()
        await until(lambda: len(b.registry.members) == 2)
        assert {m.worker.url for m in b.registry.members.values()} == {one.url, three.url}


async def test_taking_an_old_incarnation_out_leaves_the_new_one_at_the_others() -> None:
    async with (
        redis_server() as redis,
        Engine(Lasting(EVENTS[0])) as one,
        replica(redis, one, admin={"enabled": True, "port": 0}) as a,
        replica(redis, one) as b,
        httpx.AsyncClient() as http,
    ):
        await until(lambda: sharing(a, b))
        client = await first_chunk(a, CHAT, {"model": "m", "stream": True})
        (old,) = a.registry.members.values()
        a.registry.replace(old)  # it drains: a stream is still on it
        await until(lambda: len(a.registry.members) == 2)
        url = f"{a.admin_url}/admin/workers/{old.worker.id}"
        (await http.delete(url)).raise_for_status()
        (
            await http.post(f"{a.admin_url}/admin/workers", json={"url": "http://127.0.0.1:9"})
        ).raise_for_status()
        await until(lambda: len(b.registry.members) == 2)  # told after, so the other was not told before
        assert one.url in {m.worker.url for m in b.registry.members.values()}
        client.abort()


async def test_a_worker_that_comes_later_comes_with_the_load_of_the_others() -> None:
    async with (
        redis_server() as redis,
        Engine() as one,
        Engine(Lasting(EVENTS[0])) as busy,
        replica(redis, busy) as a,
        replica(redis, one) as b,
    ):
        await until(lambda: sharing(a, b))
        clients = [await first_chunk(a, CHAT, {"model": "m", "stream": True}) for _ in range(3)]
        assert b.replicas is not None
        state = b.replicas.state
        await until(lambda: state.others_load(busy.url).requests == 3)
        member = b.registry.add(WorkerConfig(url=busy.url))
        assert member.load.requests == 3
        for client in clients:
            client.abort()
