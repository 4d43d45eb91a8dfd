"""The default policy on mock engines: real sockets, real gateway, virtual time.

Time passes for nothing but the engines and the network: what a request costs the gateway is not in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any

import pytest

from kvroute.config import load
from kvroute.loadtests.mock_engine import MockFleet, MockOptions
from kvroute.policies.costs.pace import Pace
from kvroute.router.parsed_request import PARSE_IN_THREAD_BYTES
from kvroute.router.server import GatewayServer, running
from tests.kit import Client
from tests.loadtests.virtual_time import GATEWAY, run_virtually

ENGINE_KEYS, BYTE_KEYS = True, False
EVENTS_S = 0.05
"""Virtual time in which events that engines have sent arrive."""


@dataclass(frozen=True)
class Done:
    worker: str
    ttft_s: float
    decision: str


class Driver:
    """Sends requests of token ids to a gateway, and notes who answered."""

    def __init__(self, server: GatewayServer, seed: int) -> None:
        print(f"seed {seed}")
        self.server = server
        self.rng = random.Random(seed)

    def prompt(self, tokens: int) -> list[int]:
        return [self.rng.randrange(100, 1000) for _ in range(tokens)]

    def mixed_prompts(self, count: int) -> list[list[int]]:
        """Of 500 to 3500 tokens: 42 ms of prefill on average."""
        return [self.prompt(self.rng.randrange(500, 3500)) for _ in range(count)]

    @property
    def paces(self) -> list[Pace]:
        return [member.pace for member in self.server.registry.members.values()]

    @property
    def workers(self) -> list[str]:
        """As answers name them."""
        return [member.endpoint.url for member in self.server.registry.members.values()]

    async def ask(self, prompt: list[int], output_tokens: int) -> Done:
        loop = asyncio.get_running_loop()
        client = await Client.connect(self.server.url)
        try:
            body = {"model": "mock", "prompt": prompt, "max_tokens": output_tokens, "stream": True}
            data = json.dumps(body, separators=(",", ":")).encode()
            assert len(data) <= PARSE_IN_THREAD_BYTES  # a thread takes real time
            started_s = loop.time()
            await client.send("/v1/completions", data)
            status, headers, _ = await client.head()
            assert status == 200
            first = await client.chunk()
            ttft_s = loop.time() - started_s
            while first:
                first = await client.chunk()
        finally:
            client.close()
        fields = dict(headers)
        return Done(fields["x-kvroute-worker"], ttft_s, fields["x-kvroute-decision"])

    async def burst(self, prompt: list[int], output_tokens: int, requests: int = 64) -> list[Done]:
        done = await asyncio.gather(*[self.ask(prompt, output_tokens) for _ in range(requests)])
        await asyncio.sleep(EVENTS_S)
        return done

    async def steadily(self, prompts: list[list[int]], output_tokens: int, per_s: float) -> list[Done]:
        """Open loop: Poisson arrivals, whether or not those before are over."""
        tasks = []
        for prompt in prompts:
            tasks.append(asyncio.ensure_future(self.ask(prompt, output_tokens)))
            await asyncio.sleep(self.rng.expovariate(per_s))
        return await asyncio.gather(*tasks)


def shares(done: list[Done]) -> Counter[str]:
    return Counter(each.worker for each in done)


@contextlib.asynccontextmanager
async def serving(*fleets: MockOptions, keys: bool, seed: int = 1) -> AsyncIterator[Driver]:
    """A gateway of default configuration before all engines of these fleets."""
    async with contextlib.AsyncExitStack() as stack:
        urls: list[str] = []
        for options in fleets:
            urls += (await stack.enter_async_context(MockFleet(options))).urls
        config = {
            "port": 0,
            "workers": urls,
            "models": {"mock": {"source": "engine"}} if keys else {},
            "admin": {"enabled": False},
            "health": {"slow_start_s": 0},
            "shutdown": {"keep_serving_s": 0, "drain_s": 5},
        }
        server = await stack.enter_async_context(running(load(None, config)))
        await asyncio.sleep(1.5)
        yield Driver(server, seed)


def engines(count: int = 4, keys: bool = False, **changes: Any) -> MockOptions:
    return MockOptions(engines=count, kv_events=keys, close_idle_s=None, **changes)


@pytest.fixture
def virtually(monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(main: Coroutine[Any, Any, None]) -> None:
        run_virtually(main, monkeypatch, *GATEWAY)

    return run


BURSTS = [(200, 16), (8000, 16), (2000, 32)]
"""Tokens of the prompt and of the answer."""


@pytest.mark.parametrize(("tokens", "output_tokens"), [(200, 64), (2000, 16), (8000, 16)])
@pytest.mark.parametrize("keys", [ENGINE_KEYS, BYTE_KEYS])
def test_a_burst_of_equal_prompts_on_a_fresh_fleet_spreads(
    virtually: Any, keys: bool, tokens: int, output_tokens: int
) -> None:
    async def main() -> None:
        async with serving(engines(keys=keys), keys=keys) as driver:
            done = await driver.burst(driver.prompt(tokens), output_tokens)
            assert max(shares(done).values()) < 32, shares(done)

    virtually(main())


@pytest.mark.parametrize("keys", [ENGINE_KEYS, BYTE_KEYS])
def test_one_burst_after_the_other_spreads_and_so_does_what_comes_after(virtually: Any, keys: bool) -> None:
    async def main() -> None:
        async with serving(engines(keys=keys), keys=keys) as driver:
            for tokens, output_tokens in BURSTS:
                done = await driver.burst(driver.prompt(tokens), output_tokens)
                assert max(shares(done).values()) < 32, (tokens, output_tokens, shares(done))
            scales = {(pace.prefill_scale, pace.overhead_s, pace.decode_scale) for pace in driver.paces}
            assert len(scales) == 1, "equal engines are priced alike"
            assert 0.5 < driver.paces[0].prefill_scale < 10
            done = [await driver.ask(driver.prompt(500), 4) for _ in range(40)]
            assert len(shares(done)) == 4
            assert min(shares(done).values()) >= 5, shares(done)

    virtually(main())


def test_unique_prompts_one_after_the_other_spread(virtually: Any) -> None:
    async def main() -> None:
        async with serving(engines(), keys=BYTE_KEYS) as driver:
            done = [await driver.ask(driver.prompt(500), 4) for _ in range(40)]
            assert len(shares(done)) == 4
            assert min(shares(done).values()) >= 5, shares(done)

    virtually(main())


def test_a_ten_times_slower_engine_is_found_out_and_gets_its_fair_share(virtually: Any) -> None:
    """Three engines alone would be asked for an eighth more than they can do; the fourth can do 1 of 31. At
    first it gets less: until others have waited for long, they are sooner done where they wait.
    """

    async def main() -> None:
        async with serving(engines(3), engines(1, step_scale=10.0), keys=BYTE_KEYS) as driver:
            await driver.steadily(driver.mixed_prompts(200), 3, 25.0)
            slow, usual = driver.paces[3], driver.paces[0]
            assert 4 < slow.prefill_scale / usual.prefill_scale < 15
            assert usual.prefill_scale == pytest.approx(1.0, rel=0.2)
            assert len({pace.prefill_scale for pace in driver.paces[:3]}) == 1
            name = driver.workers[3]
            calm = await driver.steadily(driver.mixed_prompts(50), 3, 25.0)
            assert shares(calm)[name] <= 1, "no one waits there while others are idle"
            assert max(each.ttft_s for each in calm if each.worker != name) < 0.3, "three suffice"
            busy = await driver.steadily(driver.mixed_prompts(800), 3, 80.0)
            assert 800 / 62 <= shares(busy)[name] <= 800 * 2 / 31, shares(busy)

    virtually(main())


@pytest.mark.parametrize("keys", [ENGINE_KEYS, BYTE_KEYS])
def test_a_shared_system_prompt_makes_no_hot_spot(virtually: Any, keys: bool) -> None:
    async def main() -> None:
        async with serving(engines(keys=keys), keys=keys) as driver:
            system = driver.prompt(1000)
            done = await driver.steadily([system + driver.prompt(200) for _ in range(80)], 16, 50.0)
            assert max(shares(done).values()) <= 40, shares(done)

    virtually(main())
