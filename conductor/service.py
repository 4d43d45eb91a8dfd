"""The conductor as a process of its own: HTTP API, lookup socket, snapshots, metrics."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import structlog
import uvicorn
from fastapi import FastAPI, Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvroute import __version__
from kvroute.clock import monotonic
from kvroute.conductor.core import MAX_INSTANCES, Conductor, ConductorError, Service
from kvroute.conductor.events import EventFeed
from kvroute.conductor.gauges import ConductorGauges
from kvroute.conductor.index import PrefixIndex
from kvroute.conductor.lookups import LookupServer
from kvroute.conductor.mooncake import add_error_handlers, make_routes
from kvroute.conductor.snapshot import Snapshot, save
from kvroute.conductor.snapshot_format import SnapshotRefused
from kvroute.listening import CannotListen, HttpServer, listen, url_of

log = structlog.get_logger(__name__)

CLOSE_S = 2
"""How long a request under way may hold up the end."""
ASK_WITHIN_S = 5.0
"""Of a new connection; uvicorn's own limit is for those that have asked before."""
MAX_REQUESTS = 512
"""In flight at once; more are answered 503."""


@dataclass(frozen=True, slots=True)
class ConductorOptions:
    """How `kvroute conductor` serves."""

    host: str = "127.0.0.1"
    port: int = 13333
    """0 takes a free one."""
    lookup: str | None = None
    """Where gateways' lookups are taken: unix:///path or tcp://host:port."""
    max_bytes: int = 512 * 2**20
    prediction_s: float = 10.0
    snapshot_file: Path | None = None
    snapshot_interval_s: float = 60.0
    services: tuple[Service, ...] = ()
    """Registered at the start."""


