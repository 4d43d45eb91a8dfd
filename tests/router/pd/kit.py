"""A fleet of mock engines, or scripted ones, behind a gateway that splits requests between them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from kvroute.loadtests.mock_engine import MockEngine, MockFleet
from kvroute.router.server import GatewayServer
from kvroute.types import Role
from tests.kit import Answer, Client, Engine, Received, Script, Wire, ask, gateway, until
from tests.loadtests.pd_kit import PROMPT, options, pd, right_text

COMPLETIONS = "/v1/completions"
NEVER_MARKED = {"interval_s": 60.0, "metrics_interval_s": 60.0, "models_interval_s": 60.0}
"""No probe after the first finds out what a test does to an engine."""
STEADY = {"failures": 10_000}


@dataclass
class Bench:
    """Mock engines by role, the gateway in front of them, and what a request to it must say."""

    fleet: MockFleet
    server: GatewayServer

    @property
    def prefill(self) -> list[MockEngine]:
        return [one for one in self.fleet.engines if one.pd.role is Role.PREFILL]

    @property
    def decode(self) -> list[MockEngine]:
        return [one for one in self.fleet.engines if one.pd.role is not Role.PREFILL]

    async def ask(self, *headers: str, path: str = COMPLETIONS, **fields: Any) -> Answer:
        return await ask(self.server.url, path, body(**fields), *headers)

    async def begin(self, *headers: str, path: str = COMPLETIONS, **fields: Any) -> Client:
        """A request that is sent; nothing of its answer is read."""
        client = await Client.connect(self.server.url)
        await client.send(path, body(**fields), *headers)
        return client

    def released(self) -> dict[str, int]:
        """What became of KV kept at prefill workers, summed over them."""
        total: dict[str, int] = {}
        for engine in self.prefill:
            for why, count in pd(engine)["released_by"].items():
                total[why] = total.get(why, 0) + count
        return {why: count for why, count in total.items() if count}

    def stranded(self) -> int:
        return sum(pd(engine)["stranded_blocks"] for engine in self.fleet.engines)

    def count(self, name: str, *labels: str) -> float:
        """A counter of `PdMetrics`."""
        return getattr(self.server._pd.books.pd_metrics, name).value(*labels)

    async def idle(self) -> None:
        """No engine has anything of a request any more."""
        await until(lambda: not any(engine.live for engine in self.fleet.engines))
        await until(lambda: self.stranded() == 0)

    def check(self) -> None:
        """Nothing happened at the engines that should never happen."""
        for engine in self.fleet.engines:
            section = pd(engine)
            for what in ("wrong_text", "unknown", "order_violations", "repeated", "deaths"):
                assert section[what] == 0, (engine, what, section)


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "mock", "prompt": PROMPT, "max_tokens": 6, **fields}


def worker(engine: MockEngine) -> dict[str, Any]:
    """Its entry in the configuration."""
    own: dict[str, Any] = {"url": engine.url, "role": engine.pd.role.value}
    if engine.options.connector == "p2p-nccl":
        own["p2p_address"] = f"127.0.0.1:{engine.port}"
    if engine.pd.role is Role.PREFILL:
        own["bootstrap_port"] = engine.port
    return own


@contextlib.asynccontextmanager
async def bench(
    connector: str = "nixl",
    prefill: int = 1,
    decode: int = 1,
    *,
    mock: dict[str, Any] | None = None,
    clean: bool = True,
    **fields: Any,
) -> AsyncIterator[Bench]:
    """`mock` are options of the engines, `fields` groups of the configuration; `clean` checks the engines."""
    setting = {"admin": {"enabled": False}, "breaker": STEADY, **fields}
    setting["pd"] = {"connector": connector, **fields.get("pd", {})}
    async with MockFleet(options(connector, prefill, decode, **(mock or {}))) as fleet:
        workers = [worker(engine) for engine in fleet.engines]
        async with gateway(*fleet.engines, workers=workers, **setting) as server:
            one = Bench(fleet, server)
            yield one
            await one.idle()
            if clean:
                one.check()


def said(answer: Answer) -> str:
    """The text of a completion, streamed or not."""
    assert answer.status == 200, answer.body
    if not answer.body.startswith(b"data:"):
        return str(answer.json()["choices"][0]["text"])
    events = [line[6:] for line in answer.body.split(b"\n") if line.startswith(b"data: {")]
    return "".join(choice["text"] for event in events for choice in json.loads(event).get("choices", ()))


def right(answer: Answer, max_tokens: int = 6) -> bool:
    return answer.complete and said(answer) == right_text(max_tokens=max_tokens)


HANDED = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "engine",
    "remote_request_id": "request",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
}


def prefilled(**more: Any) -> Script:
    """A prefill engine's answer, with what NIXL hands over."""
    answer = {"id": "x", "choices": [{"text": "a", "finish_reason": "length"}], **more}
    answer.setdefault("kv_transfer_params", HANDED)

    async def script(_request: Received, wire: Wire) -> None:
        await wire.answer(200, json.dumps(answer).encode())

    return script


def completed(text: str = "done", **more: Any) -> Script:
    """A decode engine's plain answer."""
    answer = {"id": "y", "choices": [{"text": text, "finish_reason": "stop"}], **more}

    async def script(_request: Received, wire: Wire) -> None:
        await wire.answer(200, json.dumps(answer).encode())

    return script


@contextlib.asynccontextmanager
async def scripted(
    prefill: list[Engine], decode: list[Engine], connector: str = "nixl", **fields: Any
) -> AsyncIterator[GatewayServer]:
    """Started engines by role behind a gateway."""
    workers = [{"url": one.url, "role": "prefill"} for one in prefill]
    workers += [{"url": one.url, "role": "decode"} for one in decode]
    setting = {"admin": {"enabled": False}, "breaker": STEADY, "workers": workers, **fields}
    setting["pd"] = {"connector": connector, **fields.get("pd", {})}
    async with gateway(*prefill, *decode, **setting) as server:
        yield server
