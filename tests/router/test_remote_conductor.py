"""A gateway that asks a conductor in a process of its own, over a Unix socket and over TCP."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvroute.conductor.service import ConductorOptions, ConductorServer
from kvroute.loadtests.mock_engine import MockFleet, MockOptions
from kvroute.router.server import GatewayServer
from tests.kit import ASKING, HANG_S, fast_config, until

BODY = {"model": "mock", "prompt": list(range(1000, 1300)), "max_tokens": 1}


@asynccontextmanager
async def conductor(lookup: str) -> AsyncIterator[ConductorServer]:
    server = ConductorServer(ConductorOptions(port=0, lookup=lookup))
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def asking(fleet: MockFleet, address: str, **fields: Any) -> AsyncIterator[GatewayServer]:
    config = fast_config(
        policy="prefix_affinity",
        models={"mock": ASKING},
        admin={"enabled": True, "port": 0},
        workers=fleet.urls,
        conductor={"connect": address, "budget_s": HANG_S, **fields},
    )
    server = GatewayServer(config)
    await server.start()
    try:
        wanted = len(fleet.urls)
        await until(lambda: sum(m.state.value == "ready" for m in server.registry.members.values()) == wanted)
        yield server
    finally:
        await server.stop()


async def send(server: GatewayServer, http: httpx.AsyncClient) -> tuple[str, str]:
    """(Worker, decision)."""
    answer = await http.post(server.url + "/v1/completions", json=BODY)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-kvroute-worker"], answer.headers["x-kvroute-decision"]


@pytest.mark.parametrize("kind", ["unix", "tcp"])
async def test_two_gateways_know_by_one_conductor_what_engines_confirmed(kind: str, tmp_path: Path) -> None:
    lookup = f"unix://{tmp_path}/c.sock" if kind == "unix" else "tcp://127.0.0.1:0"
    async with (
        MockFleet(MockOptions(engines=3, speed=math.inf, kv_events=True)) as fleet,
        conductor(lookup) as served,
        httpx.AsyncClient(timeout=HANG_S) as http,
    ):
        assert served.lookup_address is not None
        async with (
            asking(fleet, served.lookup_address) as first,
            asking(fleet, served.lookup_address) as second,
        ):
            index = served.conductor.index
            await until(lambda: len(served.conductor.feed.followed) == 3)
            worker, decision = await send(first, http)
            assert "reason=miss" in decision
            await until(lambda: index.blocks.entries == 300 // 16)
            assert first.knowledge.index.blocks.entries == 0  # it follows nobody itself
            for server in (second, first, second):
                again, decision = await send(server, http)
                assert again == worker
                assert "reason=match; matched_tokens=288" in decision
            remote = second.knowledge.remote
            assert remote is not None
            assert (remote.lookups, dict(remote.fallbacks)) == (2, {})
        await until(lambda: not served.lookups.connections)


async def test_without_its_conductor_a_gateway_goes_by_what_it_routed() -> None:
    async with (
        MockFleet(MockOptions(engines=3, speed=math.inf, kv_events=True)) as fleet,
        httpx.AsyncClient(timeout=HANG_S) as http,
        conductor("tcp://127.0.0.1:0") as served,
    ):
        address = served.lookup_address
        assert address is not None
        async with asking(fleet, address) as server:
            remote = server.knowledge.remote
            assert remote is not None
            await until(lambda: remote.connected)
            worker, _ = await send(server, http)
            await served.stop()
            await until(lambda: not remote.connected)
            again, decision = await send(server, http)
            assert again == worker
            assert "reason=match; matched_tokens=288" in decision
            assert dict(remote.fallbacks) == {"unavailable": 1}
            metrics = server.metrics.render().decode()
            assert 'kvroute_conductor_fallbacks_total{reason="unavailable"} 1.0' in metrics
            assert "kvroute_conductor_connected 0.0" in metrics
