"""One cell: a fleet, a gateway, a request, a fault, and what is left of it all."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
from msgspec import Struct

from kvroute.clock import monotonic
from kvroute.config import Config
from kvroute.loadtests.fault_matrix.cells import HANG_S, Cell, Plan
from kvroute.loadtests.fault_matrix.judging import Got, Outcome, judge
from kvroute.loadtests.mock_engine import MockEngine, MockFleet, MockOptions
from kvroute.loadtests.mock_engine.faults import Faults
from kvroute.loadtests.mock_engine.routes import truth
from kvroute.router.server import GatewayServer, running
from kvroute.router.workers import State
from kvroute.types import Role

PROMPT = list(range(100, 183))
MAX_TOKENS = 6
LEASE_S = 2.0
LIMIT_S = 12.0
"""A request that is not over by then hangs. Twice what the gateway's own limits allow."""
SETTLE_S = 1.5
"""For what ends by itself right after a request: aborts, and the release of KV."""
REFUSE_S = 0.05
"""A restarting worker is away for so long."""
POLL_S = 0.002
MISSED = "the fault met no request"


class Result(Struct):
    """What became of a cell."""

    outcome: Outcome
    status: int
    seconds: float
    retries: int
    stranded_blocks: int
    """After the release."""
    stranded_after_lease_blocks: int
    faults: list[str]
    """What is wrong with it; empty for a good cell."""


class Bed:
    """The engines of one cell behind its gateway."""

    def __init__(self, cell: Cell, plan: Plan, fleet: MockFleet, server: GatewayServer) -> None:
        self.cell, self.plan, self.fleet, self.server = cell, plan, fleet, server
        prefill = [one for one in fleet.engines if one.pd.role is Role.PREFILL]
        decode = [one for one in fleet.engines if one.pd.role is Role.DECODE]
        self.prefill, self.decode = prefill, decode
        self.struck, self.others = (prefill, decode) if cell.leg == "prefill" else (decode, prefill)
        self.shared = Faults().merged({**plan.faults, "times": 1}) if plan.faults else Faults()
        self.stopped: list[MockEngine] = []
        self.has_acted = False
        self.began = asyncio.Event()
        """The client has got the first of its body."""

    def arm(self) -> None:
        """From here on the engines misbehave."""
        for engine in self.struck:
            engine.faults = self.shared  # one object: the first request uses it up for all
        for engine in self.others:
            engine.faults = Faults().merged(self.plan.others)

    @property
    def has_struck(self) -> bool:
        """Whether the fault happened to a request."""
        if self.plan.first:
            return bool(self.server.metrics.upstream_errors.total())
        return self.has_acted if self.plan.act else self.shared.times == 0

    async def act(self) -> None:
        """At the cell's moment, to whoever has the leg."""
        moments: dict[str, Callable[[], bool]] = {
            "before": lambda: any(engine.live for engine in self.prefill),
            "during": self._moves,
            "after": self.began.is_set,
        }
        await _within(LIMIT_S, moments[self.cell.moment])
        await self.hit(self._who())

    async def hit(self, engine: MockEngine) -> None:
        self.has_acted = True
        if self.plan.act == "stop":
            self.stopped.append(engine)
            await engine.stop()
        else:
            await engine.restart(REFUSE_S)

    def _moves(self) -> bool:
        """The prefill is over, and a decode worker is about to have its KV."""
        claimed = any(_held(engine) and not _stranded(engine) for engine in self.prefill)
        finished = any(engine.journal.totals["finished"] for engine in self.prefill)
        return any(engine.live for engine in self.decode) and (claimed or finished)

    def _who(self) -> MockEngine:
        seen = [one for one in self.struck if one.live] or [one for one in self.struck if one.journal.entries]
        return (seen or self.struck)[0]

    async def heal(self) -> None:
        """Every engine is up and behaves."""
        for engine in self.fleet.engines:
            engine.faults = Faults()
        for engine in self.stopped:
            await engine.restart()
        self.stopped = []
        await _within(LIMIT_S, self._all_ready)

    def _all_ready(self) -> bool:
        ready = [one for one in self.server.registry.members.values() if one.state is State.READY]
        return len(ready) >= len(self.fleet.engines)


