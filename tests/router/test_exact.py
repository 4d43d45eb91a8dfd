"""Exact knowledge end to end: mock engines with KV events over ZMQ, the gateway, and what it then knows."""

from __future__ import annotations

import asyncio
import math
import re
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest

from kvroute.conductor.events import EventSource
from kvroute.loadtests.mock_engine import MockFleet, MockOptions
from kvroute.router.gateway import PARSE_TOOLS_IN_THREAD_BYTES
from kvroute.router.server import GatewayServer
from tests.kit import ASKING, HANG_S, Engine, fast_config, gateway, until

BLOCK = 16
IDS = list(range(1000, 1300))
CHAT = {
    "model": "mock",
    "messages": [
        {"role": "system", "content": "You are brief. " * 40},
        {"role": "user", "content": "Where is the spoon?"},
    ],
    "max_tokens": 4,
}


class Side:
    """Engines, the gateway before them, and what can be asked of it."""

    def __init__(self, fleet: MockFleet, server: GatewayServer, http: httpx.AsyncClient) -> None:
        self.fleet, self.server, self.http = fleet, server, http

    async def send(self, path: str, body: dict[str, Any]) -> tuple[str, int]:
        """(Worker that answered, cached tokens it reported)."""
        answer = await self.http.post(self.server.url + path, json=body)
        assert answer.status_code == 200, answer.text
        details = answer.json()["usage"]["prompt_tokens_details"]
        return answer.headers["x-kvroute-worker"], (details or {}).get("cached_tokens") or 0

    async def explain(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        assert self.server.admin_url is not None
        url = self.server.admin_url + "/v1/route/explain"
        answer = await self.http.post(url, params={"path": path}, json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def confirmed(self, path: str, body: dict[str, Any]) -> dict[str, int]:
        """By worker, confirmed tokens of the prompt."""
        found = await self.explain(path, body)
        assert found["keys"] == "tokens", found["why_not_tokens"]
        return {worker["url"]: worker["match"]["confirmed_tokens"] for worker in found["workers"]}

    async def learned(self, body: dict[str, Any], tokens: int, path: str = "/v1/completions") -> None:
        """Wait until some worker is known to hold so many tokens of the prompt, and no more."""
        most = -1
        try:
            async with asyncio.timeout(HANG_S):
                while (most := max((await self.confirmed(path, body)).values())) != tokens:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
        except TimeoutError:
            pytest.fail(f"{most} tokens are known to be held, {tokens} were expected")

    def exact(self) -> bool:
        knowledge = self.server.knowledge
        states = [
            knowledge.following.state(worker_id)["trust"] for worker_id in knowledge.following.feed.followed
        ]
        return states == ["exact"] * len(self.fleet.urls)


@asynccontextmanager
async def side(
    engines: int = 2,
    options: dict[str, Any] | None = None,
    fleet: MockFleet | None = None,
    **fields: Any,
) -> AsyncIterator[Side]:
    """A gateway before engines of its own, or before those of `fleet`."""
    mock = MockOptions(**{"engines": engines, "speed": math.inf, "kv_events": True, **(options or {})})
    async with AsyncExitStack() as stack:
        fleet = fleet or await stack.enter_async_context(MockFleet(mock))
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=HANG_S))
        given = {
            "policy": "prefix_affinity",
            "models": {"mock": ASKING},
            "admin": {"enabled": True, "port": 0},
            **fields,
            "workers": fleet.urls,
        }
        server = GatewayServer(fast_config(**given))
        await server.start()
        stack.push_async_callback(server.stop)
        this = Side(fleet, server, http)
        await until(lambda: len(server.knowledge.following.feed.followed) == len(fleet.urls) and this.exact())
        yield this
        server.knowledge.index.check_integrity()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "mock", "prompt": IDS, "max_tokens": 4}),
        ("/v1/completions", {"model": "mock", "prompt": "Is this it? " * 100, "max_tokens": 4}),
        ("/v1/chat/completions", CHAT),
    ],
)
async def test_what_an_engine_holds_is_known_to_the_block(path: str, body: dict[str, Any]) -> None:
    async with side() as this:
        assert set((await this.confirmed(path, body)).values()) == {0}
        worker, cached = await this.send(path, body)
        assert cached == 0
        other = next(url for url in this.fleet.urls if url != worker)
        tokens = (await this.explain(path, body))["prompt_tokens"]
        whole = tokens // BLOCK * BLOCK

        await this.learned(body, whole, path)
        assert await this.confirmed(path, body) == {worker: whole, other: 0}
        again, cached = await this.send(path, body)
        assert (again, cached) == (worker, (tokens - 1) // BLOCK * BLOCK)
        metrics = this.server.metrics.render().decode()
        assert f'kvroute_index_compared_total{{reported="equal",worker="{worker}"}} 2.0' in metrics
        assert 'kvroute_prompts_total{mode="tokens"} 2.0' in metrics


async def test_a_prompt_just_routed_counts_before_the_engine_tells() -> None:
    async with side(options={"speed": 0.02}) as this:
        body = {"model": "mock", "prompt": IDS, "max_tokens": 1}
        sent = asyncio.create_task(this.http.post(this.server.url + "/v1/completions", json=body))
        await until(lambda: any(m.requests for m in this.server.registry.members.values()))
        found = await this.explain("/v1/completions", body)
        held = [(w["match"]["confirmed_tokens"], w["match"]["predicted_tokens"]) for w in found["workers"]]
        assert sorted(held) == [(0, 0), (0, 288)]
        (await sent).raise_for_status()


async def test_adapters_and_salts_are_kept_apart() -> None:
    async with side(options={"adapters": ("ad1",)}) as this:
        base = {"model": "mock", "prompt": IDS, "max_tokens": 1}
        kinds = [base, {**base, "model": "ad1"}, {**base, "cache_salt": "s"}, {**base, "cache_salt": "ad1"}]
        for number, body in enumerate(kinds):
            for other in kinds[number:]:
                assert set((await this.confirmed("/v1/completions", other)).values()) == {0}
            worker, _ = await this.send("/v1/completions", body)
            for earlier in kinds[: number + 1]:
                await this.learned(earlier, 288)
            again, cached = await this.send("/v1/completions", body)
            assert (again, cached) == (worker, 288)


async def test_a_restarted_engine_holds_nothing() -> None:
    async with side(engines=1) as this:
        body = {"model": "mock", "prompt": IDS, "max_tokens": 1}
        await this.send("/v1/completions", body)
        await this.learned(body, 288)
        (engine,) = this.fleet.engines
        await engine.restart()
        index = this.server.knowledge.index
        await until(lambda: index.entries == 0 and this.server.registry.usable and this.exact())
        assert set((await this.confirmed("/v1/completions", body)).values()) == {0}
        await this.send("/v1/completions", body)
        await this.learned(body, 288)


async def test_a_removed_worker_leaves_nothing_in_the_index() -> None:
    async with side() as this:
        for start in range(0, 4000, 100):
            await this.send("/v1/completions", {"model": "mock", "prompt": [*range(start, start + 320)]})
        assert this.server.knowledge.index.entries > 0
        for member in list(this.server.registry.members.values()):
            this.server.registry.remove(member)
        index = this.server.knowledge.index
        await until(lambda: index.entries == 0)
        assert this.server.knowledge.following.feed.followed == ()


async def test_batches_match_as_the_sum_of_their_prompts() -> None:
    async with side(engines=1) as this:
        one, two = list(range(100, 164)), list(range(200, 296))
        await this.send("/v1/completions", {"model": "mock", "prompt": [one, two], "max_tokens": 1})
        body = {"model": "mock", "prompt": [two, one], "max_tokens": 1}
        await this.learned(body, 64 + 96)
        assert (await this.send("/v1/completions", body))[1] == 48 + 80


async def test_why_tokens_are_not_known_is_counted() -> None:
    async with side(engines=1) as this:
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
        for content in ([image, {"type": "text", "text": "What is it? " * 50}], "What is it? " * 50):
            messages = [{"role": "user", "content": content}]
            await this.send("/v1/chat/completions", {"model": "mock", "messages": messages, "max_tokens": 1})
        body = {"model": "mock", "input": "What is it? " * 50}
        assert (await this.http.post(this.server.url + "/v1/embeddings", json=body)).status_code < 500
        metrics = this.server.metrics.render().decode()
        assert 'kvroute_prompts_total{mode="tokens"} 1.0' in metrics
        assert 'kvroute_prompts_approximate_total{reason="multimodal"} 1.0' in metrics
        assert 'kvroute_prompts_approximate_total{reason="route"} 1.0' in metrics


def not_exact(server: GatewayServer, engine: Engine) -> set[str]:
    """Reasons that metrics give for an index that is not exact."""
    metrics = server.metrics.render().decode()
    found = re.findall(r'kvroute_index_not_exact\{reason="(\w+)",worker="([^"]+)"\} 1\.0', metrics)
    return {reason for reason, url in found if url == engine.url}


@pytest.mark.parametrize(
    ("said", "fields", "reason"),
    [
        (404, {}, "no_kv_events"),
        ({}, {}, "no_kv_events"),
        ({"0": {"endpoint": "tcp://*:notaport"}}, {}, "unusable_sources"),
        (401, {}, "sources_refused"),
        (500, {}, "sources_unknown"),
        ({"0": {"endpoint": "tcp://*:9"}}, {"prefix_index": {"kv_events": False}}, "switched_off"),
    ],
)
async def test_why_an_index_is_not_exact_is_a_metric(
    said: dict[str, Any] | int, fields: dict[str, Any], reason: str
) -> None:
    async with Engine(kv_event_sources=said) as engine, gateway(engine, **fields) as server:
        assert not_exact(server, engine) == {reason}
        (member,) = server.registry.members.values()
        assert server.knowledge.following.state(member.worker.id)["trust"] == "approximate"


async def test_an_engine_that_was_too_busy_to_say_where_it_publishes_is_asked_again() -> None:
    async with Engine(kv_event_sources=503) as engine, gateway(engine) as server:
        assert not_exact(server, engine) == {"sources_unknown"}
        assert server.knowledge.following.feed.followed == ()
        engine.kv_event_sources = {"0": {"endpoint": "tcp://*:9"}}
        await until(lambda: len(server.knowledge.following.feed.followed) == 1)
        assert not_exact(server, engine) == {"connecting"}


async def test_an_engine_that_connects_to_us_is_asked_for_replays_at_its_own_host() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    events = {"endpoint": f"tcp://*:{port}", "replay_endpoint": "tcp://*:5558"}
    async with Engine() as engine:
        workers = [{"url": engine.url, "kv_events": events}]
        async with gateway(workers=workers) as server:
            await until(lambda: server.registry.usable)
            ((described, _),) = server.knowledge.following.engines()
            assert described.sources == (EventSource(f"tcp://*:{port}", "tcp://127.0.0.1:5558", bind=True),)


async def test_an_explanation_says_why_there_is_nothing_to_say() -> None:
    async with side(engines=1) as this:
        url = f"{this.server.admin_url}/v1/route/explain"
        completion = {"model": "mock", "prompt": IDS}
        found = (await this.http.post(url, json=completion)).json()
        assert (found["path"], found["keys"], found["prompt_tokens"]) == ("/v1/completions", "tokens", 300)
        short = (await this.http.post(url, json={"model": "mock", "prompt": [1, 2, 3]})).json()
        assert (short["keys"], short["why_no_keys"], short["why_not_tokens"]) == (None, "short", None)
        unknown = await this.http.post(url, params={"path": "/nope"}, json=completion)
        assert unknown.status_code == 400
        assert "'/nope' carries no prompt; accepted: /generate, /v1/chat/completions" in unknown.text
        nobody = await this.http.post(url, json={"model": "other", "prompt": IDS})
        assert (nobody.status_code, nobody.json()["error"]["code"]) == (404, "model_not_found")
        metrics = this.server.metrics.render().decode()
        assert "kvroute_prompts_total{" not in metrics  # nothing was routed


async def test_a_body_that_is_read_on_a_thread_has_the_engine_s_tokens_too() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "d" * 20_000}}
    async with side(engines=1) as this:
        assert len(str(tool)) > PARSE_TOOLS_IN_THREAD_BYTES
        await this.send("/v1/chat/completions", {**CHAT, "tools": [tool]})
        assert this.server.metrics.prompts.values == {("tokens",): 1}
