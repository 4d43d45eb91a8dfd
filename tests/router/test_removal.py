"""Workers that leave and return under traffic."""

from __future__ import annotations

import asyncio
import contextlib
import itertools

from kvroute.config_groups import WorkerConfig
from kvroute.router.workers import State
from tests.kit import CHAT, HANG_S, Client, Engine, Received, Wire, ask, gateway, until

from .probed import Held, member_of


async def test_a_stream_of_a_removed_worker_ends_whole_and_its_url_can_return() -> None:
    going_on = asyncio.Event()

    async def stream(request: Received, wire: Wire) -> None:
        await wire.start_stream()
        await wire.chunk(b"data: 1\n\n")
        await going_on.wait()
        await wire.chunk(b"data: [DONE]\n\n")
        await wire.chunk(b"")

    async with Engine(script=stream) as engine, gateway(engine) as server:
        old = member_of(server, engine)
        client = await Client.connect(server.url)
        await client.send(CHAT, {"model": "m", "stream": True})
        status, _, _ = await client.head()
        assert (status, await client.chunk()) == (200, b"data: 1\n\n")
        server.registry.remove(old)
        assert (old.state, old.load.requests) == (State.DRAINING, 1)
        new = server.registry.add(WorkerConfig(url=engine.url))
        await until(lambda: new.state is State.READY)
        second = await Client.connect(server.url)
        await second.send(CHAT, {"model": "m", "stream": True})
        await second.head()
        assert (old.load.requests, new.load.requests) == (1, 1)
        going_on.set()
        assert (await client.chunk(), await client.chunk()) == (b"data: [DONE]\n\n", b"")
        assert [await second.chunk() for _ in range(3)] == [b"data: 1\n\n", b"data: [DONE]\n\n", b""]
        await until(lambda: new.load.requests == 0)
        assert (old.state, old.load.requests) == (State.GONE, 0)
        assert list(server.registry.members.values()) == [new]
        client.close()
        second.close()


async def test_what_the_index_knew_of_a_worker_goes_with_it() -> None:
    held = Held()
    held.release()
    async with Engine(script=held) as engine, gateway(engine, policy="prefix_affinity") as server:
        old = member_of(server, engine)
        for number in range(50):
            await ask(server.url, "/v1/completions", {"model": "m", "prompt": f"{number}" * 3000})
        assert server.knowledge.index.held_blocks(old.worker.id) >= 50
        held.released.clear()
        waiting = asyncio.create_task(
            ask(server.url, "/v1/completions", {"model": "m", "prompt": "last" * 1000})
        )
        await until(lambda: held.count == 51)
        server.registry.remove(old)
        held.release()
        assert (await waiting).status == 200
        await until(lambda: server.knowledge.index.entries == 0)
        assert server.knowledge.index.held_blocks(old.worker.id) == 0


async def test_every_request_ends_while_workers_come_and_go() -> None:
    async def work(_request: Received, wire: Wire) -> None:
        await asyncio.sleep(0.02)
        await wire.answer(200, b"{}")

    async with Engine(script=work) as stable, Engine(script=work) as restless, gateway(stable) as server:
        numbers = itertools.count()
        statuses: list[int] = []

        async def churn() -> None:
            for turn in itertools.count():
                member = server.registry.add(WorkerConfig(url=restless.url))
                if turn % 4:  # else it may leave before it is ready
                    await until(lambda member=member: member.state is State.READY)  # type: ignore[misc]
                await asyncio.sleep(0.1)
                server.registry.remove(member)

        async def send() -> None:
            client = await Client.connect(server.url)
            while next(numbers) < 1000:
                statuses.append((await client.ask(CHAT, {"model": "m"})).status)
            client.close()

        churning = asyncio.create_task(churn())
        async with asyncio.timeout(2 * HANG_S):
            await asyncio.gather(*(send() for _ in range(16)))
        churning.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await churning
        assert statuses == [200] * 1000
        assert len(restless.received) > 100
        assert len(stable.received) + len(restless.received) == 1000
        for member in list(server.registry.members.values()):
            if member.endpoint.url == restless.url:
                server.registry.remove(member)
        await until(lambda: len(server.registry.members) == 1)


async def test_every_request_is_answered_while_an_engine_dies_and_returns() -> None:
    async with Engine() as stable, Engine() as mortal, gateway(stable, mortal) as server:
        numbers = itertools.count()
        answers: list[int] = []

        async def send() -> None:
            client = await Client.connect(server.url)
            while next(numbers) < 600:
                answers.append((await client.ask(CHAT, {"model": "m"})).status)
                await asyncio.sleep(0.005)
            client.close()

        async def die_and_return() -> None:
            while True:
                await asyncio.sleep(0.1)
                await mortal.stop()
                await asyncio.sleep(0.1)
                await mortal.start()

        dying = asyncio.create_task(die_and_return())
        async with asyncio.timeout(2 * HANG_S):
            await asyncio.gather(*(send() for _ in range(4)))
        dying.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await dying
        assert answers == [200] * 600
