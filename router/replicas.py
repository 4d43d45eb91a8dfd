"""This gateway among its replicas: what they share through Redis, brought into the registry and the index."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator
from os import getpid
from typing import TYPE_CHECKING

import structlog
from prometheus_client.core import CounterMetricFamily

from kvroute.conductor.shared import (
    Intent,
    LocalWorker,
    OthersLoad,
    SharedOptions,
    SharedState,
    SharedWorker,
)
from kvroute.config import ConfigError
from kvroute.config_groups import RedisConfig, WorkerConfig
from kvroute.router.metrics import Metrics, gauge
from kvroute.router.workers import Member, Registry, State
from kvroute.types import PromptKeys

if TYPE_CHECKING:
    from prometheus_client.core import Metric

log = structlog.get_logger(__name__)


def shared_options(config: RedisConfig) -> SharedOptions | None:
    """None where nothing is shared; raises ConfigError that names the field."""
    if config.url is None:
        return None
    try:
        return SharedOptions(config.url.get_secret_value(), prefix=config.prefix)
    except ValueError as error:
        raise ConfigError(f"redis.{error}") from None


class Replicas:
    """The host of a `SharedState`: answers it from the registry, and does there what it says.

    `predict` is told what another replica routed. Losing Redis leaves everything else as it is.
    """

    def __init__(
        self,
        options: SharedOptions,
        registry: Registry,
        predict: Callable[[str, PromptKeys], None],
        metrics: Metrics,
    ) -> None:
        self._registry = registry
        self._predict = predict
        self.state = SharedState(options, f"{socket.gethostname()}:{getpid()}", self)
        registry.on_change(self._member_changed)
        metrics.add_source(self)

    # --- from this gateway ---------------------------------------------------------------------

    def routed(self, member: Member, keys: PromptKeys) -> None:
        """A prompt was just sent to this worker; the others will know."""
        self.state.routed(member.worker.url, member.started_at, keys)

    def decided(self, member: Member, intent: Intent) -> None:
        """An operator did this to a worker here. One with a key of its own is not shared: it is a secret."""
        if intent is not Intent.SERVING and self._find(member.worker.url) is not None:
            return  # a newer incarnation serves this URL: it is about the old one alone
        if member.config.api_key is None:
            self.state.decided(
                SharedWorker(
                    member.worker.url,
                    intent,
                    member.config.engine,
                    member.worker.models,
                    member.worker.block_size_tokens,
                )
            )

    def _member_changed(self, member: Member) -> None:
        if member.state is State.STARTING:
            self._take_load(member, self.state.others_load(member.worker.url))

    # --- from the others -----------------------------------------------------------------------

    def local_loads(self) -> Iterable[tuple[str, int, int]]:
        for member in self._registry.members.values():
            tokens = member.load.pending_prefill_tokens - member.others_prefill_tokens
            yield member.worker.url, member.requests, tokens

    def find_worker(self, url: str) -> LocalWorker | None:
        member = self._find(url)
        return None if member is None else LocalWorker(member.worker.id, member.started_at)

    def predict(self, worker_id: str, keys: PromptKeys) -> None:
        self._predict(worker_id, keys)

    def others_load(self, url: str, load: OthersLoad) -> None:
        member = self._find(url)
        if member is not None:
            self._take_load(member, load)

    def adopt(self, worker: SharedWorker) -> None:
        members = [m for m in self._registry.members.values() if m.worker.url == worker.url]
        log.info("decided by another replica", url=worker.url, intent=worker.intent.value, by=worker.origin)
        if worker.intent is Intent.SERVING:
            if self._find(worker.url) is None:
                self._registry.add(WorkerConfig(url=worker.url, engine=worker.engine))
        else:
            leave = self._registry.remove if worker.intent is Intent.REMOVED else self._registry.drain
            for member in members:
                leave(member)

    def _find(self, url: str) -> Member | None:
        """The incarnation that would be chosen."""
        for member in self._registry.members.values():
            if member.worker.url == url and member.state is not State.DRAINING:
                return member
        return None

    def _take_load(self, member: Member, load: OthersLoad) -> None:
        self._registry.set_others(member, load.requests, load.pending_prefill_tokens)

    # --- what others see -----------------------------------------------------------------------

    def gauges(self) -> Iterator[Metric]:
        stats = self.state.stats
        yield gauge(
            "kvroute_redis_connected",
            "1 while replicas share, 0 on local knowledge.",
            (),
            [((), stats.connected)],
        )
        yield gauge("kvroute_replicas", "Other replicas heard of lately.", (), [((), stats.replicas)])
        yield gauge("kvroute_redis_queue_bytes", "What waits to be told.", (), [((), stats.queue_bytes)])
        yield gauge(
            "kvroute_redis_waiting_bytes",
            "What was told of workers not known yet.",
            (),
            [((), stats.waiting_bytes)],
        )
        prompts = CounterMetricFamily(
            "kvroute_replica_prompts",
            "Routed prompts told to and heard from other replicas.",
            labels=("direction",),
        )
        for direction, count in (
            ("told", stats.told),
            ("heard", stats.heard),
            ("coalesced", stats.coalesced),
            ("truncated", stats.truncated),
        ):
            prompts.add_metric((direction,), count)
        yield prompts
        for name, text, counts in (
            ("kvroute_redis_dropped", "News not told to the others, by why.", stats.dropped),
            ("kvroute_redis_ignored", "Entries without effect here, by why.", stats.ignored),
            ("kvroute_redis_failures", "Failed calls, by why.", stats.lost),
            ("kvroute_redis_snapshot_failures", "Snapshots not stored or fetched.", stats.snapshot_failures),
        ):
            family = CounterMetricFamily(name, text, labels=("reason",))
            for reason, count in counts.items():
                family.add_metric((reason.value,), count)
            yield family
