"""What is simulated, against a replay of the same requests over real sockets in virtual time.

The engines are the same, so what could differ is the router's part, the gateway against the simulator's. Time
passes for nothing but engines and network, so a slow machine changes nothing.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np
import pytest

from kvroute.config import load
from kvroute.loadtests.mock_engine import MockFleet, MockOptions
from kvroute.loadtests.replay.bodies import Form
from kvroute.loadtests.replay.running import Access, Due, Run, run_in_loop
from kvroute.loadtests.simulator.setting import Setting
from kvroute.loadtests.simulator.simulation import Simulation
from kvroute.loadtests.traces.arrivals import arrivals
from kvroute.loadtests.traces.workloads import generate
from kvroute.policies.costs.speeds import PRESETS
from kvroute.policies.registry import make_policy
from kvroute.router.server import running

from .virtual_time import GATEWAY, run_virtually

PRESET = "qwen3-32b-h200-tp2"
WORKERS, BLOCK_TOKENS, KV_TOKENS = 4, 16, 60_000
OVERHEAD_S = 0.0156
REPLAY_CLOCKS = tuple(f"kvroute.loadtests.replay.{name}" for name in ("player", "target", "running"))


@dataclass(frozen=True)
class Seen:
    """Of the requests after the warm-up."""

    ttft_p50_s: float
    ttft_mean_s: float
    hit: float

    @classmethod
    def of(cls, rows: list[tuple[float, int, int]]) -> Seen:
        """Rows are TTFT, cached tokens, prompt tokens, in order of arrival."""
        ttft_s, cached, prompt = zip(*rows[len(rows) // 10 :], strict=True)
        return cls(float(np.median(ttft_s)), float(np.mean(ttft_s)), sum(cached) / sum(prompt))


def due(requests: int) -> Due:
    """Mixed sessions at some 70 % of what the engines can do, more than their caches hold."""
    return Due(generate("mixed", 2000, 4.0, 3), speed=14, seed=3, scale=0.125, limit=requests, salt=1)


def simulated(policy: str, what: Due) -> Seen:
    setting = Setting(
        workers=WORKERS,
        speed=PRESETS[PRESET],
        scale=1.0,
        kv_tokens=KV_TOKENS,
        block_tokens=BLOCK_TOKENS,
        request_overhead_s=OVERHEAD_S,
        learns=True,
        keeps_output=True,
    )
    made = arrivals(what.trace, BLOCK_TOKENS, what.speed, 0, what.seed, "trace", what.scale)[: what.limit]
    rows = []
    for record in Simulation(setting, make_policy(policy, {})).run(made):
        assert record.first_s is not None
        arrival = record.arrival
        rows.append((record.first_s - arrival.arrival_s, record.cached_tokens, arrival.view.prompt_tokens))
    return Seen.of(rows)


async def replayed(policy: str, what: Due) -> Seen:
    options = MockOptions(
        engines=WORKERS,
        preset=PRESET,
        block_size_tokens=BLOCK_TOKENS,
        kv_blocks=KV_TOKENS // BLOCK_TOKENS,
        kv_events=True,
        close_idle_s=None,
        request_overhead_s=OVERHEAD_S,
    )
    async with MockFleet(options) as fleet:
        config = {
            "port": 0,
            "policy": policy,
            "workers": fleet.urls,
            "speed": PRESET,
            "models": {"mock": {"source": "engine"}},
            "admin": {"enabled": False},
            "health": {"slow_start_s": 0},
            "shutdown": {"keep_serving_s": 0, "drain_s": 5},
        }
        async with running(load(None, config)) as gateway:
            await asyncio.sleep(1.5)
            run = Run(Access(gateway.url), Form(), "mock", what)
            played, stopped = await run_in_loop(run, asyncio.get_running_loop().time())
    assert not stopped
    assert [made.failure for made in played.requests] == [None] * (what.limit or 0)
    assert played.other_length == 0
    made = sorted(played.requests, key=lambda one: one.arrival_s)
    return Seen.of([(one.ttft_s, one.cached_tokens, one.prompt_tokens) for one in made])


def test_a_policy_without_knowledge_is_simulated_to_the_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    what = due(60)
    live = run_virtually(replayed("round_robin", what), monkeypatch, *GATEWAY, *REPLAY_CLOCKS)
    told = simulated("round_robin", what)
    assert live.hit == told.hit
    assert live.ttft_p50_s == pytest.approx(told.ttft_p50_s, abs=1e-3)
    assert live.ttft_mean_s == pytest.approx(told.ttft_mean_s, abs=1e-3)


@pytest.mark.soak
def test_policies_rank_alike_simulated_and_live(monkeypatch: pytest.MonkeyPatch) -> None:
    what = due(400)
    live, told = {}, {}
    for policy in ("round_robin", "least_loaded", "ttft"):
        live[policy] = run_virtually(replayed(policy, what), monkeypatch, *GATEWAY, *REPLAY_CLOCKS)
        told[policy] = simulated(policy, what)
    print(live, told)
    for name in ("ttft_p50_s", "ttft_mean_s"):
        assert sorted(live, key=lambda policy: getattr(live[policy], name)) == sorted(
            told, key=lambda policy: getattr(told[policy], name)
        )
    for policy, seen in live.items():
        assert seen.ttft_p50_s == pytest.approx(told[policy].ttft_p50_s, rel=0.1)
        assert seen.hit == pytest.approx(told[policy].hit, abs=0.02)
    assert live["ttft"].ttft_mean_s < 0.9 * live["round_robin"].ttft_mean_s
