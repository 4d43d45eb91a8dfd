"""Whose KV events are followed, after a restart from its snapshot, and how far each is believed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import structlog
from msgspec import to_builtins

from kvroute.clock import Clock
from kvroute.conductor.core import Engine
from kvroute.conductor.events import EventFeed, EventSource, Watermark, WorkerHealth, discovered_sources
from kvroute.conductor.index import PrefixIndex
from kvroute.conductor.keys import Namespace
from kvroute.conductor.remote import RemoteConductor
from kvroute.router.workers import Member, Registry, State, base_model
from kvroute.types import Trust

log = structlog.get_logger(__name__)

DEFAULT_BLOCK_TOKENS = 16
"""Where no worker has said what its blocks are."""
CONNECT_WITHIN_S = 5.0
"""Until it is said that nobody answers where a worker's events should come from."""
STARTING = frozenset({"restored", "connecting", "replaying"})
"""Reasons of an index that is not exact yet, and of no concern."""

Restore = Callable[[Engine, str], Awaitable[Mapping[int, Watermark] | None]]
"""Brings the blocks of an engine into the index under a worker id; None when there are none of it."""


class Following:
    """Brings workers into the index as they become ready, and takes them out as they leave.

    With a remote conductor their events are followed there, and the index here holds predictions alone.
    """

    def __init__(
        self,
        registry: Registry,
        index: PrefixIndex,
        remote: RemoteConductor | None,
        *,
        events: bool,
        clock: Clock,
    ) -> None:
        self.feed = EventFeed(index, clock=clock, on_trust=self._trust_changed)
        self.block_sizes: tuple[int, ...] = (DEFAULT_BLOCK_TOKENS,)
        """Tokens per block of the chains that the workers' indexes are made of; most fleets have one."""
        self.untrusted: set[str] = set()
        """Workers to be judged by their load alone."""
        self._registry = registry
        self._index = index
        self._remote = remote
        self._events = events
        self._engines: dict[str, Engine] = {}
        self._not_followed: dict[str, str] = {}
        """Workers that publish events which cannot be followed, and why."""
        self._restore: Restore | None = None
        self._started = False
        self._restoring: set[asyncio.Task[None]] = set()
        registry.on_change(self._member_changed)

    def start(self, restore: Restore | None = None) -> None:
        """Follow the workers that are ready, and those to come. Needs a running loop."""
        self._restore = restore
        self._started = True
        for member in list(self._registry.members.values()):
            self._member_changed(member)

    async def close(self) -> None:
        """Idempotent."""
        for task in self._restoring:
            task.cancel()
        await asyncio.gather(*self._restoring, return_exceptions=True)
        await self.feed.close()

    def engines(self) -> list[tuple[Engine, str]]:
        """Those whose events are followed here, and their ids."""
        return [(self._engines[name], name) for name in self.feed.followed if name in self._engines]

    def healths(self) -> dict[str, WorkerHealth]:
        """By URL, of every worker that is no longer starting."""
        members = self._registry.members.values()
        return {m.worker.url: self.health(m.worker.id) for m in members if m.state is not State.STARTING}

    def health(self, worker_id: str) -> WorkerHealth:
        """How far the index of a worker is believed, and why not farther."""
        health = self.feed.health(worker_id)
        if health is not None:
            return health
        if worker_id in self.untrusted:
            return WorkerHealth(worker_id=worker_id, trust=Trust.LOAD_ONLY, reasons=("restored",))
        reason = "followed_remotely" if self._remote else self._not_followed.get(worker_id, "no_kv_events")
        return WorkerHealth(worker_id=worker_id, trust=Trust.APPROXIMATE, reasons=(reason,))

    def state(self, worker_id: str) -> dict[str, Any]:
        """The same, for people to read."""
        return {**to_builtins(self.health(worker_id)), "held_blocks": self._index.held_blocks(worker_id)}

    # --- workers come and go -------------------------------------------------------------------

    def _member_changed(self, member: Member) -> None:
        if member.state is State.GONE:
            self._forget(member.worker.id)
        elif self._started and member.state is State.READY and member.worker.id not in self._engines:
            if self._events and member.config.kv_events is None and member.kv_event_sources is None:
                self._not_followed[member.worker.id] = "sources_unknown"  # it is asked again
            else:
                self._not_followed.pop(member.worker.id, None)
                self._announce(member)
        self._collect_block_sizes()

    def _announce(self, member: Member) -> None:
        """A worker is ready for the first time: what it said of its events is known by now."""
        worker = member.worker
        engine = self._engines[worker.id] = Engine(
            worker.url,
            Namespace(model=base_model(member)),
            self._sources(member) if self._events else (),
            worker.block_size_tokens,
            silent_tier_blocks=member.config.silent_tier_blocks,
        )
        endpoints = [source.endpoint for source in engine.sources]
        log.info("kv events", worker=worker.id, endpoints=endpoints)
        if endpoints:
            loop = asyncio.get_running_loop()
            loop.call_later(CONNECT_WITHIN_S, self._check_connected, worker.id, endpoints)
        if self._remote is not None:
            self._remote.follow(
                worker.id,
                engine.url,
                engine.namespace,
                engine.sources,
                block_tokens=engine.block_tokens,
                silent_tier_blocks=engine.silent_tier_blocks,
            )
        elif engine.sources and self._restore is not None:
            self.untrusted.add(worker.id)
            task = asyncio.get_running_loop().create_task(
                self._follow_restored(worker.id, engine, self._restore)
            )
            self._restoring.add(task)
            task.add_done_callback(self._restoring.discard)
        elif engine.sources:
            self._follow(worker.id, engine, None)
        elif not self._events:
            self._not_followed[worker.id] = "switched_off"
        elif member.refuses_event_sources:
            self._not_followed[worker.id] = "sources_refused"

    def _check_connected(self, worker_id: str, endpoints: Sequence[str]) -> None:
        health = self.feed.health(worker_id)
        if health is not None and "connecting" in health.reasons:
            log.warning("no publisher of kv events has answered", worker=worker_id, endpoints=endpoints)

    async def _follow_restored(self, worker_id: str, engine: Engine, restore: Restore) -> None:
        try:
            watermarks = await restore(engine, worker_id)
        except Exception:  # whatever is in the file, the worker is followed from here on
            log.exception("not restored", worker=worker_id)
            watermarks = None
        if worker_id in self._engines:
            self._follow(worker_id, engine, watermarks)
            self._note_trust(worker_id, self.feed.trust(worker_id))

    def _follow(self, worker_id: str, engine: Engine, watermarks: Mapping[int, Watermark] | None) -> None:
        try:
            self.feed.follow(
                worker_id,
                engine.sources,
                engine.namespace,
                block_tokens=engine.block_tokens,
                silent_tier_blocks=engine.silent_tier_blocks,
                restored=watermarks,
            )
        except ValueError as error:
            self._cannot_follow(worker_id, error)

    def _cannot_follow(self, worker_id: str, error: ValueError) -> None:
        log.warning("unusable kv event sources", worker=worker_id, error=str(error))
        self._not_followed[worker_id] = "unusable_sources"

    def _sources(self, member: Member) -> tuple[EventSource, ...]:
        given = member.config.kv_events
        host = member.endpoint.authority.rpartition(":")[0] or "127.0.0.1"
        try:
            if given is None:
                return discovered_sources(member.kv_event_sources or {}, host)
            first = EventSource(given.endpoint, given.replay_endpoint, topic=given.topic).at(host)
            if "://*" in given.endpoint:  # we bind; whom to ask for replays is the engine all the same
                first = replace(first, endpoint=given.endpoint, bind=True)
            return first.ranks(member.worker.data_parallel_size)
        except ValueError as error:
            self._cannot_follow(member.worker.id, error)
            return ()

    def _forget(self, worker_id: str) -> None:
        self.untrusted.discard(worker_id)
        self._not_followed.pop(worker_id, None)
        if self._engines.pop(worker_id, None) is not None and self._remote is not None:
            self._remote.unfollow(worker_id)
        self.feed.unfollow(worker_id)

    # --- what is learned of them ---------------------------------------------------------------

    def _trust_changed(self, worker_id: str, trust: Trust, _reasons: tuple[str, ...]) -> None:
        reasons = self.health(worker_id).reasons
        tell = log.info if STARTING.issuperset(reasons) else log.warning
        tell("index trust", worker=worker_id, trust=trust.value, reasons=reasons)
        self._note_trust(worker_id, trust)

    def _note_trust(self, worker_id: str, trust: Trust) -> None:
        if trust is Trust.LOAD_ONLY:
            self.untrusted.add(worker_id)
        else:
            self.untrusted.discard(worker_id)
        self._collect_block_sizes()

    def _collect_block_sizes(self) -> None:
        """Workers that are followed here tell by their holders, others by what they say of themselves."""
        followed = set(self.feed.followed)
        others = [m.worker for m in self._registry.members.values() if m.worker.id not in followed]
        sizes = {worker.block_size_tokens or DEFAULT_BLOCK_TOKENS for worker in others}
        self.block_sizes = tuple(sorted(self._index.block_sizes | sizes)) or (DEFAULT_BLOCK_TOKENS,)