@contextlib.asynccontextmanager
async def bed(cell: Cell, plan: Plan) -> AsyncIterator[Bed]:
    """Started, and all workers ready."""
    options = MockOptions(
        engines=2 * cell.workers,
        prefill=cell.workers,
        decode=cell.workers,
        connector=cell.connector,
        speed=math.inf,
        kv_blocks=256,
        kv_lease_s=LEASE_S,
        kv_wait_s=plan.kv_wait_s,
    )
    async with MockFleet(options) as fleet, running(_config(cell, plan, fleet)) as server:
        one = Bed(cell, plan, fleet, server)
        await one.heal()
        yield one


def _config(cell: Cell, plan: Plan, fleet: MockFleet) -> Config:
    workers: list[dict[str, Any]] = []
    for engine in fleet.engines:
        worker: dict[str, Any] = {"url": engine.url, "role": engine.pd.role.value}
        if cell.connector == "p2p-nccl":
            worker["p2p_address"] = f"127.0.0.1:{engine.port}"
        if engine.pd.role is Role.PREFILL:
            worker["bootstrap_port"] = engine.port
        workers.append(worker)
    setting = _SETTING | {"workers": workers, "pd": _PD | {"connector": cell.connector}}
    if plan.first:  # else probes find it out before a request does
        setting["health"] = setting["health"] | {"interval_s": 10.0, "metrics_interval_s": 10.0}
    return Config(**setting)


_PD = {"kv_lease_s": LEASE_S, "prefill_timeout_s": 0.6, "decode_timeout_s": 0.8}
_SETTING: dict[str, Any] = {
    "host": "127.0.0.1",
    "port": 0,
    "admin": {"enabled": False},
    "policy": "round_robin",
    "health": {"interval_s": 0.2, "timeout_s": 5.0, "metrics_interval_s": 0.2, "slow_start_s": 0},
    "breaker": {"failures": 1000},
    "timeouts": {"connect_s": 1.0, "first_byte_s": 1.0, "idle_s": 0.8, "total_s": LIMIT_S / 2},
    "shutdown": {"keep_serving_s": 0, "drain_s": 1},
}


async def run_cell(cell: Cell, plan: Plan, client: httpx.AsyncClient, right: str) -> Result:
    """Bring it about, and look what is left; again where a busy machine let the moment pass."""
    for left in (2, 1, 0):
        async with bed(cell, plan) as one:
            result = await _strike(one, client, right)
            if MISSED in result.faults and left:
                continue
            await _settle(one, result)
            await _recover(one, client, right, result)
            break
    return result


async def _strike(one: Bed, client: httpx.AsyncClient, right: str) -> Result:
    """The request; where one worker of several was stopped before, until one meets it."""
    one.arm()
    if one.plan.first:
        await one.hit(one.struck[0])
    result: Result | None = None
    for _ in range(2 * len(one.struck)):
        result = await _ask(one, client, right)
        if one.has_struck or not one.plan.first:
            break
    assert result is not None
    if not one.has_struck:
        result.faults.append(MISSED)
    return result


async def _ask(one: Bed, client: httpx.AsyncClient, right: str) -> Result:
    acting = asyncio.create_task(one.act()) if one.plan.act and not one.plan.first else None
    started_s = monotonic()
    got = await post(client, one.server.url, streams=one.cell.streams, began=one.began)
    seconds = monotonic() - started_s
    if acting is not None:
        if not one.has_acted:
            acting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await acting
    outcome = Outcome.HANG if got is None else judge(got, right)
    retries = int(one.server.metrics.retries.total())
    result = Result(outcome, got.status if got is not None else 0, seconds, retries, 0, 0, [])
    if outcome in (Outcome.HANG, Outcome.WRONG):
        result.faults.append(f"{outcome.value}: {b'' if got is None else got.body[:200]!r}")
    return result


