"""What the gateway knows of its workers' caches: the embedded conductor, and the remote one if it has one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import structlog
from msgspec import Struct, to_builtins

from kvroute.clock import Clock, monotonic
from kvroute.conductor.events import EventFeed, EventSource, discovered_sources
from kvroute.conductor.hits import HitAccount, PrefillCost
from kvroute.conductor.index import PrefixIndex
from kvroute.conductor.keys import Namespace
from kvroute.conductor.remote import RemoteConductor, RemoteOptions
from kvroute.config import Config
from kvroute.router.knowledge_gauges import feed_gauges, hit_gauges, index_gauges, remote_gauges
from kvroute.router.metrics import Metrics
from kvroute.router.parsed_request import KeySets, ParsedRequest
from kvroute.router.workers import Eligible, Member, Registry, State, base_model
from kvroute.types import NO_MATCH, KeyMode, Outcome, PrefixMatch, PromptKeys, Trust

if TYPE_CHECKING:
    from prometheus_client.core import Metric

log = structlog.get_logger(__name__)

DEFAULT_BLOCK_TOKENS = 16
"""Where no worker has said what its blocks are."""
SWEEP_PAUSE_S = 0.02


class Prompt(Struct, frozen=True, gc=False):
    """The keys of one request's prompt, and what a remote conductor said of them."""

    sets: KeySets = ()
    mode: KeyMode | None = None
    remote: Sequence[PrefixMatch] | None = None
    """Parallel to `worker_ids`; None when there is no remote conductor, or no answer of it."""
    worker_ids: Sequence[str] = ()


NO_PROMPT = Prompt()


