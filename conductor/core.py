"""The conductor itself, without its sockets: the index, the feed of events, and whom they know.

Two kinds of clients bring engines. Services are registered over HTTP, a data-parallel rank each, and stay
until unregistered. Instances are followed by gateways for as long as one of them is connected; gateways that
follow the same engine share one instance, and what each of them routes is known to all.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import structlog
from msgspec import Struct

from kvroute.conductor.events import EventFeed, EventSource, Watermark
from kvroute.conductor.index import PrefixIndex
from kvroute.conductor.keys import Namespace
from kvroute.types import PrefixMatch, PromptKeys, Trust

log = structlog.get_logger(__name__)

MAX_SERVICES = 4096
MAX_INSTANCES = 4096
LINGER_S = 60.0
"""An instance is kept so long after its last gateway's connection ended: the gateway may come again."""
DEFAULT_TENANT = "default"


class ConductorError(Exception):
    """A request that cannot be done; `status` is its HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Service(Struct, frozen=True, tag_field="kind", tag="service"):
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
        """What it is known by."""
        return f"{self.instance_id}|{self.tenant_id}|{self.dp_rank}"

    @property
    def source(self) -> EventSource:
        """Raises `ValueError` that names the field."""
        # Who gives the engine a host without a wildcard has it connect, and is the one to bind.
        return EventSource(self.endpoint, self.replay_endpoint, self.dp_rank, bind="://*" in self.endpoint)


class Engine(Struct, frozen=True, tag_field="kind", tag="engine"):
    """An engine that gateways follow, as they describe it; equal descriptions are one engine."""

    url: str
    namespace: Namespace
    sources: tuple[EventSource, ...] = ()
    block_tokens: int | None = None
    min_block_tokens: int = 16
    silent_tier_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Registration:
    """A service and its id in the index, which is another one when the service is registered again."""

    service: Service
    worker_id: str


@dataclass(eq=False, slots=True)
class Instance:
    """An engine and how many gateways follow it now."""

    engine: Engine
    worker_id: str
    """In the index; changes when what is known of the engine is forgotten for all."""
    followers: int = 0


@dataclass(slots=True)
class Counts:
    """Since the start."""

    matches: int = 0
    predictions: int = 0
    observations: int = 0
    unknown_workers: int = 0
    """News and questions of workers that the connection does not follow."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Services left out of an answer, by reason."""