async def post(
    client: httpx.AsyncClient, url: str, *, streams: bool, began: asyncio.Event | None = None
) -> Got | None:
    """None when it does not end."""
    fields = {"model": "mock", "prompt": PROMPT, "max_tokens": MAX_TOKENS, "stream": streams}
    body, status = b"", 0
    try:
        async with (
            asyncio.timeout(LIMIT_S),
            client.stream("POST", url + "/v1/completions", json=fields) as response,
        ):
            status = response.status_code
            async for piece in response.aiter_raw():
                body += piece
                if began is not None:
                    began.set()
    except TimeoutError:
        return None
    except httpx.HTTPError:
        return Got(status, body, complete=False)
    return Got(status, body, complete=True)


async def _settle(one: Bed, result: Result) -> None:
    """Loads, legs and kept KV."""
    members = one.server.registry.members
    if not await _within(SETTLE_S, lambda: not any(m.load.requests for m in members.values())):
        result.faults.append("a worker's load is not zero")
    if any(member.load.pending_prefill_tokens for member in members.values()):
        result.faults.append("a worker's pending prefill is not zero")
    if not await _within(SETTLE_S, lambda: not any(engine.live for engine in one.fleet.engines)):
        result.faults.append("an engine still runs a leg")
    try:
        one.server.registry.check_integrity()
    except AssertionError as error:
        result.faults.append(f"registry: {error}")
    engines = one.fleet.engines
    await _within(SETTLE_S, lambda: not any(map(_stranded, engines)))
    result.stranded_blocks = sum(map(_stranded, engines))
    if result.stranded_blocks and not one.cell.waits_for_lease and not set(one.decode) <= set(one.stopped):
        result.faults.append(f"{result.stranded_blocks} blocks were not released")
    await _within(LEASE_S + SETTLE_S, lambda: not any(map(_held, engines)))
    result.stranded_after_lease_blocks = sum(map(_stranded, engines))
    if any(map(_held, engines)):
        result.faults.append("KV is kept beyond its lease")


async def _recover(one: Bed, client: httpx.AsyncClient, right: str, result: Result) -> None:
    """The same request again, with everybody well: wrong KV would have stayed in a cache."""
    await one.heal()
    end_s, due = monotonic() + LIMIT_S, one.cell.workers
    while due and monotonic() < end_s:
        got = await post(client, one.server.url, streams=False)
        outcome = Outcome.HANG if got is None else judge(got, right)
        if outcome in (Outcome.HANG, Outcome.WRONG):
            result.faults.append(f"{outcome.value} afterwards: {got}")
            return
        due -= outcome is Outcome.RIGHT
    if due:
        result.faults.append("no right answer afterwards")
    for engine in one.fleet.engines:
        section = truth(engine)["pd"]
        result.faults += [f"{what} at {engine.pd.role.value}" for what in _NEVER if section[what]]


_NEVER = ("order_violations", "deaths")


def _stranded(engine: MockEngine) -> int:
    return int(engine.pd.holds.as_dict()["stranded_blocks"])


def _held(engine: MockEngine) -> int:
    return int(engine.pd.holds.as_dict()["held"]["requests"])


async def _within(limit_s: float, condition: Callable[[], bool]) -> bool:
    end_s = monotonic() + limit_s
    while not condition():
        if monotonic() >= end_s:
            return False
        await asyncio.sleep(POLL_S)
    return True


async def right_text(client: httpx.AsyncClient) -> str:
    """What an engine says that nobody has spoken to before."""
    async with MockFleet(MockOptions(speed=math.inf)) as fleet:
        got = await post(client, fleet.urls[0], streams=False)
    assert got is not None
    text = httpx.Response(got.status, content=got.body).json()["choices"][0]["text"]
    return str(text)


def new_client() -> httpx.AsyncClient:
    """For any number of cells at a time."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(timeout=HANG_S, limits=limits, trust_env=False, verify=False)
