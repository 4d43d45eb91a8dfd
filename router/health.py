"""Active probes: one task per worker for health and models, one for its metrics."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
import structlog

from kvroute.clock import monotonic
from kvroute.config_groups import Health
from kvroute.policies.costs.pace import UNKNOWN_KV_TOKENS
from kvroute.router.discovery import (
    EngineMetrics,
    engine_of,
    read_cards,
    read_event_sources,
    read_metrics,
    read_server_info,
)
from kvroute.router.errors import Failure, GatewayError
from kvroute.router.pd.detecting import Transfer, connector_of_metrics, read_transfer
from kvroute.router.probe import Answer, get
from kvroute.router.workers import Member, Registry, State
from kvroute.types import EngineKind

log = structlog.get_logger(__name__)

MAX_BACKOFF_S = 30.0
SLOW_SCRAPE_RATIO = 0.1
REPLACED = (State.READY, State.UNHEALTHY, State.SPOILT)
"""In these a new process behind the same URL becomes a new incarnation."""


class Prober:
    """Moves members between starting, ready and unhealthy, and keeps what they report fresh.

    Never writes a member's own load count. A restarted engine (nobody listened, then somebody does; or
    its start time moved) becomes a new incarnation.
    """

    def __init__(self, registry: Registry, options: Health) -> None:
        self._registry = registry
        self._options = options
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
                loop.create_task(self._insist(member, self._watch)),
                loop.create_task(self._insist(member, self._poll)),
            ]

    async def close(self) -> None:
        tasks = [task for pair in self._tasks.values() for task in pair]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _insist(self, member: Member, watch: Callable[[Member], Awaitable[None]]) -> None:
        """Whatever an engine answers, it is asked again: a fault here must not freeze a worker's state."""
        while member.state is not State.GONE and not member.leaves_when_idle:
            try:
                await watch(member)
            except Exception:
                log.exception("probe broke", worker=member.worker.id)
                await asyncio.sleep(self._options.interval_s)

    async def _get(self, member: Member, path: str) -> Answer | None:
        """None when there is no answer."""
        try:
            return await get(member, path, self._options.timeout_s)
        except (GatewayError, TimeoutError):
            return None

    # --- health and models ---------------------------------------------------------------------

    async def _watch(self, member: Member) -> None:
        next_models_s = 0.0
        while member.state is not State.GONE:
            started_s = monotonic()
            if not self._is_well(member, started_s):
                await self._probe(member)
            if member.leaves_when_idle:
                return
            if member.state is State.READY and started_s >= next_models_s:
                next_models_s = started_s + self._options.models_interval_s
                models = await self._get(member, "/v1/models")
                if models is not None:
                    self._take_models(member, models)
                if member.kv_event_sources is None:
                    await self._ask_for_event_sources(member)
            pause_s = self._options.interval_s * (0.25 if member.state is State.STARTING else 1.0)
            await asyncio.sleep(
                max(0.0, pause_s - (monotonic() - started_s)) * self._random.uniform(0.9, 1.0)
            )

    def _is_well(self, member: Member, now_s: float) -> bool:
        """Traffic has just shown what a probe would: it answers, refused nobody, and dropped no connection.

        The last for the sake of restarts: a process that ends takes all its connections with it.
        """
        recent = now_s - member.answered_s < self._options.interval_s
        connected = member.pool.open_connections > 0
        return recent and connected and member.state is State.READY and not member.was_refused

    async def _probe(self, member: Member) -> None:
        refused, status = False, 0
        fault: str | None = None
        try:
            status = (await get(member, self._options.path, self._options.timeout_s)).status
            fault = None if status < 500 else f"{self._options.path} answered {status}"
        except GatewayError as error:
            if error.failure is Failure.EXHAUSTED:
                self._note(member, error.message)
                return  # our own trouble, not the worker's
            refused, fault = error.failure is Failure.CONNECT_REFUSED, error.message
        except TimeoutError:
            fault = f"{self._options.path} did not answer within health.timeout_s"
        if fault is not None:
            self._probe_bad(member)
        elif member.was_refused and member.state in REPLACED:
            self._registry.replace(member)
        else:
            fault = await self._probe_good(member, status)
        member.was_refused = refused
        self._note(member, fault)

    @staticmethod
    def _note(member: Member, fault: str | None) -> None:
        """Say once what is wrong with a worker: a wrong URL is the commonest first mistake."""
        if fault is not None and fault != member.last_error:
            log.warning("probe failed", worker=member.worker.id, state=member.state.value, error=fault)
        member.last_error = fault

    async def _probe_good(self, member: Member, status: int) -> str | None:
        """What still keeps a worker that is alive from being ready; None when nothing does."""
        member.bad_probes = 0
        member.good_probes += 1
        if member.good_probes < self._options.healthy_after:
            return None
        fault = await self._discover(member, status) if member.state is State.STARTING else None
        if fault is None and member.state in (State.STARTING, State.UNHEALTHY):
            self._registry.set_state(member, State.READY)
        return fault

    def _probe_bad(self, member: Member) -> None:
        member.good_probes = 0
        member.bad_probes += 1
        if member.state is State.READY and member.bad_probes >= self._options.unhealthy_after:
            self._registry.set_state(member, State.UNHEALTHY)

    async def _discover(self, member: Member, health_status: int) -> str | None:
        """Ask a worker that starts who it is; what is missing while nothing says that it is an engine.

        One without a list of models, but with a /health, may be asked for any model.
        """
        models = await self._get(member, "/v1/models")
        if models is None:
            return "/v1/models did not answer"
        lists = self._take_models(member, models)
        if not lists and (models.status == 200 or models.status >= 500 or not 200 <= health_status < 300):
            return f"{self._options.path} gave {health_status}, /v1/models {models.status} and no list"
        answer = await self._get(member, "/server_info?config_format=json")  # vLLM's default is text
        info = None if answer is None else _read_json(answer)
        transfer, size = read_transfer(info), read_server_info(info)
        if transfer is not None:
            self._registry.set_transfer(member, transfer)
        if size is not None:
            self._registry.update(member, block_size_tokens=size)
        await self._ask_for_event_sources(member)
        return None

    async def _ask_for_event_sources(self, member: Member) -> None:
        """Learn where it publishes its KV events; asked again later when it was too busy to say."""
        answer = await self._get(member, "/kv_event_sources")
        if answer is None or answer.status >= 500:
            return
        if answer.status in (401, 403):
            log.warning("kv event sources refused", worker=member.worker.id, status=answer.status)
            member.refuses_event_sources = True
        self._registry.set_event_sources(member, read_event_sources(_read_json(answer)))

    def _take_models(self, member: Member, answer: Answer) -> bool:
        """Learn from an answer of /v1/models; False when it holds no list, and then what was known stays."""
        cards = read_cards(_read_json(answer))
        if not cards:
            return False
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
        answer = await self._get(member, "/metrics")
        if answer is None or answer.status != 200:
            return None
        text = answer.body.decode("utf-8", "replace")
        if member.transfer is None and not member.reported:
            connector = connector_of_metrics(text)
            if connector is not None:
                self._registry.set_transfer(member, Transfer("its metrics", connector))
        member.reported = True
        return read_metrics(text)

    def _store(self, member: Member, sample: EngineMetrics) -> None:
        load = member.load
        load.reported_running, load.reported_waiting = sample.running, sample.waiting
        member.kv_expired = sample.kv_expired
        if sample.kv_tokens is not None:
            member.pace.kv_tokens = sample.kv_tokens * sample.data_parallel_size
        room_tokens = member.pace.kv_tokens
        load.report_kv(sample.kv_usage_ratio, None if room_tokens == UNKNOWN_KV_TOKENS else room_tokens)
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
        if restarted and member.state in REPLACED:
            self._registry.replace(member)


def _read_json(answer: Answer) -> Any:
    """The JSON of a 200; None when it is neither."""
    try:
        return orjson.loads(answer.body) if answer.status == 200 else None
    except orjson.JSONDecodeError:
        return None