class Knowledge:
    """Index and events of the workers of one gateway. One thread owns it; only `ask` and `close` wait.

    A remote conductor, where one is configured, follows the events in place of the embedded one, which then
    knows only what this gateway routed: the fallback when the remote one is not in time.
    """

    def __init__(
        self, config: Config, registry: Registry, metrics: Metrics, clock: Clock = monotonic
    ) -> None:
        options = config.prefix_index
        self.index = PrefixIndex(options.max_bytes, clock, options.prediction_s)
        self.feed = EventFeed(self.index, clock=clock, on_trust=self._trust_changed)
        self.remote = None
        if config.conductor.connect is not None:
            self.remote = RemoteConductor(
                RemoteOptions(config.conductor.connect, config.conductor.budget_s), clock
            )
        costs = {name: PrefillCost(**vars(model.prefill)) for name, model in config.models.items()}
        self.hits = HitAccount(clock, costs)
        self._chunk_bytes = options.chunk_bytes
        self._follows_events = options.kv_events
        self._registry = registry
        self._metrics = metrics
        self.block_sizes: tuple[int, ...] = (DEFAULT_BLOCK_TOKENS,)
        """Tokens per block of the chains that the workers' indexes are made of; most fleets have one."""
        self._known: dict[str, tuple[EventSource, ...]] = {}
        """Workers announced, with their sources of events."""
        self._untrusted: set[str] = set()
        self._tell_routed: Callable[[Member, PromptKeys], None] | None = None
        self._sweeping: asyncio.TimerHandle | None = None
        registry.on_change(self._member_changed)
        metrics.add_source(self)

    def on_routed(self, tell: Callable[[Member, PromptKeys], None]) -> None:
        """Call `tell` with what is routed here, for other replicas to know."""
        self._tell_routed = tell

    def start(self) -> None:
        """Connect to the remote conductor, if there is one. Needs a running loop."""
        if self.remote is not None:
            self.remote.start()

    async def close(self) -> None:
        """Close all sockets and tasks; idempotent."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        await self.feed.close()
        if self.remote is not None:
            await self.remote.close()

    # --- workers -------------------------------------------------------------------------------

    def _member_changed(self, member: Member) -> None:
        if member.state is State.GONE:
            self._forget(member)
        elif member.state is State.READY and member.worker.id not in self._known:
            self._announce(member)
        self._collect_block_sizes()

    def _collect_block_sizes(self) -> None:
        """Workers that are followed here tell by their holders, others by what they say of themselves."""
        followed = set(self.feed.followed)
        others = [m.worker for m in self._registry.members.values() if m.worker.id not in followed]
        sizes = {worker.block_size_tokens or DEFAULT_BLOCK_TOKENS for worker in others}
        self.block_sizes = tuple(sorted(self.index.block_sizes | sizes))

    def _announce(self, member: Member) -> None:
        """A worker is ready for the first time: what it said of its events is known by now."""
        worker = member.worker
        sources = self._known[worker.id] = self._sources(member) if self._follows_events else ()
        namespace = Namespace(model=base_model(member))
        silent = member.config.silent_tier_blocks
        if self.remote is not None:
            self.remote.follow(
                worker.id,
                worker.url,
                namespace,
                sources,
                block_tokens=worker.block_size_tokens,
                silent_tier_blocks=silent,
            )
        elif sources:
            self.feed.follow(
                worker.id,
                sources,
                namespace,
                block_tokens=worker.block_size_tokens,
                silent_tier_blocks=silent,
            )
        log.info("index", worker=worker.id, kv_event_sources=[source.endpoint for source in sources])

    def _sources(self, member: Member) -> tuple[EventSource, ...]:
        given, host = member.config.kv_events, member.endpoint.authority.rpartition(":")[0] or "127.0.0.1"
        try:
            if given is None:
                return discovered_sources(member.kv_event_sources, host)
            first = EventSource(
                given.endpoint, given.replay_endpoint, topic=given.topic, bind="://*" in given.endpoint
            )
            return tuple(
                one if one.bind else one.at(host) for one in first.ranks(member.worker.data_parallel_size)
            )
        except ValueError as error:
            log.warning("unusable kv event sources", worker=member.worker.id, error=str(error))
            return ()

    def _forget(self, member: Member) -> None:
        worker_id = member.worker.id
        self._untrusted.discard(worker_id)
        if self._known.pop(worker_id, None) is not None:
            self.feed.unfollow(worker_id)
            if self.remote is not None:
                self.remote.unfollow(worker_id)
        self.index.remove_worker(worker_id)
        self._sweep()

    def _sweep(self) -> None:
        """Give a removed worker's memory back bit by bit, so that no request waits for it."""
        self._sweeping = None
        if self.index.sweep():
            self._sweeping = asyncio.get_running_loop().call_later(SWEEP_PAUSE_S, self._sweep)

    def _trust_changed(self, worker_id: str, trust: Trust, reasons: tuple[str, ...]) -> None:
        tell = log.info if trust is Trust.EXACT else log.warning
        tell("index trust", worker=worker_id, trust=trust.value, reasons=reasons)
        self._collect_block_sizes()
        (self._untrusted.add if trust is Trust.LOAD_ONLY else self._untrusted.discard)(worker_id)

    # --- one request ---------------------------------------------------------------------------

    def make_keys(self, request: ParsedRequest) -> tuple[KeySets, str | None]:
        """What `ParsedRequest.prompt_keys` gives for these workers; from any thread."""
        return request.prompt_keys(self._chunk_bytes, self.block_sizes)

    def prompt(self, request: ParsedRequest) -> Prompt:
        """The keys of a request's prompt."""
        sets, _ = self.make_keys(request)
        return Prompt(sets, next(iter(sets[0].values())).mode) if sets else NO_PROMPT

    def keys(self, request: ParsedRequest) -> Prompt:
        """The same, and counts how they were made, or why there are none."""
        prompt = self.prompt(request)
        if prompt.mode is None:
            self._metrics.no_keys.add(self.make_keys(request)[1] or "none")
            return prompt
        self._metrics.prompts.add(prompt.mode.value)
        if prompt.mode is KeyMode.BYTES:
            self._metrics.approximate.add(request.no_tokens or "none")
        return prompt

    def match(self, prompt: Prompt, eligible: Eligible) -> Sequence[PrefixMatch]:
        """What each eligible worker holds of the prompt, parallel to them."""
        ids = eligible.ids
        if not prompt.sets:
            return [NO_MATCH] * len(ids)
        if prompt.remote is not None:
            if prompt.worker_ids is ids:
                return prompt.remote
            known = dict(zip(prompt.worker_ids, prompt.remote, strict=True))
            return [known.get(worker_id, NO_MATCH) for worker_id in ids]
        matches = self.index.match(prompt.sets[0], ids)
        for keys in prompt.sets[1:]:
            matches = list(map(_plus, matches, self.index.match(keys, ids)))
        if self._untrusted:
            matches = [
                NO_MATCH if worker_id in self._untrusted else match
                for worker_id, match in zip(ids, matches, strict=True)
            ]
        return matches

    async def ask(self, prompt: Prompt, eligible: Eligible) -> Prompt:
        """The same prompt with the remote conductor's answer, if it came in time."""
        assert self.remote is not None
        ids = eligible.ids
        total: Sequence[PrefixMatch] | None = None
        for keys in prompt.sets:
            found = await self.remote.match(list(keys.values()), ids)
            if found.fallback is not None:
                return prompt
            matches = [
                NO_MATCH if trust is Trust.LOAD_ONLY else match
                for match, trust in zip(found.matches, found.trusts, strict=True)
            ]
            total = matches if total is None else list(map(_plus, total, matches))
        return Prompt(prompt.sets, prompt.mode, total, ids)

    def routed(self, member: Member, prompt: Prompt) -> None:
        """The prompt has just been sent to this worker."""
        for sets in prompt.sets:
            for keys in sets.values():
                self.predict(member.worker.id, keys)
                if self.remote is not None:
                    self.remote.predict(member.worker.id, keys)
                if self._tell_routed is not None:
                    self._tell_routed(member, keys)

    def predict(self, worker_id: str, keys: PromptKeys) -> None:
        """A prompt was sent to this worker, by this gateway or by another replica."""
        self.index.predict(worker_id, keys)

    def observe(self, model: str, prompt: Prompt, match: PrefixMatch, outcome: Outcome) -> None:
        """What an engine reported of a prompt, beside what was known of it. `model` is a metric label.

        Only confirmed knowledge can be wrong; a prediction is a guess about requests still under way.
        """
        if outcome.failure is None and outcome.prompt_tokens is not None:
            self.hits.observe(
                model,
                outcome.prompt_tokens,
                None if prompt.mode is None else match,
                self.block_sizes[0],
                outcome.cached_tokens,
            )
        if (
            prompt.mode is KeyMode.TOKENS
            and match.tokens == match.confirmed_tokens
            and outcome.cached_tokens is not None
            and outcome.prompt_tokens is not None
        ):
            tell = self.feed.observe if self.remote is None else self.remote.observe
            tell(outcome.worker.id, match.tokens, outcome.cached_tokens, outcome.prompt_tokens)

    # --- what others see -----------------------------------------------------------------------

    def index_state(self, worker_id: str) -> dict[str, Any]:
        """How far the index of a worker is believed, and why not farther."""
        health = self.feed.health(worker_id)
        held = self.index.held_blocks(worker_id)
        if health is None:
            return {"trust": Trust.APPROXIMATE.value, "reasons": ["no_kv_events"], "held_blocks": held}
        ranks = [to_builtins(holder) for holder in health.holders]
        reasons = list(health.reasons)
        return {"trust": health.trust.value, "reasons": reasons, "held_blocks": held, "ranks": ranks}

    def gauges(self) -> Iterator[Metric]:
        urls = {member.worker.id: member.worker.url for member in self._registry.members.values()}
        healths = {urls[name]: self.feed.health(name) for name in self.feed.followed if name in urls}
        yield from index_gauges(self.index)
        yield from feed_gauges(healths)
        yield from hit_gauges(self.hits)
        if self.remote is not None:
            yield from remote_gauges(self.remote)


def _plus(one: PrefixMatch, more: PrefixMatch) -> PrefixMatch:
    """Of two prompts of one request."""
    return PrefixMatch(
        one.tokens + more.tokens,
        one.gpu_tokens + more.gpu_tokens,
        one.cpu_tokens + more.cpu_tokens,
        one.confirmed_tokens + more.confirmed_tokens,
        one.predicted_tokens + more.predicted_tokens,
        one.dp_rank if one.dp_rank == more.dp_rank else None,
    )
