"""Starts the gateway's ports and stops them in phases."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import signal
import ssl
import sys
from collections.abc import AsyncIterator, Iterator
from functools import partial

import structlog
import uvicorn
from prometheus_client.core import CounterMetricFamily, Metric

from kvroute import __version__
from kvroute.clock import monotonic
from kvroute.config import Config, ConfigError
from kvroute.config_groups import PolicyConfig
from kvroute.endpoint import Endpoint
from kvroute.listening import BACKLOG, HttpServer, listen, url_of
from kvroute.policies.registry import PolicyError, make_policy
from kvroute.router import logs
from kvroute.router.client import ClientConnection, ServerState
from kvroute.router.control import make_app, make_public_app
from kvroute.router.dispatch import NamedPolicy
from kvroute.router.explain import Explainer
from kvroute.router.gateway import Gateway
from kvroute.router.health import Prober
from kvroute.router.knowledge import Knowledge
from kvroute.router.metrics import Metrics, gauge
from kvroute.router.pd.registry import ConnectorError, make_connector
from kvroute.router.pool import UpstreamPool
from kvroute.router.replicas import Replicas, shared_options
from kvroute.router.services import make_pace, make_services
from kvroute.router.snapshots import IndexSnapshots
from kvroute.router.sweeper import Sweeper
from kvroute.router.workers import Member, Registry, State

log = structlog.get_logger(__name__)

ADMIN_CLOSE_S = 1
"""How long an admin request under way may hold up the end."""


class GatewayServer:
    """Everything one gateway process owns. `start`, then `stop`; `run` does both around the signals."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.metrics = Metrics()
        self._policy = _named_policy(config.policy, "policy")
        self._shadow = (
            None if config.shadow_policy is None else _named_policy(config.shadow_policy, "shadow_policy")
        )
        if config.pd.connector is not None:
            try:
                make_connector(config.pd.connector, config.pd)
            except ConnectorError as error:
                raise ConfigError(f"pd.connector: {error}") from None
        self._tls = _tls_context(config)
        self._shared = shared_options(config.redis)
        self._draining = False
        self.url = ""
        self.admin_url: str | None = None

    async def start(self) -> None:
        """Listen on both ports; workers are probed from now on."""
        config = self._config
        loop = asyncio.get_running_loop()
        data_socket = listen(config.host, config.port)
        admin_socket = None
        if config.admin.enabled:
            try:
                admin_socket = listen(config.admin.host, config.admin.port, "admin.")
            except BaseException:
                data_socket.close()
                raise
        sweeper = Sweeper(loop)

        def make_pool(endpoint: Endpoint) -> UpstreamPool:
            return UpstreamPool(endpoint, config.timeouts, sweeper, loop, self._tls)

        self.registry = Registry(
            make_pool,
            health=config.health,
            breaker=config.breaker,
            limits=config.limits,
            clock=monotonic,
            make_pace=partial(make_pace, config),
            splits=config.pd.connector is not None,
        )
        self.registry.on_change(self._member_changed)
        self._prober = Prober(self.registry, config.health)
        self.knowledge = Knowledge(config, self.registry, self.metrics)
        self.replicas = None
        if self._shared is not None:
            self.replicas = Replicas(self._shared, self.registry, self.knowledge.predict, self.metrics)
            self.knowledge.on_routed(self.replicas.routed)
        services = make_services(
            config, self.registry, self.knowledge, self.metrics, policy=self._policy, shadow=self._shadow
        )
        self.waiting, self._tokens, self._hints = services.waiting, services.tokens, services.hints
        self._pd = services.pd
        try:
            await self._pd.start(config.host)
        except OSError as error:
            raise ConfigError(f"pd.connector: {error}") from None
        if self._tokens is not None:
            self._tokens.start()
        explainer = Explainer(services)
        app = make_app(
            self.registry,
            self.metrics,
            draining=lambda: self._draining,
            admin_token=config.admin.token,
            decided=None if self.replicas is None else self.replicas.decided,
            explainer=explainer,
            decision_log=services.decision_log,
        )
        public_app = make_public_app(
            self.registry, self.metrics, draining=lambda: self._draining, explainer=explainer
        )
        self._gateway = Gateway(services, public_app)
        self.state = ServerState(self._gateway, config.limits, config.timeouts, sweeper, loop)
        self.metrics.add_source(self)
        for worker in config.workers:
            self.registry.add(worker)
        if self.replicas is not None:
            await self.replicas.state.start()
        self.snapshots = self._make_snapshots()
        if self.snapshots is not None:
            await self.snapshots.start()
        self.knowledge.start(None if self.snapshots is None else self.snapshots.restore)
        self._server = await loop.create_server(
            lambda: ClientConnection(self.state), sock=data_socket, backlog=BACKLOG
        )
        self.url = url_of(data_socket)
        if admin_socket is not None:
            self.admin_url = url_of(admin_socket)
            self._admin = HttpServer(
                uvicorn.Config(
                    app,
                    log_config=None,
                    lifespan="off",
                    access_log=False,
                    timeout_graceful_shutdown=ADMIN_CLOSE_S,
                )
            )
            self._admin_task = loop.create_task(self._admin.serve(sockets=[admin_socket]))
        log.info("listening", url=self.url, admin_url=self.admin_url, policy=self._policy.name)

    def _make_snapshots(self) -> IndexSnapshots | None:
        path = self._config.conductor.snapshot_file
        shared = None if self.replicas is None else self.replicas.state
        if self.knowledge.remote is not None or (path is None and shared is None):
            return None
        interval_s = self._config.conductor.snapshot_interval_s
        return IndexSnapshots(path, shared, interval_s, self.knowledge, self.metrics)

    async def stop(self) -> None:
        """Not ready, keep serving, drain with a limit, close."""
        shutdown = self._config.shutdown
        self._draining = True
        self.waiting.close()
        self.state.closing = True  # from now on each response asks its client to connect elsewhere
        log.info("shutting down", phase="not ready", keep_serving_s=shutdown.keep_serving_s)
        await asyncio.sleep(shutdown.keep_serving_s)
        log.info(
            "shutting down", phase="drain", limit_s=shutdown.drain_s, connections=len(self.state.connections)
        )
        self._server.close()
        for connection in list(self.state.connections):
            connection.close_when_idle()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(shutdown.drain_s):
                await self.state.empty.wait()
        log.info("shutting down", phase="close", cut=len(self.state.connections))
        for connection in list(self.state.connections):
            connection.abort()
        await self.state.empty.wait()
        self._gateway.close()
        await self._prober.close()
        if self._hints is not None:
            await self._hints.closer.stop()
        await self._pd.close()
        if self.snapshots is not None:
            await self.snapshots.stop()
        for member in list(self.registry.members.values()):
            self.registry.remove(member)
        if self._tokens is not None:
            await self._tokens.close()
        if self.replicas is not None:
            await self.replicas.state.stop()
        await self.knowledge.close()
        if self.admin_url is not None:
            self._admin.should_exit = True
            await self._admin_task

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT; a second signal cuts the phases short."""
        loop = asyncio.get_running_loop()
        signalled = asyncio.Event()
        again = asyncio.Event()

        def on_signal() -> None:
            (again if signalled.is_set() else signalled).set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        _raise_file_limit()
        await self.start()
        _tune_collector()
        _tune_threads()
        await signalled.wait()
        stopping = loop.create_task(self.stop())
        hurry = loop.create_task(again.wait())
        await asyncio.wait([stopping, hurry], return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not stopping.done():
            log.warning("second signal: closing at once")
            stopping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await stopping

    def _member_changed(self, member: Member) -> None:
        if member.state is State.GONE and all(
            other.endpoint.url != member.endpoint.url for other in self.registry.members.values()
        ):
            self.metrics.forget_worker(member.endpoint.url)

    def gauges(self) -> Iterator[Metric]:
        dropped = CounterMetricFamily("kvroute_log_lines_dropped", "Log lines not written.", labels=())
        dropped.add_metric((), logs.writer.dropped if logs.writer is not None else 0)
        yield dropped
        yield gauge("kvroute_build_info", "1; the version is a label.", ("version",), [((__version__,), 1)])
        yield gauge(
            "kvroute_client_connections", "Open client connections.", (), [((), len(self.state.connections))]
        )
        yield gauge(
            "kvroute_buffered_request_bytes", "Request bodies held.", (), [((), self.state.buffered_bytes)]
        )


@contextlib.asynccontextmanager
async def running(config: Config) -> AsyncIterator[GatewayServer]:
    """A started gateway that is stopped on the way out; for embedding and tests."""
    server = GatewayServer(config)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def _raise_file_limit() -> None:
    """As many descriptors as the process may have: every request in flight takes two."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _tune_threads() -> None:
    """Long prompts are read on threads: nobody should wait the default 5 ms for the interpreter."""
    sys.setswitchinterval(0.0005)


def _tune_collector() -> None:
    """Requests leave almost no cycles, so look for them less often, and never among what was imported."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def _named_policy(options: PolicyConfig, field: str) -> NamedPolicy:
    try:
        return NamedPolicy(options.name, make_policy(options.name, options.options))
    except PolicyError as error:
        raise ConfigError(f"{field}: {error}") from None


def _tls_context(config: Config) -> ssl.SSLContext | None:
    if (
        not any(worker.url.startswith("https") for worker in config.workers)
        and config.upstream_ca_file is None
    ):
        return None
    try:
        return ssl.create_default_context(cafile=config.upstream_ca_file)
    except OSError as error:
        raise ConfigError(f"upstream_ca_file: {config.upstream_ca_file}: {error}") from None
