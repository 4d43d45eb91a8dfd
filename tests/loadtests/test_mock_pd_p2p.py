"""The mock engine's P2pNccl side: ids that say where the KV goes, and engines that say where they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import msgspec
import pytest
import zmq
import zmq.asyncio

from kvroute.loadtests.mock_engine import MockFleet
from tests.kit import HANG_S, until
from tests.loadtests.pd_kit import PROMPT, Legs, check, options, pd, right_text, text


@pytest.fixture
async def fleet() -> AsyncIterator[MockFleet]:
    async with MockFleet(options("p2p-nccl")) as fleet:
        yield fleet
        check(fleet)


class IdLegs(Legs):
    """Both legs bear an id that names both engines."""

    def name(self, uuid: str = "0a") -> None:
        p, d = (f"127.0.0.1:{engine.port}" for engine in self.fleet.engines)
        self.client.headers["x-request-id"] = f"___prefill_addr_{p}___decode_addr_{d}_{uuid}"


@pytest.fixture
async def legs(fleet: MockFleet) -> AsyncIterator[IdLegs]:
    async with IdLegs(fleet) as legs:
        legs.name()
        yield legs


async def test_prefill_then_decode(fleet: MockFleet, legs: IdLegs) -> None:
    await legs.post(0, max_tokens=1)
    assert not fleet.engines[0].scheduler.held
    assert len(pd(fleet.engines[1])["parked_ids"]) == 1
    assert text(await legs.post(1)) == right_text()
    assert fleet.engines[1].scheduler.totals.prefill_tokens == 0
    assert not pd(fleet.engines[1])["parked_ids"]


async def test_decode_waits_for_what_is_on_its_way(fleet: MockFleet, legs: IdLegs) -> None:
    await legs.post(0, "handoff_delay=0.1", max_tokens=1)
    assert text(await legs.post(1)) == right_text()
    assert pd(fleet.engines[1])["order_violations"] == 0
    legs.name("0b")
    task = legs.begin(1)
    await until(lambda: bool(fleet.engines[1].scheduler.receiving))
    assert not task.done()
    await legs.leave(task)


async def test_another_prompt_under_the_id_is_wrong_text(fleet: MockFleet, legs: IdLegs) -> None:
    await legs.post(0, max_tokens=1, prompt=PROMPT[::-1])
    await legs.post(0, max_tokens=1, prompt=PROMPT[::-1])
    assert pd(fleet.engines[1])["repeated"] == 1
    assert text(await legs.post(1)) != right_text()
    assert pd(fleet.engines[1])["wrong_text"] == 1


@pytest.mark.parametrize("engine", [0, 1])
async def test_an_id_without_an_address_ends_the_process(fleet: MockFleet, engine: int) -> None:
    async with Legs(fleet) as legs:
        with pytest.raises(httpx.TransportError):
            await legs.post(engine)
    assert pd(fleet.engines[engine])["deaths"] == 1


async def test_engines_tell_their_addresses() -> None:
    with zmq.asyncio.Context.instance().socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        async with MockFleet(options("p2p-nccl", register_at=f"tcp://127.0.0.1:{port}")) as fleet:
            told = {}
            for _ in range(2):
                identity, news = await asyncio.wait_for(router.recv_multipart(), HANG_S)
                told[identity.decode()] = msgspec.msgpack.decode(news)
            addresses = [f"127.0.0.1:{engine.port}" for engine in fleet.engines]
            assert told == {
                address: {"type": kind, "http_address": address, "zmq_address": address}
                for kind, address in zip("PD", addresses, strict=True)
            }
