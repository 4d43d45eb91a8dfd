"""The registry: which engine incarnations there are, in what state, and what each carries."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import structlog

from kvroute.clock import Clock
from kvroute.config_groups import Breaker as BreakerOptions
from kvroute.config_groups import Health, Limits, WorkerConfig
from kvroute.endpoint import Endpoint
from kvroute.load import Charge, WorkerLoad
from kvroute.policies.costs.pace import Pace
from kvroute.router.breaker import Breaker
from kvroute.router.eligible import Eligible, Task, select
from kvroute.router.errors import Failure, GatewayError, shorten
from kvroute.router.pd.detecting import Transfer
from kvroute.router.pool import UpstreamPool
from kvroute.types import EngineKind, Outcome, Place, Role, Worker

log = structlog.get_logger(__name__)

MIN_RAMP_WEIGHT = 0.1
IN_BAND_ERROR = "in_band_error"
NO_VERDICT = frozenset(
    {Failure.TOTAL_TIMEOUT, Failure.EXHAUSTED, Failure.SPOILT, Failure.GIVEN_UP, IN_BAND_ERROR}
)
"""Failures that say nothing of a worker's health: our own limits, a cache that has a state of its own, and
requests that went wrong by themselves.
"""


class State(StrEnum):
    STARTING = "starting"
    READY = "ready"
    UNHEALTHY = "unhealthy"
    SPOILT = "spoilt"
    """Its prefix cache may hold wrong KV: it gets no request until that is reset, or it is restarted."""
    DRAINING = "draining"
    GONE = "gone"


class DuplicateWorker(Exception):
    """A worker with this URL is already registered and not leaving."""


@dataclass(slots=True, eq=False)
class Member:
    """A registered worker. Identity is the incarnation: the same URL twice is two members."""

    worker: Worker
    config: WorkerConfig
    endpoint: Endpoint
    pool: UpstreamPool
    breaker: Breaker
    load: WorkerLoad = field(default_factory=WorkerLoad)
    pace: Pace = field(default_factory=Pace)
    others_requests: int = 0
    """Of `load`, what other replicas of this gateway have sent there."""
    others_prefill_tokens: int = 0
    state: State = State.STARTING
    leaves_when_idle: bool = False
    good_probes: int = 0
    bad_probes: int = 0
    was_refused: bool = False
    """The last probe, or traffic since, found nobody listening: who answers next is a new process."""
    answered_s: float = -math.inf
    """When traffic last got a good answer, on the registry's clock."""
    last_error: str | None = None
    """Why the last probe failed; None after a good one."""
    started_at: float | None = None
    """The engine's own process_start_time_seconds."""
    ready_since_s: float = 0.0
    kv_event_sources: Mapping[str, Mapping[str, Any]] | None = None
    """Where each data-parallel rank publishes its KV events, as the engine says; None until it has said."""
    refuses_event_sources: bool = False
    """It wants other credentials before it says where."""
    transfer: Transfer | None = None
    """How it hands KV over, as it says of itself; None while it has not said."""
    salt: str = ""
    """Keeps requests from the KV that lay in its cache when that was spoilt; empty where nothing has to."""
    reported: bool = False
    """Whether its metrics were ever read."""
    kv_expired: int | None = None
    """As `EngineMetrics.kv_expired`, of the last scrape."""
    cards: Sequence[dict[str, Any]] = ()
    """Its cards of /v1/models, every field kept."""
    host_line: bytes = field(init=False)
    base_path: bytes = field(init=False)
    url_header: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.host_line = b"Host: " + self.endpoint.authority.encode("ascii")
        self.base_path = self.endpoint.base_path.encode("ascii")
        self.url_header = self.endpoint.url.encode("ascii")

    @property
    def requests(self) -> int:
        """Leases of this gateway that are not yet released."""
        return self.load.requests - self.others_requests

    def is_well(self, now_s: float) -> bool:
        """Nothing speaks against sending it a request."""
        return self.state is State.READY and self.breaker.allows(now_s)

    def __repr__(self) -> str:
        return f"<Member {self.worker.id} {self.state.value} requests={self.requests} {self.breaker!r}>"


class Identity(NamedTuple):
    """What a served model name stands for."""

    model: str
    """The base model's first name; equal on all workers that list their names in the same order."""
    adapter: str | None
    engine: EngineKind


def base_model(member: Member) -> str | None:
    """The first name of its base model; None while it has told of none."""
    return next((card["id"] for card in member.cards if not card.get("parent")), None)


