"""Prompts of a megabyte are read beside the traffic, not in front of it."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvroute.router import gateway as gateway_module
from kvroute.router.server import GatewayServer
from tests.conductor.tokens.tiny import write
from tests.kit import CHAT, Client, Engine, ask, gateway, until

pytestmark = pytest.mark.soak

SMALL = {"model": "m", "messages": [{"role": "user", "content": "A short one."}]}
PAIRS = 10


@asynccontextmanager
async def exact(tmp_path: Path, *engines: Engine) -> AsyncIterator[GatewayServer]:
    """A gateway whose tokenizer is loaded and checked."""
    async with gateway(
        *engines, policy="prefix_affinity", models={"m": {"tokenizer": str(write(tmp_path))}}
    ) as server:
        metrics = server.metrics
        ready = b'kvroute_tokenizer_ready{model="m"} 1.0'
        await until(lambda: ready in metrics.render(), within_s=60)
        yield server


def text(seed: int) -> bytes:
    """A body of a megabyte of words."""
    generator = random.Random(seed)
    words = " ".join(f"w{generator.randrange(10**6)}" for _ in range(10**6 // 7))
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": words}]}).encode()


def ids(seed: int) -> bytes:
    """A body of two megabytes of token ids: 400,000 of them."""
    generator = random.Random(seed)
    prompt = [generator.randrange(3, 300) for _ in range(400_000)]
    return json.dumps({"model": "m", "prompt": prompt}).encode()


async def longest_hold_s(server: GatewayServer, target: str, large: bytes) -> float:
    """CPU time that this process spent, at most, from one answer to a small request to the next while a
    large one was under way. What else the machine does is no part of it.
    """
    client = await Client.connect(server.url)
    sending = asyncio.create_task(ask(server.url, target, large))
    longest_s, last_s = 0.0, time.process_time()
    while not sending.done():
        assert (await client.ask(CHAT, SMALL)).status == 200
        now_s = time.process_time()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
    assert (await sending).status == 200
    client.close()
    return longest_s


def usual(values: list[float]) -> float:
    """Their lower quartile: others on the machine only ever add to a hold."""
    return statistics.quantiles(values, n=4)[0]


@pytest.mark.parametrize(("target", "body"), [(CHAT, text), ("/v1/completions", ids)])
async def test_small_requests_are_answered_beside_a_megabyte(
    target: str, body: Callable[[int], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The yardstick is the same gateway reading the same requests in front, by turns with it as it is."""
    larges = [body(number) for number in range(2 * PAIRS)]
    async with Engine() as one, Engine() as two, exact(tmp_path, one, two) as server:
        beside: list[float] = []
        in_front: list[float] = []
        for number in range(0, 2 * PAIRS, 2):
            beside.append(await longest_hold_s(server, target, larges[number]))
            with monkeypatch.context() as patch:
                patch.setattr(gateway_module, "PARSE_IN_THREAD_BYTES", 2**30)
                in_front.append(await longest_hold_s(server, target, larges[number + 1]))
        print("ms beside", sorted(f"{1e3 * hold_s:.1f}" for hold_s in beside))
        print("ms in front", sorted(f"{1e3 * hold_s:.1f}" for hold_s in in_front))
        assert usual(beside) < usual(in_front) / 2.5
        sent = sum(request.target in (CHAT, target) for request in (*one.received, *two.received))
        assert f'kvroute_prompts_total{{mode="tokens"}} {sent}.0' in server.metrics.render().decode()
