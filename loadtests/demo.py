"""`kvroute demo`: the same conversations through the gateway, once per setting, in front of mock engines."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import httpx
import uvloop
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvroute.clock import monotonic
from kvroute.config import load
from kvroute.loadtests.mock_engine import MockFleet, MockOptions
from kvroute.loadtests.workload import Conversation, MultiTurn
from kvroute.router.server import GatewayServer, running
from kvroute.router.workers import Member, State

ENGINES = 4
KV_BLOCKS = 6500
READY_WITHIN_S = 20.0
WORKER_HEADER = "x-kvroute-worker"


@dataclass(frozen=True)
class Setting:
    """A policy, and what its gateway knows of the engines' caches."""

    name: str
    policy: str
    exact: bool = False
    """Token ids from the engines, and their KV events; else what was routed, by the bytes of the prompts."""


SETTINGS = (
    Setting("round_robin", "round_robin"),
    Setting("prefix_affinity", "prefix_affinity"),
    Setting("ttft", "ttft"),
    Setting("  with KV events", "ttft", exact=True),
)


@dataclass
class Result:
    """What one setting's run showed. Failed requests have an infinite TTFT."""

    setting: Setting
    ttft_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    split: Counter[str] = field(default_factory=Counter)
    failures: int = 0
    foretold: float | None = None
    """Share of requests whose cached tokens the index foretold to within a token; None where not asked."""

    def ttft_ms(self, quantile: float) -> float:
        """Nearest-rank quantile."""
        ordered = sorted(self.ttft_s)
        return ordered[max(0, math.ceil(quantile * len(ordered)) - 1)] * 1e3

    @property
    def hit_rate(self) -> float:
        """Cached prompt tokens per prompt token, as the engines report them."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def run_demo(seed: int, console: Console, workload: MultiTurn | None = None) -> list[Result]:
    """Run it all, print the table, and give one result per setting."""
    workload = workload or MultiTurn()
    conversations = workload.generate(seed)
    results: list[Result] = []
    with Progress(
        TextColumn("{task.description:<16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    ) as progress:
        for setting in SETTINGS:
            task = progress.add_task(setting.name, total=workload.requests)
            advance = partial(progress.advance, task)
            results.append(uvloop.run(_run(setting, conversations, seed, advance)))
    console.print(_table(results, workload))
    return results


async def _run(
    setting: Setting, conversations: Sequence[Conversation], seed: int, advance: Callable[[], None]
) -> Result:
    """Fresh engines, a fresh gateway, one replay."""
    result = Result(setting)
    options = MockOptions(engines=ENGINES, seed=seed, kv_blocks=KV_BLOCKS, kv_events=setting.exact)
    async with MockFleet(options) as fleet:
        config = load(
            None,
            {
                "port": 0,
                "policy": setting.policy,
                "workers": fleet.urls,
                "models": {options.model: {"source": "engine"}} if setting.exact else {},
                "admin": {"enabled": False},
                "shutdown": {"keep_serving_s": 0, "drain_s": 5},
            },
        )
        async with running(config) as gateway:
            await _until_ready(gateway)
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
            async with httpx.AsyncClient(
                base_url=gateway.url, limits=limits, timeout=60, trust_env=False
            ) as client:
                started_s = monotonic()
                talks = (_talk(client, talk, started_s, result, advance) for talk in conversations)
                await asyncio.gather(*talks)
            hits = gateway.knowledge.hits.report().total
            if hits.compared_requests:
                wrong = hits.over_predicted + hits.under_predicted
                result.foretold = 1 - wrong / hits.compared_requests
    return result


async def _until_ready(gateway: GatewayServer) -> None:
    registry, ready = gateway.registry, asyncio.Event()

    def check(_member: Member) -> None:
        if all(member.state is State.READY for member in registry.members.values()):
            ready.set()

    registry.on_change(check)
    async with asyncio.timeout(READY_WITHIN_S):
        await ready.wait()


async def _talk(
    client: httpx.AsyncClient,
    conversation: Conversation,
    started_s: float,
    result: Result,
    advance: Callable[[], None],
) -> None:
    """One conversation, turn by turn; a turn that is due waits for the answer to the one before."""
    messages = [{"role": "system", "content": conversation.system}]
    for turn in conversation.turns:
        await asyncio.sleep(max(0.0, started_s + turn.due_s - monotonic()))
        messages.append({"role": "user", "content": turn.text})
        try:
            answer = await _ask(client, messages, turn.output_tokens, result)
        except (httpx.HTTPError, ValueError):
            result.failures += 1
            result.ttft_s.append(math.inf)
            answer = ""
        messages.append({"role": "assistant", "content": answer})
        advance()


async def _ask(client: httpx.AsyncClient, messages: list[dict[str, str]], tokens: int, result: Result) -> str:
    """Stream one answer; TTFT is from sending to the first event, the gateway and its queueing included."""
    body = {
        "model": "mock",
        "messages": messages,
        "max_tokens": tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sent_s = monotonic()
    first_s: float | None = None
    text: list[str] = []
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        result.split[response.headers[WORKER_HEADER]] += 1
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            first_s = first_s or monotonic()
            event = json.loads(line.removeprefix("data: "))
            text += [choice["delta"].get("content") or "" for choice in event["choices"]]
            if usage := event.get("usage"):
                result.prompt_tokens += usage["prompt_tokens"]
                result.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
    if first_s is None:
        raise ValueError("the stream held no event")
    result.ttft_s.append(first_s - sent_s)
    return "".join(text)


def _table(results: Sequence[Result], workload: MultiTurn) -> Table:
    title = (
        f"{ENGINES} mock engines (Llama-3.1-8B on H100), {workload.requests} requests of "
        f"{workload.conversations} conversations"
    )
    caption = (
        f"Simulated: KV room for {KV_BLOCKS * 16:,} tokens per engine. A first turn finds at most "
        "its system prompt cached; such turns make the p99. Foretold: requests whose "
        "cached tokens the index had right to the token."
    )
    table = Table(title=title, caption=caption, box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for name in ("TTFT p50", "p99", "hits", "foretold", "split", "failed"):
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        split = " ".join(str(count) for _, count in sorted(result.split.items()))
        table.add_row(
            result.setting.name,
            f"{result.ttft_ms(0.5):.0f} ms",
            f"{result.ttft_ms(0.99):.0f} ms",
            f"{result.hit_rate:.1%}",
            "-" if result.foretold is None else f"{result.foretold:.0%}",
            split,
            str(result.failures),
        )
    return table