class Conductor:
    """One thread owns it; `follow`, `register` and `forget` need a running loop."""

    def __init__(self, index: PrefixIndex, feed: EventFeed, linger_s: float = LINGER_S) -> None:
        self.index = index
        self.feed = feed
        self.registrations: dict[str, Registration] = {}
        """By the service's key."""
        self.instances: dict[Engine, Instance] = {}
        self.counts = Counts()
        self._by_endpoint: dict[str, str] = {}
        self._restoring: set[str] = set()
        self._linger_s = linger_s
        self._numbers = count(1)

    def knows(self, worker: Service | Engine) -> bool:
        """Whether it is followed, or its place is taken."""
        if isinstance(worker, Service):
            return worker.key in self.registrations or worker.endpoint in self._by_endpoint
        return worker in self.instances

    def adopt(self, worker: Service | Engine) -> str:
        """Know an engine from before a restart, by load alone until `begin`; its new id in the index."""
        worker_id = self._new_worker_id()
        self._restoring.add(worker_id)
        if isinstance(worker, Service):
            self._enter(worker, worker_id)
        else:
            self.instances[worker] = Instance(worker, worker_id)
        return worker_id

    def begin(self, worker_id: str, watermarks: Mapping[int, Watermark] | None) -> None:
        """Follow the events of an adopted engine: from these watermarks, or from nothing.

        One that was dropped meanwhile is ignored. Raises `ValueError` for one that cannot be followed; it is
        not known any more then.
        """
        self._restoring.discard(worker_id)
        worker = next((worker for worker, known in self.members() if known == worker_id), None)
        if worker is None:
            return
        try:
            self._follow_events(worker, worker_id, watermarks)
        except ValueError:
            self._expel(worker)
            raise
        if isinstance(worker, Engine):
            instance = self.instances[worker]
            instance.followers += 1
            self.linger(instance)

    def _expel(self, worker: Service | Engine) -> None:
        if isinstance(worker, Service):
            self.unregister(worker.key)
        else:
            self._forget(self.instances.pop(worker).worker_id)

    @property
    def restoring(self) -> int:
        """Gauge: engines adopted and not begun."""
        return len(self._restoring)

    def members(self) -> list[tuple[Service | Engine, str]]:
        """Whom it follows, with their ids in the index."""
        registered = [(one.service, one.worker_id) for one in self.registrations.values()]
        return [*registered, *((one.engine, one.worker_id) for one in self.instances.values())]

    # Services, over HTTP.

    def register(self, service: Service) -> None:
        """Follow a publisher. The same one again changes nothing; another under its key is refused."""
        known = self.registrations.get(service.key)
        if known is not None:
            if known.service == service:
                return
            raise ConductorError(
                409, f"instance_id: {service.key} is registered with other fields; unregister it first"
            )
        holder = self._by_endpoint.get(service.endpoint)
        if holder is not None:
            raise ConductorError(409, f"endpoint: {service.endpoint} is registered already, by {holder}")
        if len(self.registrations) >= MAX_SERVICES:
            raise ConductorError(503, f"{MAX_SERVICES} services are registered, which is the limit")
        worker_id = self._new_worker_id()
        try:
            self._follow_events(service, worker_id)
        except ValueError as error:
            raise ConductorError(400, str(error)) from None
        self._enter(service, worker_id)
        log.info("service registered", service=service.key, endpoint=service.endpoint, worker=worker_id)

    def _enter(self, service: Service, worker_id: str) -> None:
        self.registrations[service.key] = Registration(service, worker_id)
        self._by_endpoint[service.endpoint] = service.key

    def unregister(self, key: str) -> None:
        """Stop to follow a service; `ConductorError` 404 when there is none of that key."""
        known = self.registrations.pop(key, None)
        if known is None:
            raise ConductorError(404, f"service not found: {key}")
        del self._by_endpoint[known.service.endpoint]
        self._forget(known.worker_id)
        log.info("service unregistered", service=key)

    # Instances, over the lookup socket.

    def follow(self, engine: Engine) -> Instance:
        """One more gateway follows `engine`. Raises `ValueError` that says why it cannot be followed."""
        instance = self.instances.get(engine)
        if instance is None:
            if len(self.instances) >= MAX_INSTANCES:
                raise ValueError(f"{MAX_INSTANCES} engines are followed, which is the limit")
            instance = Instance(engine, self._new_worker_id())
            self._follow_events(engine, instance.worker_id)
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
            instance.worker_id = self._new_worker_id()

    def linger(self, instance: Instance) -> None:
        """A gateway's connection ended. Nothing is said of the engine, so it is kept for a while."""
        instance.followers -= 1
        if not instance.followers:
            asyncio.get_running_loop().call_later(self._linger_s, self._drop, instance)

    def _drop(self, instance: Instance) -> None:
        if not instance.followers and self.instances.get(instance.engine) is instance:
            del self.instances[instance.engine]
            self._forget(instance.worker_id)

    def _follow_events(
        self, worker: Service | Engine, worker_id: str, watermarks: Mapping[int, Watermark] | None = None
    ) -> None:
        if isinstance(worker, Service):
            namespace = Namespace(model=worker.modelname, adapter=worker.lora_name or None)
            self.feed.follow(
                worker_id, [worker.source], namespace, block_tokens=worker.block_size, restored=watermarks
            )
        elif worker.sources:
            self.feed.follow(
                worker_id,
                worker.sources,
                worker.namespace,
                block_tokens=worker.block_tokens,
                min_block_tokens=worker.min_block_tokens,
                silent_tier_blocks=worker.silent_tier_blocks,
                restored=watermarks,
            )

    def _new_worker_id(self) -> str:
        return f"engine-{next(self._numbers)}"

    def _forget(self, worker_id: str) -> None:
        self._restoring.discard(worker_id)
        self.feed.unfollow(worker_id)

    # Questions.

    def match(
        self, keys: Iterable[PromptKeys], worker_ids: Sequence[str]
    ) -> Iterable[tuple[PrefixMatch, Trust]]:
        """What workers hold of a prompt, and how far each may be believed; parallel to the ids."""
        self.counts.matches += 1
        by_size: dict[int, PromptKeys] = {}
        others: dict[int, PromptKeys] = {}
        for part in keys:  # blocks of bytes may count as many tokens as blocks of ids do
            (others if part.block_tokens in by_size else by_size)[part.block_tokens] = part
        matches = self.index.match(by_size, worker_ids)
        if others:
            matches = list(map(_longer, matches, self.index.match(others, worker_ids)))
        trust = self.trust if self._restoring else self.feed.trust
        return zip(matches, map(trust, worker_ids), strict=True)

    def trust(self, worker_id: str) -> Trust:
        """How far what is known of a worker may be believed."""
        return Trust.LOAD_ONLY if worker_id in self._restoring else self.feed.trust(worker_id)

    def predict(self, worker_id: str, keys: PromptKeys) -> None:
        """A prompt was just routed to this worker."""
        self.counts.predictions += 1
        self.index.predict(worker_id, keys)

    def observe(self, worker_id: str, predicted_tokens: int, cached_tokens: int, prompt_tokens: int) -> None:
        """What an engine reported of a prompt, beside what the index had said of it."""
        self.counts.observations += 1
        self.feed.observe(worker_id, predicted_tokens, cached_tokens, prompt_tokens)

    async def close(self) -> None:
        """Close the feed; idempotent."""
        await self.feed.close()


def _longer(one: PrefixMatch, other: PrefixMatch) -> PrefixMatch:
    return one if one.tokens >= other.tokens else other
