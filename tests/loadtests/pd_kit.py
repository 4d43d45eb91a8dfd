"""A fleet of mock engines of the prefill and the decode role, and requests to them by role."""

from __future__ import annotations

import asyncio
import math
import zlib
from array import array
from typing import Any

import httpx

from kvroute.loadtests.mock_engine import MockEngine, MockFleet, MockOptions
from kvroute.loadtests.mock_engine.routes import truth
from kvroute.loadtests.mock_engine.tokens import plain_words
from tests.kit import HANG_S

BLOCK = 16
PROMPT = list(range(100, 100 + 5 * BLOCK + 3))
"""Six blocks, the last one not full."""
NULLS = {"remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None}
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, **NULLS}


def options(connector: str, prefill: int = 1, decode: int = 1, both: int = 0, **more: Any) -> MockOptions:
    settings: dict[str, Any] = {"speed": math.inf, "kv_blocks": 64} | more
    engines = prefill + decode + both
    return MockOptions(connector=connector, engines=engines, prefill=prefill, decode=decode, **settings)


def pd(engine: MockEngine) -> dict[str, Any]:
    """What /debug says of prefill and decode."""
    section = truth(engine)["pd"]
    assert isinstance(section, dict)
    return section


def check(fleet: MockFleet) -> None:
    """Blocks and holds add up at every engine."""
    for engine in fleet.engines:
        engine.scheduler.check_integrity()
        section = pd(engine)
        ended = sum(section["released_by"].values())
        assert section["held_total"] == ended + section["held"]["requests"], section
        assert len(engine.scheduler.held) <= section["held"]["requests"]


class Legs:
    """Requests to the engines of a fleet."""

    def __init__(self, fleet: MockFleet) -> None:
        self.fleet = fleet
        self.client = httpx.AsyncClient(timeout=HANG_S, trust_env=False, verify=False)

    async def __aenter__(self) -> Legs:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.client.aclose()

    async def post(
        self, engine: int, faults: str = "", path: str = "/v1/completions", **fields: Any
    ) -> httpx.Response:
        body = {"prompt": PROMPT, "max_tokens": 6, **fields}
        url = self.fleet.urls[engine] + path
        return await self.client.post(url, json=body, headers={"x-mock-fault": faults})

    def begin(self, engine: int, faults: str = "", **fields: Any) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(self.post(engine, faults, **fields))

    async def prefill(self, engine: int = 0, faults: str = "", **fields: Any) -> dict[str, Any]:
        """A NIXL prefill leg, and what it hands over."""
        params = {"kv_transfer_params": PREFILL, "max_tokens": 1}
        answer = await self.post(engine, faults, **{**params, **fields})
        assert answer.status_code == 200, answer.text
        return dict(answer.json()["kv_transfer_params"])

    async def leave(self, task: asyncio.Task[httpx.Response]) -> None:
        """The client of a request disconnects."""
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def right_text(prompt: list[int] | None = None, max_tokens: int = 6) -> str:
    """What an engine that computes everything says."""
    words = plain_words(0)
    start = words.start(zlib.crc32(array("I", PROMPT if prompt is None else prompt).tobytes()))
    return words.text(start, max_tokens).decode()
