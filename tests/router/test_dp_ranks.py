"""Data-parallel ranks are targets of their own, and only those that an engine has."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
import zmq
import zmq.asyncio

from kvroute.conductor.index import Holder
from tests.conductor.events.wire import frames, stored
from tests.kit import Engine, ask, gateway, until

BLOCK = 16
IDS = {rank: list(range(rank * 1000, rank * 1000 + 8 * BLOCK)) for rank in (8, 9)}


@asynccontextmanager
async def publishers(ranks: Sequence[int]) -> AsyncIterator[dict[int, tuple[zmq.asyncio.Socket, int]]]:
    context = zmq.asyncio.Context()
    made = {}
    try:
        for rank in ranks:
            socket = context.socket(zmq.PUB)
            made[rank] = socket, socket.bind_to_random_port("tcp://127.0.0.1")
        yield made
    finally:
        context.destroy(linger=0)


def ranked(ports: dict[int, tuple[zmq.asyncio.Socket, int]]) -> Engine:
    """An engine that tells a publisher per rank."""
    return Engine(
        kv_event_sources={
            str(rank): {"endpoint": f"tcp://*:{port}", "replay_endpoint": None, "topic": ""}
            for rank, (_, port) in ports.items()
        }
    )


@pytest.mark.parametrize("rank", [8, 9])
async def test_the_rank_that_holds_a_prompt_is_named_and_no_other(rank: int) -> None:
    async with (
        publishers((8, 9)) as made,
        ranked(made) as engine,
        gateway(engine, policy="prefix_affinity", models={"m": {"source": "engine"}}) as server,
    ):
        (member,) = server.registry.members.values()
        held = server.knowledge.index.held_blocks
        hashes = range(1, 9)
        while held(member.worker.id) < 16:  # again until the subscriptions stand
            for at, (socket, _) in made.items():
                await socket.send_multipart(frames(0, stored(hashes, IDS[at], block_size=BLOCK), rank=at))
            await asyncio.sleep(0.02)
        assert set(server.knowledge.index.holders_of(member.worker.id)) == {
            Holder(member.worker.id, 8),
            Holder(member.worker.id, 9),
        }
        body = {"model": "m", "prompt": IDS[rank] + [1, 2, 3]}
        assert (await ask(server.url, "/v1/completions", body)).status == 200
        assert (await ask(server.url, "/v1/completions", {"model": "m", "prompt": [7] * 64})).status == 200
        known, unknown = engine.received
        heads = [(name.lower(), value) for name, value in known.headers]
        assert (b"x-data-parallel-rank", str(rank).encode()) in heads
        assert not [name for name, _ in unknown.headers if name.lower() == b"x-data-parallel-rank"]
        metrics = server.metrics.render().decode()
        assert set(re.findall(r'kvroute_kv_events_last_seq\{dp_rank="(\d+)"', metrics)) == {"8", "9"}
        await until(lambda: member.requests == 0)
