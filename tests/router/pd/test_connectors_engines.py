"""Both legs of each connector, as bytes, at mock engines: what does not fit gets wrong text, or an error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from kvroute.config_pd import PdConfig
from kvroute.loadtests.mock_engine import MockEngine, MockFleet
from kvroute.router.pd.body import leg_body, read_fields, short_prefill
from kvroute.router.pd.connector import Connector, Leg, Pair
from kvroute.router.pd.connectors.p2p_nccl import P2pNcclConnector
from kvroute.router.pd.connectors.registrations import Registrations
from kvroute.router.pd.registry import make_connector
from kvroute.router.workers import Member
from tests.kit import HANG_S, until
from tests.loadtests.pd_kit import PROMPT, check, options, pd, right_text, text
from tests.router.pd.pairs import member, pair

PATH = b"/v1/completions"
REQUEST = {"prompt": PROMPT, "max_tokens": 6, "stop_token_ids": [3], "temperature": 0.0}
FREED = {"nixl": "pulled", "mooncake": "pulled", "sglang": "pulled"}


def at(engine: MockEngine, **config: Any) -> Member:
    """The mocks' bootstrap and P2P ports are those of HTTP."""
    config = {"bootstrap_port": engine.port, "p2p_address": f"127.0.0.1:{engine.port}"} | config
    return member(f"http://127.0.0.1:{engine.port}", **config)


@asynccontextmanager
async def fleet_of(name: str, **more: Any) -> AsyncIterator[MockFleet]:
    async with MockFleet(options(name, **more)) as fleet:
        yield fleet
        check(fleet)


class Sender:
    """Sends legs as the gateway does: a client's fields with the leg's own, the leg's headers."""

    def __init__(self, connector: Connector, legs: Pair, body: dict[str, Any]) -> None:
        fields = read_fields(json.dumps(body).encode())
        assert fields is not None
        self.connector, self.legs, self.fields = connector, legs, fields
        self.client = httpx.AsyncClient(timeout=HANG_S, trust_env=False, verify=False)

    async def run(self) -> httpx.Response:
        """The decode worker's answer."""
        connector, legs = self.connector, self.legs
        async with self.client:
            handoff = await connector.prepare(legs)
            prefill = asyncio.create_task(self.prefill())
            if not connector.is_concurrent:
                handoff = connector.handoff((await prefill).json())
            leg = connector.decode_leg(legs, handoff)
            decode = self.post(legs.decode, leg_body(self.fields, leg.fields), leg)
            answer, prefilled = await asyncio.gather(decode, prefill)
            assert prefilled.status_code == 200, prefilled.text
            if connector.is_concurrent and connector.shortens_prefill:
                connector.handoff(prefilled.json())
            return answer

    async def prefill(self) -> httpx.Response:
        leg = self.connector.prefill_leg(self.legs)
        fields = short_prefill(PATH, self.fields) if self.connector.shortens_prefill else self.fields
        return await self.post(self.legs.prefill, leg_body(fields, leg.fields), leg)

    async def post(self, to: Member, body: bytes, leg: Leg) -> httpx.Response:
        own = {name.decode().lower(): value.decode() for name, value in leg.headers}
        headers = {"x-request-id": self.legs.id} | own
        return await self.client.post(to.worker.url + PATH.decode(), content=body, headers=headers)


@pytest.mark.parametrize("name", ["nixl", "mooncake", "sglang", "p2p-nccl", "shared-storage", "decode-first"])
async def test_decode_answers_with_what_prefill_computed(name: str) -> None:
    async with fleet_of("shared-storage" if name == "decode-first" else name) as fleet:
        prefill, decode = fleet.engines
        legs = pair(at(prefill), at(decode))
        answer = await Sender(make_connector(name, PdConfig()), legs, REQUEST).run()
        assert text(answer) == right_text()
        assert pd(decode)["received_tokens"] >= len(PROMPT) // 16 * 16
        for engine in fleet.engines:
            seen = pd(engine)
            assert not seen["wrong_text"] + seen["unknown"] + seen["order_violations"], seen
            assert seen["stranded_blocks"] == seen["deaths"] == 0
        if name in FREED:
            assert pd(prefill)["released_by"][FREED[name]] == 1


@pytest.mark.parametrize("name", ["sglang", "p2p-nccl", "shared-storage"])
async def test_a_list_of_prompts_where_the_connector_takes_one(name: str) -> None:
    other = [token + 1000 for token in PROMPT]
    async with fleet_of(name) as fleet:
        legs = pair(*map(at, fleet.engines), prompts=2)
        body = REQUEST | {"prompt": [PROMPT, other]}
        answer = await Sender(make_connector(name, PdConfig()), legs, body).run()
        texts = [choice["text"] for choice in answer.json()["choices"]]
        assert texts == [right_text(), right_text(other)]


@pytest.mark.parametrize("name", ["nixl", "mooncake"])
async def test_what_prefill_keeps_is_freed_by_a_release_at_any_decode_worker(name: str) -> None:
    async with fleet_of(name, decode=2) as fleet:
        prefill, first, second = fleet.engines
        legs, connector = pair(at(prefill), at(first)), make_connector(name, PdConfig())
        sender = Sender(connector, legs, REQUEST)
        async with sender.client as client:
            handoff = await connector.prepare(legs)
            answer = await sender.prefill()
            if not connector.is_concurrent:
                handoff = connector.handoff(answer.json())
            assert pd(prefill)["held"]["requests"] == 1
            released = connector.release(legs, handoff)
            assert released is not None
            path, body = released
            refused = await client.post(at(second).worker.url + path, json=body)
            assert refused.status_code == 404
        await until(lambda: pd(prefill)["held"]["requests"] == 0)
        assert pd(prefill)["released_by"]["released"] == 1


async def test_p2p_engines_that_register_need_no_addresses() -> None:
    connector = P2pNcclConnector(PdConfig())
    registered: Registrations = connector.registrations
    await registered.start("127.0.0.1", 0)
    try:
        async with fleet_of("p2p-nccl", register_at=f"tcp://127.0.0.1:{registered.port}") as fleet:
            here = [f"127.0.0.1:{engine.port}" for engine in fleet.engines]
            await until(lambda: registered.address("P", here[0]) == here[0])
            await until(lambda: registered.address("D", here[1]) == here[1])
            legs = pair(*(at(engine, p2p_address=None) for engine in fleet.engines))
            assert text(await Sender(connector, legs, REQUEST).run()) == right_text()
    finally:
        connector.close()
