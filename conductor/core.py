"""The conductor itself, without its sockets: the index, the feed of events, and whom they know.

Two kinds of clients bring engines. Services are registered over HTTP, a data-parallel rank each, and stay
until unregistered. Instances are followed by gateways for as long as one of them is connected; gateways that
follow the same engine share one instance, and what each of them routes is known to all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import structlog

from kvroute.clock import Clock, monotonic
from kvroute.conductor.events import EventFeed, EventSource, Watermark
from kvroute.conductor.index import PrefixIndex
from kvroute.conductor.keys import Namespace
from kvroute.types import PrefixMatch, PromptKeys, Trust

log = structlog.get_logger(__name__)

MAX_SERVICES = 4096
MAX_INSTANCES = 4096
LINGER_S = 60.0
"""An instance is kept so long after its last gateway's connection ended: the gateway may come again."""
SWEEP_PAUSE_S = 0.02
DEFAULT_TENANT = "default"


class ConductorError(Exception):
    """A request that cannot be done; `status` is its HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Service:
    """A publisher of KV events that was registered: one data-parallel rank of one instance."""

    endpoint: str
    instance_id: str
    modelname: str
    block_size: int
    type: str = "vLLM"
    replay_endpoint: str | None = None
    lora_name: str = ""
    tenant_id: str = DEFAULT_TENANT
    dp_rank: int = 0
    additionalsalt: str = ""

    @property
    def key(self) -> str:
        """What it is known by; also its id in the index."""
        return f"{self.instance_id}|{self.tenant_id}|{self.dp_rank}"

    @property
    def source(self) -> EventSource:
        """Raises `ValueError` that names the field."""
        # Who gives the engine a host without a wildcard has it connect, and is the one to bind.
        return EventSource(self.endpoint, self.replay_endpoint, self.dp_rank, bind="://*" in self.endpoint)


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that gateways follow, as they describe it; equal descriptions are one engine."""

    url: str
    namespace: Namespace
    sources: tuple[EventSource, ...] = ()
    block_tokens: int | None = None
    min_block_tokens: int = 16
    silent_tier_blocks: int = 0


@dataclass(eq=False, slots=True)
class Instance:
    """An engine and how many gateways follow it now."""

    engine: Engine
    worker_id: str
    """In the index; changes when what is known of the engine is forgotten for all."""
    followers: int = 0


@dataclass(slots=True)
class Counters:
    """Since the start."""

    matches: int = 0
    predictions: int = 0
    observations: int = 0
    unknown_workers: int = 0
    """News and questions of workers that the connection does not follow."""
    sweeps: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    """Services left out of an answer, by reason."""