class ConductorServer:
    """Everything one conductor process owns. `start`, then `stop`; `run` does both around the signals."""

    def __init__(self, options: ConductorOptions) -> None:
        self._options = options
        self._draining = False
        self.url = ""
        self.lookup_address: str | None = None
        self.snapshots: Counter[str] = Counter()
        """Snapshots by result: saved, failed; sections by result: restored, skipped; files and sections
        refused."""
        self.restored = asyncio.Event()
        """Set when the snapshot, if any, has been loaded: events are then followed from where it ended."""

    async def start(self) -> None:
        """Listen, and answer at once; a snapshot is loaded meanwhile.

        Raises `CannotListen`, and `ValueError` for an option that cannot be.
        """
        options = self._options
        index = PrefixIndex(options.max_bytes, monotonic, options.prediction_s)
        sock = listen(options.host, options.port)
        self.conductor = Conductor(index, EventFeed(index))
        self.lookups = LookupServer(self.conductor)
        try:
            if options.lookup is not None:
                await self._open_lookups(options.lookup)
        except BaseException:
            sock.close()
            await self.conductor.close()
            raise
        config = uvicorn.Config(
            self._make_app(),
            log_config=None,
            lifespan="off",
            access_log=False,
            timeout_graceful_shutdown=CLOSE_S,
            limit_concurrency=MAX_REQUESTS,
            http=_Impatient,
        )
        self._http = HttpServer(config)
        loop = asyncio.get_running_loop()
        self._http_task = loop.create_task(self._http.serve(sockets=[sock]))
        self.url = url_of(sock)
        self._keeper = loop.create_task(self._keep_snapshot())
        log.info("conductor listening", url=self.url, lookup=self.lookup_address)

    async def stop(self) -> None:
        """Not ready, close the sockets, save a last snapshot, close the feed."""
        self._draining = True
        log.info("conductor shutting down")
        self._http.should_exit = True
        await self._http_task
        await self.lookups.close()
        self._keeper.cancel()
        await asyncio.gather(self._keeper, return_exceptions=True)
        if self.restored.is_set():  # else the file knows more than the index does
            await self._save()
        await self.conductor.close()

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT."""
        loop = asyncio.get_running_loop()
        signalled = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, signalled.set)
        await self.start()
        await signalled.wait()
        await self.stop()

    async def _open_lookups(self, address: str) -> None:
        try:
            await self.lookups.start(address)
        except OSError as error:
            raise CannotListen(f"lookup: cannot listen on {address}: {error.strerror or error}") from None
        self.lookup_address = self.lookups.address

    def _make_app(self) -> FastAPI:
        app = FastAPI(title="kvroute conductor", version=__version__, docs_url=None, redoc_url=None)
        app.include_router(make_routes(self.conductor))
        add_error_handlers(app)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(ConductorGauges(self.conductor, self.lookups, self.snapshots))
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)

        @app.get("/livez")
        async def livez() -> dict[str, str]:
            """The process answers."""
            return {"status": "alive"}

        @app.get("/readyz")
        async def readyz(response: Response) -> dict[str, str | int]:
            """200 until a shutdown begins; what is not restored yet is answered by load alone."""
            response.status_code = 503 if self._draining else 200
            status = "draining" if self._draining else "ready" if self.restored.is_set() else "restoring"
            return {"status": status, "restoring": self.conductor.restoring}

        @app.get("/metrics")
        async def metrics() -> Response:
            return Response(generate_latest(registry), media_type="text/plain; version=1.0.0; charset=utf-8")

        return app

    async def _keep_snapshot(self) -> None:
        """Load it once, register the configured services, then save it now and then."""
        path = self._options.snapshot_file
        if path is not None:
            await self._restore(path)
        self._register_configured()
        self.restored.set()
        while path is not None:
            await asyncio.sleep(self._options.snapshot_interval_s)
            await self._save()

    async def _restore(self, path: Path) -> None:
        try:
            snapshot = await Snapshot.open(path)
        except SnapshotRefused as refused:
            self._refuse(refused)
            return
        conductor = self.conductor
        unknown = [
            worker for worker in snapshot.sections if not conductor.knows(worker)
        ]  # a client was faster
        adopted = [(worker, conductor.adopt(worker)) for worker in unknown[:MAX_INSTANCES]]
        if len(unknown) > MAX_INSTANCES:
            self.snapshots["skipped_limit"] += len(unknown) - MAX_INSTANCES
            log.warning("snapshot has too many workers", workers=len(unknown), limit=MAX_INSTANCES)
        for worker, worker_id in adopted:
            watermarks = None
            try:
                watermarks = await snapshot.load(worker, conductor.index, worker_id)
            except SnapshotRefused as refused:
                self._refuse(refused)
            try:
                conductor.begin(worker_id, watermarks)
                self.snapshots["restored"] += watermarks is not None
            except ValueError as error:
                self._refuse(SnapshotRefused("malformed", f"snapshot of {worker_id}: {error}"))
        snapshot.close()
        log.info("snapshot restored", file=str(path), workers=len(adopted))

    def _register_configured(self) -> None:
        for service in self._options.services:
            known = self.conductor.registrations.get(service.key)
            if known is not None and known.service != service:
                self.conductor.unregister(service.key)
            try:
                self.conductor.register(service)
            except ConductorError as error:
                log.error("configured service refused", service=service.key, error=str(error))

    def _refuse(self, refused: SnapshotRefused) -> None:
        self.snapshots[f"refused_{refused.reason}"] += 1
        if refused.reason != "missing":
            log.warning("snapshot refused", reason=refused.reason, error=str(refused))

    async def _save(self) -> None:
        path = self._options.snapshot_file
        if path is None:
            return
        conductor = self.conductor
        try:
            saved = await save(path, conductor.index, conductor.feed, conductor.members())
        except OSError as error:
            self.snapshots["failed"] += 1
            log.warning("snapshot not saved", file=str(path), error=str(error))
            return
        self.snapshots["saved"] += 1
        for reason, workers in saved.skipped.items():
            self.snapshots[f"skipped_{reason}"] += workers
        log.info("snapshot saved", workers=saved.workers, blocks=saved.blocks, bytes=saved.bytes)


@contextlib.asynccontextmanager
async def conducting(options: ConductorOptions) -> AsyncIterator[ConductorServer]:
    """A started conductor that is stopped on the way out; for embedding and tests."""
    server = ConductorServer(options)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


class _Impatient(HttpToolsProtocol):
    """Closes a connection that asks nothing: it counts in `limit_concurrency` like one that does."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(ASK_WITHIN_S, self.timeout_keep_alive_handler)
