"""Active probes: one task per worker for health and models, one for its metrics."""

from __future__ import annotations

import asyncio
import random
import ssl
from typing import Any

import httpx
import structlog

from kvroute.clock import monotonic
from kvroute.config import Health
from kvroute.router.discovery import EngineMetrics, engine_of, read_cards, read_metrics, read_server_info
from kvroute.router.workers import Member, Registry, State
from kvroute.types import EngineKind

log = structlog.get_logger(__name__)

MAX_BACKOFF_S = 30.0
SLOW_SCRAPE_RATIO = 0.1
MAX_ANSWER_BYTES = 16 * 2**20
# Each worker has at most two probes under way; a shared limit would let hung workers hold up the others.
NO_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None)


class Prober:
    """Moves members between starting, ready and unhealthy, and keeps what they report fresh.

    Never writes a member's own load count. A restarted engine (nobody listened, then somebody does; or
    its start time moved) becomes a new incarnation.
    """

    def __init__(self, registry: Registry, options: Health, tls: ssl.SSLContext | None = None) -> None:
        self._registry = registry
        self._options = options
        self._tls = tls
        self._clients: dict[tuple[str | None, bool], httpx.AsyncClient] = {}
        self._tasks: dict[Member, list[asyncio.Task[None]]] = {}
        self._random = random.Random(0)
        registry.on_change(self._member_changed)

    def _member_changed(self, member: Member) -> None:
        if member.state is State.GONE:
            for task in self._tasks.pop(member, ()):
                task.cancel()
        elif member not in self._tasks:
            loop = asyncio.get_running_loop()
            self._tasks[member] = [
                loop.create_task(self._watch(member)),
                loop.create_task(self._poll(member)),
            ]

    async def close(self) -> None:
        tasks = [task for pair in self._tasks.values() for task in pair]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in self._clients.values():
            await client.aclose()

    # --- HTTP ----------------------------------------------------------------------------------

    def _client(self, member: Member) -> httpx.AsyncClient:
        path, tls = member.endpoint.unix_path, member.endpoint.tls
        client = self._clients.get((path, tls))
        if client is None:
            transport = httpx.AsyncHTTPTransport(
                uds=path,
                verify=(self._tls or ssl.create_default_context()) if tls else False,
                limits=NO_LIMITS,
            )
            client = self._clients[path, tls] = httpx.AsyncClient(
                transport=transport, timeout=self._options.timeout_s, follow_redirects=False, trust_env=False
            )
        return client

    async def _get(self, member: Member, path: str) -> httpx.Response:
        """The answer, read whole within one time limit; httpx.HTTPError or TimeoutError otherwise."""
        key = member.config.api_key
        headers = {"authorization": f"Bearer {key.get_secret_value()}"} if key else {}
        async with asyncio.timeout(self._options.timeout_s):
            url = member.endpoint.http_url(path)
            async with self._client(member).stream("GET", url, headers=headers) as response:
                body = b""
                async for piece in response.aiter_bytes():
                    body += piece
                    if len(body) > MAX_ANSWER_BYTES:
                        raise httpx.ReadError(f"{path} answered over {MAX_ANSWER_BYTES} bytes")
                return httpx.Response(
                    response.status_code, headers={"content-type": "application/json"}, content=body
                )

    async def _get_json(self, member: Member, path: str) -> Any:
        try:
            response = await self._get(member, path)
            return response.json() if response.status_code == 200 else None
        except (httpx.HTTPError, TimeoutError, ValueError, RecursionError):
            return None

    # --- health and models ---------------------------------------------------------------------

    async def _watch(self, member: Member) -> None:
        next_models_s = 0.0
        while member.state is not State.GONE:
            started_s = monotonic()
            await self._probe(member)
            if member.leaves_when_idle:
                return
            if member.state is State.READY and started_s >= next_models_s:
                next_models_s = started_s + self._options.models_interval_s
                await self._refresh_models(member)
            pause_s = self._options.interval_s * (0.25 if member.state is State.STARTING else 1.0)
            await asyncio.sleep(
                max(0.0, pause_s - (monotonic() - started_s)) * self._random.uniform(0.9, 1.0)
            )

    async def _probe(self, member: Member) -> None:
        try:
            response = await self._get(member, self._options.path)
            healthy, refused = response.status_code < 500, False
        except httpx.ConnectError:
            healthy, refused = False, True
        except (httpx.HTTPError, TimeoutError):
            healthy, refused = False, False
        if healthy and member.was_refused and member.state in (State.READY, State.UNHEALTHY):
            self._registry.replace(member)
        elif healthy:
            await self._probe_good(member)
        else:
            self._probe_bad(member)
        member.was_refused = refused

    async def _probe_good(self, member: Member) -> None:
        member.bad_probes = 0
        member.good_probes += 1
        if member.good_probes < self._options.healthy_after:
            return
        if member.state is State.UNHEALTHY or (
            member.state is State.STARTING and await self._discover(member)
        ):
            self._registry.set_state(member, State.READY)

    def _probe_bad(self, member: Member) -> None:
        member.good_probes = 0
        member.bad_probes += 1
        if member.state is State.READY and member.bad_probes >= self._options.unhealthy_after:
            self._registry.set_state(member, State.UNHEALTHY)

    async def _discover(self, member: Member) -> bool:
        """Ask a worker that starts who it is; False while it cannot say which models it serves."""
        if not await self._refresh_models(member):
            return False
        info = await self._get_json(member, "/server_info")
        size = read_server_info(info)
        if size is not None:
            self._registry.update(member, block_size_tokens=size)
        return True

    async def _refresh_models(self, member: Member) -> bool:
        try:
            response = await self._get(member, "/v1/models")
            answer = response.json() if response.status_code == 200 else None
        except (httpx.HTTPError, TimeoutError, ValueError, RecursionError):
            return False
        if response.status_code >= 500:
            return False
        cards = read_cards(answer)
        changes: dict[str, Any] = {"models": tuple(card["id"] for card in cards)}
        kind = engine_of(cards)
        if member.config.engine is None and kind is not None:
            changes["engine"] = kind
        member.cards = cards
        self._registry.update(member, **changes)
        return True

    # --- metrics -------------------------------------------------------------------------------

    async def _poll(self, member: Member) -> None:
        """Scrape, and back off from an engine to which scraping is a burden."""
        interval_s = self._options.metrics_interval_s
        pause_s = interval_s
        sampled_s = monotonic()
        while member.state is not State.GONE:
            if member.state is not State.STARTING:
                started_s = monotonic()
                sample = await self._scrape(member)
                now_s = monotonic()
                slow = now_s - started_s > SLOW_SCRAPE_RATIO * self._options.timeout_s
                pause_s = min(MAX_BACKOFF_S, pause_s * 2) if sample is None or slow else interval_s
                if sample is not None:
                    sampled_s = now_s
                    self._store(member, sample)
                elif now_s - sampled_s > self._options.stale_after_s:
                    self._store(member, EngineMetrics())
            await asyncio.sleep(pause_s * self._random.uniform(0.9, 1.1))

    async def _scrape(self, member: Member) -> EngineMetrics | None:
        try:
            response = await self._get(member, "/metrics")
        except (httpx.HTTPError, TimeoutError):
            return None
        return read_metrics(response.text) if response.status_code == 200 else None

    def _store(self, member: Member, sample: EngineMetrics) -> None:
        load = member.load
        load.reported_running, load.reported_waiting = sample.running, sample.waiting
        load.kv_usage_ratio = sample.kv_usage_ratio
        changes: dict[str, Any] = {}
        if (
            member.config.engine is None
            and sample.engine is not None
            and member.worker.engine is EngineKind.OPENAI
        ):
            changes["engine"] = sample.engine
        if sample.block_size_tokens is not None:
            changes["block_size_tokens"] = sample.block_size_tokens
        if sample.running is not None:
            changes["data_parallel_size"] = sample.data_parallel_size
        self._registry.update(member, **changes)
        restarted = (
            None not in (member.started_at, sample.started_at) and member.started_at != sample.started_at
        )
        member.started_at = sample.started_at or member.started_at
        if restarted and member.state in (State.READY, State.UNHEALTHY):
            self._registry.replace(member)