def identities(member: Member) -> Iterator[tuple[str, Identity]]:
    """By served name, base model first. A card with a parent is an adapter's; other names are aliases."""
    base, engine = base_model(member), member.worker.engine
    if base is None:
        return
    for card in member.cards:
        name = card["id"]
        yield name, Identity(base, name if card.get("parent") else None, engine)


class Lease:
    """The load one attempt adds to one member: charged at choice, released exactly once, always."""

    __slots__ = ("_registry", "_released", "charge", "is_trial", "member")

    def __init__(self, registry: Registry, member: Member, charge: Charge, is_trial: bool) -> None:
        self.member = member
        self.is_trial = is_trial
        """The one request that a half-open breaker lets through."""
        self._registry = registry
        self.charge = charge
        self._released = False

    def first_byte(self) -> None:
        """Prefill is over; idempotent."""
        self.charge.first_byte(self._registry.clock())
        self._registry.freed()

    def release(self) -> None:
        """Idempotent; the count belongs to the incarnation, so a late release touches no newcomer."""
        if not self._released:
            self._released = True
            self.charge.release(self._registry.clock())
            self._registry.released(self.member)


class Registry:
    """All members, and for each model the cached answer to "who may take this now"."""

    def __init__(
        self,
        make_pool: Callable[[Endpoint], UpstreamPool],
        *,
        health: Health,
        breaker: BreakerOptions,
        limits: Limits,
        clock: Clock,
        make_pace: Callable[[WorkerConfig], Pace] = lambda _config: Pace(),
        splits: bool = False,
        seed: int = 0,
    ) -> None:
        """`splits`: workers for both may share a request too, not only prefill and decode workers."""
        self._make_pool = make_pool
        self._make_pace = make_pace
        self._health = health
        self._breaker = breaker
        self._limits = limits
        self._splits = splits
        self.clock = clock
        self._random = random.Random(seed)
        self._numbers = itertools.count(1)
        self.members: dict[str, Member] = {}
        self.splits = splits
        """Whether a request may be shared by two workers."""
        self._eligible: dict[tuple[str | None, Task], Eligible] = {}
        self._models: frozenset[str] = frozenset()
        self._identities: dict[str, Identity] = {}
        self._ramping: set[Member] = set()
        self._stale_at_s = float("inf")
        self._listeners: list[Callable[[Member], None]] = []
        self._freed: Callable[[], None] | None = None

    def __repr__(self) -> str:
        return f"<Registry {list(self.members.values())!r}>"

    def on_change(self, listener: Callable[[Member], None]) -> None:
        """Call `listener` with a member that was added or changed state."""
        self._listeners.append(listener)

    def on_freed(self, freed: Callable[[], None]) -> None:
        """Call `freed` when a worker has less to do than before: a first byte, an end, a change of it."""
        self._freed = freed

    # --- membership ----------------------------------------------------------------------------

    def add(self, config: WorkerConfig) -> Member:
        """Register a worker in state starting; DuplicateWorker if its URL is already taken."""
        endpoint = Endpoint.parse(config.url)
        for other in self.members.values():
            if other.endpoint.url == endpoint.url and other.state is not State.DRAINING:
                raise DuplicateWorker(f"worker {endpoint.url} is already registered as {other.worker.id}")
        worker = Worker(
            id=f"{endpoint.url.partition('://')[2]}~{next(self._numbers)}",
            url=endpoint.url,
            role=config.role,
            engine=config.engine or EngineKind.OPENAI,
            takes_whole=config.role is not Role.PREFILL,
            place=Place(**config.place.model_dump()),
        )
        member = Member(
            worker,
            config,
            endpoint,
            self._make_pool(endpoint),
            Breaker(self._breaker),
            pace=self._make_pace(config),
        )
        self.members[worker.id] = member
        self._notify(member)
        return member

    def drain(self, member: Member) -> None:
        """Hide from choices; requests in flight go on."""
        if member.state not in (State.DRAINING, State.GONE):
            self.set_state(member, State.DRAINING)

    def remove(self, member: Member) -> None:
        """Drain, then forget as soon as nothing is in flight."""
        member.leaves_when_idle = True
        self.drain(member)
        if member.requests == 0:
            self._forget(member)

    def replace(self, member: Member) -> Member:
        """The engine behind the URL is a new process: a new incarnation that has to become ready."""
        log.info("worker restarted", worker=member.worker.id)
        self.remove(member)
        return self.add(member.config)

    def _forget(self, member: Member) -> None:
        if self.members.pop(member.worker.id, None) is not None:
            member.pool.close()
            self.set_state(member, State.GONE)

    # --- state ---------------------------------------------------------------------------------

    def set_state(self, member: Member, state: State) -> None:
        if member.state is state or member.state is State.GONE:
            return
        if member.state is State.DRAINING and state is not State.GONE:
            return
        log.info("worker state", worker=member.worker.id, state=state.value, was=member.state.value)
        if member.state is State.STARTING and state is State.READY:
            member.ready_since_s = self.clock()
            if self._health.slow_start_s > 0:
                self._ramping.add(member)
        if state in (State.DRAINING, State.GONE):
            self._ramping.discard(member)
        member.state = state
        self._notify(member)

    def update(self, member: Member, **changes: Any) -> None:
        """Discovery learned something about the engine; the incarnation stays the same."""
        worker = dataclasses.replace(member.worker, **changes)
        if worker != member.worker:
            member.worker = worker
            self._notify(member)

    def set_transfer(self, member: Member, transfer: Transfer) -> None:
        """The engine has said how it hands KV over; for which half of requests counts unless configured."""
        log.info("kv transfer", worker=member.worker.id, by=transfer.engine_name, way=transfer.connector)
        member.transfer = transfer
        if transfer.role is not None and "role" not in member.config.model_fields_set:
            self.update(member, role=transfer.role, takes_whole=transfer.role is not Role.PREFILL)

    def set_event_sources(self, member: Member, sources: Mapping[str, Mapping[str, Any]]) -> None:
        """The engine has said where it publishes its KV events, or that it publishes none."""
        member.kv_event_sources = sources
        self._notify(member)

    def freed(self) -> None:
        """Somebody who waits may have a turn."""
        if self._freed is not None:
            self._freed()

    def _notify(self, member: Member) -> None:
        self.changed()
        self.freed()
        for listener in self._listeners:
            listener(member)

    def changed(self) -> None:
        """Forget cached answers."""
        self._eligible.clear()
        live = [m for m in self.members.values() if m.state is not State.GONE]
        self.splits = self._splits or any(m.worker.role is not Role.BOTH for m in live)
        self._models = frozenset(name for m in live for name in m.worker.models)
        self._identities = {}
        for name, identity in itertools.chain.from_iterable(map(identities, live)):
            self._identities.setdefault(name, identity)
        opens = [m.breaker.open_until_s for m in live if m.breaker.open_until_s is not None]
        now = self.clock()
        self._stale_at_s = min((at for at in opens if at > now), default=float("inf"))

    # --- choosing ------------------------------------------------------------------------------

    def identify(self, model: str | None) -> Identity | None:
        """The base model and adapter that a served name stands for; None for a name that nobody serves.

        A request that names no model is for the first worker's.
        """
        if model is None:
            return next(iter(self._identities.values()), None)
        return self._identities.get(model)

    @property
    def models(self) -> frozenset[str]:
        """Names that some worker serves; labels and error messages use no others."""
        return self._models

    @property
    def usable(self) -> bool:
        """At least one worker, or two halves, could be given a request."""
        able = [m.worker for m in self.members.values() if m.state in (State.READY, State.UNHEALTHY)]
        decoding = [worker for worker in able if worker.role is not Role.PREFILL]
        return any(worker.takes_whole for worker in decoding) or 0 < len(decoding) < len(able)

    def eligible(
        self, model: str | None, now_s: float, tried: Collection[Member] = (), task: Task = Task.SPLIT
    ) -> Eligible:
        """Who may take a request for `model` that `tried` have failed; GatewayError 404, 429 or 503."""
        if now_s >= self._stale_at_s:
            self.changed()
        key = model if model is None or model in self._models else "", task
        found = self._eligible.get(key)
        if found is None:
            found = self._eligible[key] = self._find(model, task, now_s)
        if tried:
            rest = found.without(tried)
            if rest is None:
                message = "every worker that could take this request has failed it"
                raise GatewayError(Failure.NO_WORKER, message)
            found = rest
        return self._without_ramping(found, now_s) if self._ramping else found

    def _find(self, model: str | None, task: Task, now_s: float) -> Eligible:
        able = [m for m in self.members.values() if m.state in (State.READY, State.UNHEALTHY)]
        reachable = [m for m in able if m.worker.serves(model)]
        if not reachable:
            raise self._nobody_serves(model, some_able=bool(able))
        return select(reachable, task, self._limits.requests_per_worker, now_s, splits=self._splits)

    def _nobody_serves(self, model: str | None, *, some_able: bool) -> GatewayError:
        """404 when workers are there and none knows the model, 503 when it may only be a matter of time."""
        if some_able and model not in self._models:
            known = ", ".join(sorted(self._models)) or "none"
            message = f"The model `{shorten(model or '')}` does not exist. Known models: {known}"
            return GatewayError(Failure.MODEL_NOT_FOUND, message, param="model")
        states = ", ".join(f"{m.worker.url} {m.state.value}" for m in list(self.members.values())[:10])
        message = f"no worker can take this request: {states or 'no worker is registered'}"
        return GatewayError(Failure.NO_WORKER, message, retry_after_s=1)

    def _without_ramping(self, found: Eligible, now_s: float) -> Eligible:
        """Leave each ramping member out of this choice with probability 1 - weight (slow start), but where no
        other has its role: decode workers would do what the only prefill worker is there for.
        """
        ramp_s = self._health.slow_start_s
        for member in [m for m in self._ramping if now_s - m.ready_since_s >= ramp_s]:
            self._ramping.discard(member)
        if not self._ramping:
            return found
        steady = {m.worker.role for m in found.members if m not in self._ramping}
        left_out = [
            m
            for m in found.members
            if m in self._ramping
            and m.worker.role in steady
            and self._random.random() >= max(MIN_RAMP_WEIGHT, (now_s - m.ready_since_s) / ramp_s)
        ]
        return (found.without(left_out) or found) if left_out else found

    def answered(self, member: Member) -> None:
        """The first byte of a good response: enough to know that the worker is well."""
        member.answered_s = self.clock()
        member.bad_probes = 0
        if member.breaker.open_until_s is not None:
            member.breaker.success()
            self.changed()

    # --- load ----------------------------------------------------------------------------------

    def charge(self, member: Member, now_s: float, **added: Any) -> Lease:
        """Add one request to `member`, as `WorkerLoad.charge`; the same synchronous step as the choice."""
        charge = member.load.charge(now_s, **added)
        trial = member.breaker.open_until_s is not None and member.breaker.sent(now_s)
        if trial or member.requests == self._limits.requests_per_worker:
            self.changed()
        return Lease(self, member, charge, trial)

    def released(self, member: Member) -> None:
        """A lease's own news, through `Lease.release`."""
        self.freed()
        requests = member.requests
        if requests == self._limits.requests_per_worker - 1:
            self.changed()
        if member.leaves_when_idle and requests == 0:
            self._forget(member)

    def set_others(self, member: Member, requests: int, prefill_tokens: int) -> None:
        """What other replicas carry there now; it counts in every choice like our own."""
        load = member.load
        load.add_others(requests - member.others_requests, prefill_tokens - member.others_prefill_tokens)
        load.others_prefill_s = member.pace.speed.marginal_prefill_s(prefill_tokens)
        member.others_requests, member.others_prefill_tokens = requests, prefill_tokens

    def observe(self, member: Member, outcome: Outcome, *, is_trial: bool) -> None:
        """Real traffic counts for health and breaker. 4xx and a client that left say nothing."""
        was_open = member.breaker.open_until_s
        if outcome.failure in NO_VERDICT:
            member.breaker.no_verdict(is_trial)
        elif outcome.failure is not None:
            member.was_refused = member.was_refused or outcome.failure == Failure.CONNECT_REFUSED
            member.breaker.failure(self.clock())
        elif outcome.failure is None and outcome.status is not None and outcome.status < 400:
            member.breaker.success()
            member.bad_probes = 0
            if member.state is State.UNHEALTHY:
                self.set_state(member, State.READY)
        else:
            member.breaker.no_verdict(is_trial)
        if was_open is not None or member.breaker.open_until_s is not None:
            self.changed()

    def check_integrity(self) -> None:
        """Raise AssertionError when the books do not balance."""
        for member in self.members.values():
            pending_tokens = member.load.pending_prefill_tokens - member.others_prefill_tokens
            member.load.check_integrity()
            assert member.requests >= 0, member
            assert pending_tokens >= 0, member
            assert member.requests > 0 or pending_tokens == 0, member
            assert min(member.others_requests, member.others_prefill_tokens) >= 0, member
            assert member.state is not State.GONE, member
        assert self._ramping <= set(self.members.values())
