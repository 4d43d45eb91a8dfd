"""What the gateway knows of its workers' caches: the embedded conductor, and the remote one if it has one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from kvroute.clock import Clock, monotonic
from kvroute.conductor.hits import HitAccount, PrefillCost
from kvroute.conductor.index import PrefixIndex
from kvroute.conductor.remote import RemoteConductor, RemoteOptions
from kvroute.config import Config, ConfigError
from kvroute.router.eligible import Eligible
from kvroute.router.following import Following, Restore
from kvroute.router.knowledge_gauges import feed_gauges, hit_gauges, index_gauges, remote_gauges
from kvroute.router.metrics import Metrics
from kvroute.router.parsed_request import KeySets, ParsedRequest
from kvroute.router.workers import Member, Registry
from kvroute.types import NO_MATCH, KeyMode, Outcome, PrefixMatch, PromptKeys, Trust

if TYPE_CHECKING:
    from prometheus_client.core import Metric


class Prompt(Struct, frozen=True, gc=False):
    """The keys of one request's prompt, and what a remote conductor said of them."""

    sets: KeySets = ()
    mode: KeyMode | None = None
    remote: Sequence[PrefixMatch] | None = None
    """Parallel to `worker_ids`; None when there is no remote conductor, or no answer of it."""
    worker_ids: Sequence[str] = ()


NO_PROMPT = Prompt()


class Knowledge:
    """The index of one gateway's workers, and its answers. One thread owns it; only `ask` and `close` wait.

    A remote conductor, where one is configured, follows the events in place of the embedded one, which then
    knows only what this gateway routed: the fallback when the remote one is not in time.
    """

    def __init__(
        self, config: Config, registry: Registry, metrics: Metrics, clock: Clock = monotonic
    ) -> None:
        options, remote = config.prefix_index, config.conductor
        self.index = PrefixIndex(options.max_bytes, clock, options.prediction_s)
        self.remote = None
        if remote.connect is not None:
            try:
                self.remote = RemoteConductor(RemoteOptions(remote.connect, remote.budget_s), clock)
            except ValueError as error:
                raise ConfigError(f"conductor.connect: {error}") from None
        self.following = Following(registry, self.index, self.remote, events=options.kv_events, clock=clock)
        costs = {name: PrefillCost(**vars(model.prefill)) for name, model in config.models.items()}
        self.hits = HitAccount(clock, costs)
        self._chunk_bytes = options.chunk_bytes
        self._metrics = metrics
        self._tell_routed: Callable[[Member, PromptKeys], None] | None = None
        metrics.add_source(self)

    def on_routed(self, tell: Callable[[Member, PromptKeys], None]) -> None:
        """Call `tell` with what is routed here, for other replicas to know."""
        self._tell_routed = tell

    def start(self, restore: Restore | None = None) -> None:
        """Follow the workers; `restore` brings back what was known of one. Needs a running loop."""
        if self.remote is not None:
            self.remote.start()
        self.following.start(restore)

    async def close(self) -> None:
        """Close all sockets and tasks; idempotent."""
        await self.following.close()
        if self.remote is not None:
            await self.remote.close()

    # --- one request ---------------------------------------------------------------------------

    def make_keys(self, request: ParsedRequest) -> tuple[KeySets, str | None]:
        """What `ParsedRequest.prompt_keys` gives for these workers; from any thread."""
        return request.prompt_keys(self._chunk_bytes, self.following.block_sizes)

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
        if self.following.untrusted:
            matches = [
                NO_MATCH if worker_id in self.following.untrusted else match
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
                self.following.block_sizes[0],
                outcome.cached_tokens,
            )
        if (
            prompt.mode is KeyMode.TOKENS
            and match.tokens == match.confirmed_tokens
            and outcome.cached_tokens is not None
            and outcome.prompt_tokens is not None
        ):
            tell = self.following.feed.observe if self.remote is None else self.remote.observe
            tell(outcome.worker.id, match.tokens, outcome.cached_tokens, outcome.prompt_tokens)

    # --- what others see -----------------------------------------------------------------------

    def gauges(self) -> Iterator[Metric]:
        yield from index_gauges(self.index)
        yield from feed_gauges(self.following.healths())
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
