"""Puts together what exchanges work with."""

from __future__ import annotations

from kvroute.clock import monotonic
from kvroute.config import Config
from kvroute.config_groups import WorkerConfig
from kvroute.policies.costs.links import LINKS, Link, PdLinks
from kvroute.policies.costs.pace import Pace
from kvroute.preset_file import load_speed
from kvroute.router.decision_log import DecisionLog
from kvroute.router.dispatch import Dispatcher, NamedPolicy
from kvroute.router.exchange import Services
from kvroute.router.hints.fields import HintOptions
from kvroute.router.hints.hints import Hints
from kvroute.router.knowledge import Knowledge
from kvroute.router.metrics import Metrics
from kvroute.router.pacing import Pacing
from kvroute.router.pd.books import Books, shorter
from kvroute.router.pd.metrics import PdMetrics
from kvroute.router.pd.service import Pd
from kvroute.router.retry import RetryBudget
from kvroute.router.token_source import GatewayTokens
from kvroute.router.waiting import Waiting
from kvroute.router.workers import Registry


def make_services(
    config: Config,
    registry: Registry,
    knowledge: Knowledge,
    metrics: Metrics,
    *,
    policy: NamedPolicy,
    shadow: NamedPolicy | None,
) -> Services:
    """Nothing of it runs yet; `tokens` is to be started, and `hints.closer` to be stopped."""
    decision_log = DecisionLog(config.decision_log.ratio, policy.name, monotonic, config.decision_log.size)
    metrics.add_source(decision_log)
    dispatcher = Dispatcher(
        registry,
        knowledge,
        metrics,
        policy,
        shadow=shadow,
        budget_s=config.policy_budget_s,
        clock=monotonic,
        decision_log=decision_log,
        peer_link=_peer_link(config),
        pd_links=PdLinks(**{near: LINKS[name] for near, name in config.pd.links.model_dump().items()}),
    )
    limits = config.limits
    waiting = Waiting(
        dispatcher, registry, metrics, limit=limits.held_requests, limit_s=limits.held_s, clock=monotonic
    )
    tokens = None
    if config.models and dispatcher.needs_prefix:
        tokens = GatewayTokens(config.models, registry, metrics)
    hints = None
    if config.retention.hints:
        options = HintOptions(**config.retention.model_dump(exclude={"hints", "p2p_link"}))
        hints = Hints(options, registry, metrics)
    pacing = Pacing(registry, dispatcher.lengths, metrics, monotonic)
    pd = config.pd
    books = Books(
        config,
        registry,
        metrics,
        PdMetrics(),
        pacing,
        knowledge,
        shorter(config.timeouts, pd.prefill_timeout_s),
        shorter(config.timeouts, pd.decode_timeout_s),
    )
    return Services(
        config,
        registry,
        dispatcher,
        metrics,
        RetryBudget(config.retry),
        knowledge,
        waiting,
        pacing,
        decision_log,
        Pd(books, dispatcher),
        tokens,
        hints,
    )


def make_pace(config: Config, worker: WorkerConfig) -> Pace:
    """How fast a worker is taken to be until it has answered."""
    name = worker.speed or config.speed
    if name is None:
        return Pace()
    speed = load_speed(name)
    return Pace(speed, kv_tokens=speed.kv_tokens)


def _peer_link(config: Config) -> Link | None:
    retention = config.retention
    may_pull = retention.hints and (retention.p2p or retention.p2p_port is not None)
    return LINKS[retention.p2p_link] if may_pull else None