class Conductor:
    """One thread owns it; `follow`, `register` and `forget` need a running loop."""

    def __init__(
        self,
        max_bytes: int,
        prediction_s: float,
        *,
        clock: Clock = monotonic,
        linger_s: float = LINGER_S,
        on_trust: Callable[[str, Trust, tuple[str, ...]], None] | None = None,
    ) -> None:
        self.index = PrefixIndex(max_bytes, clock, prediction_s)
        self.feed = EventFeed(self.index, clock=clock, on_trust=on_trust)
        self.services: dict[str, Service] = {}
        self.instances: dict[Engine, Instance] = {}
        self.counters = Counters()
        self._by_endpoint: dict[str, str] = {}
        self._linger_s = linger_s
        self._numbers = count(1)
        self._sweep_timer: asyncio.TimerHandle | None = None

    # Services, over HTTP.

    def register(self, service: Service, restored: Watermark | None = None) -> None:
        """Follow a publisher. The same one again changes nothing; another under its key is refused."""
        known = self.services.get(service.key)
        if known == service:
            return
        if known is not None:
            raise ConductorError(
                409, f"instance_id: {service.key} is registered with other fields; unregister it first"
            )
        holder = self._by_endpoint.get(service.endpoint)
        if holder is not None:
            raise ConductorError(409, f"endpoint: {service.endpoint} is registered already, by {holder}")
        if len(self.services) >= MAX_SERVICES:
            raise ConductorError(503, f"{MAX_SERVICES} services are registered, which is the limit")
        try:
            self.feed.follow(
                service.key,
                [service.source],
                Namespace(model=service.modelname, adapter=service.lora_name or None),
                block_tokens=service.block_size,
                restored=None if restored is None else {service.dp_rank: restored},
            )
        except ValueError as error:
            raise ConductorError(400, str(error)) from None
        self.services[service.key] = service
        self._by_endpoint[service.endpoint] = service.key
        log.info("service registered", service=service.key, endpoint=service.endpoint)

    def unregister(self, key: str) -> None:
        """Stop to follow a service; `ConductorError` 404 when there is none of that key."""
        service = self.services.pop(key, None)
        if service is None:
            raise ConductorError(404, f"service not found: {key}")
        del self._by_endpoint[service.endpoint]
        self._forget(key)
        log.info("service unregistered", service=key)

    # Instances, over the lookup socket.

    def follow(self, engine: Engine, restored: Mapping[int, Watermark] | None = None) -> Instance:
        """One more gateway follows `engine`. Raises `ValueError` that says why it cannot be followed."""
        instance = self.instances.get(engine)
        if instance is None:
            if len(self.instances) >= MAX_INSTANCES:
                raise ValueError(f"{MAX_INSTANCES} engines are followed, which is the limit")
            instance = Instance(engine, f"followed:{next(self._numbers)}")
            if engine.sources:
                self._follow_events(instance, restored)
            self.instances[engine] = instance
        instance.followers += 1
        return instance

    def leave(self, instance: Instance) -> None:
        """A gateway says that the engine has left for good.

        Others may still follow it. Then events will tell of its end; without events nothing would, so what
        was predicted of it is forgotten.
        """
        instance.followers -= 1
        if not instance.followers:
            self._drop(instance)
        elif not instance.engine.sources:
            self._forget(instance.worker_id)
            instance.worker_id = f"followed:{next(self._numbers)}"

    def linger(self, instance: Instance) -> None:
        """A gateway's connection ended. Nothing is said of the engine, so it is kept for a while."""
        instance.followers -= 1
        if not instance.followers:
            asyncio.get_running_loop().call_later(self._linger_s, self._drop, instance)

    def _drop(self, instance: Instance) -> None:
        if not instance.followers and self.instances.get(instance.engine) is instance:
            del self.instances[instance.engine]
            self._forget(instance.worker_id)

    def _follow_events(self, instance: Instance, restored: Mapping[int, Watermark] | None) -> None:
        engine = instance.engine
        self.feed.follow(
            instance.worker_id,
            engine.sources,
            engine.namespace,
            block_tokens=engine.block_tokens,
            min_block_tokens=engine.min_block_tokens,
            silent_tier_blocks=engine.silent_tier_blocks,
            restored=restored,
        )

    def _forget(self, worker_id: str) -> None:
        self.feed.unfollow(worker_id)
        self.index.remove_worker(worker_id)
        if self._sweep_timer is None:
            self._sweep_timer = asyncio.get_running_loop().call_soon(self._sweep)  # type: ignore[assignment]

    def _sweep(self) -> None:
        """Give a removed worker's memory back bit by bit, so that no lookup waits for it."""
        self._sweep_timer = None
        self.counters.sweeps += 1
        if self.index.sweep():
            self._sweep_timer = asyncio.get_running_loop().call_later(SWEEP_PAUSE_S, self._sweep)

    # Questions.

    def match(
        self, keys: Iterable[PromptKeys], worker_ids: Sequence[str]
    ) -> Iterable[tuple[PrefixMatch, Trust]]:
        """What workers hold of a prompt, and how far each may be believed; parallel to the ids."""
        self.counters.matches += 1
        by_size: dict[int, PromptKeys] = {}
        others: dict[int, PromptKeys] = {}
        for part in keys:  # blocks of bytes may count as many tokens as blocks of ids do
            (others if part.block_tokens in by_size else by_size)[part.block_tokens] = part
        matches = self.index.match(by_size, worker_ids)
        if others:
            matches = list(map(_longer, matches, self.index.match(others, worker_ids)))
        return zip(matches, map(self.feed.trust, worker_ids), strict=True)

    def predict(self, worker_id: str, keys: PromptKeys) -> None:
        """A prompt was just routed to this worker."""
        self.counters.predictions += 1
        self.index.predict(worker_id, keys)

    def observe(self, worker_id: str, predicted_tokens: int, cached_tokens: int, prompt_tokens: int) -> None:
        """What an engine reported of a prompt, beside what the index had said of it."""
        self.counters.observations += 1
        self.feed.observe(worker_id, predicted_tokens, cached_tokens, prompt_tokens)

    async def close(self) -> None:
        """Close the feed; idempotent."""
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        await self.feed.close()


def _longer(one: PrefixMatch, other: PrefixMatch) -> PrefixMatch:
    return one if one.tokens >= other.tokens else other
