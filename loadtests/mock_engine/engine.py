"""One mock engine: its listening socket, its scheduler and the requests it is answering."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from collections.abc import Sequence as Listed
from dataclasses import replace

import orjson
import xxhash

from kvroute.endpoint import http_origin
from kvroute.loadtests.mock_engine.answers import (
    Answer,
    Misbehaviour,
    PlainAnswer,
    TokenAnswer,
    unauthorized,
)
from kvroute.loadtests.mock_engine.block_cache import BlockCache
from kvroute.loadtests.mock_engine.connection import Connection
from kvroute.loadtests.mock_engine.dialects import DIALECTS
from kvroute.loadtests.mock_engine.dialects.base import Call, Dialect
from kvroute.loadtests.mock_engine.driver import Driver
from kvroute.loadtests.mock_engine.events import EventPublisher
from kvroute.loadtests.mock_engine.faults import CLEAN, FaultError, Faults
from kvroute.loadtests.mock_engine.intake import Intake, Reading, faults_for
from kvroute.loadtests.mock_engine.journal import Entry, Journal
from kvroute.loadtests.mock_engine.lower_tiers import make_lower_tiers
from kvroute.loadtests.mock_engine.metrics import EngineMetrics
from kvroute.loadtests.mock_engine.options import MockOptions
from kvroute.loadtests.mock_engine.pd import EngineDies, PdSide, make_pd_side
from kvroute.loadtests.mock_engine.pd.books import PdBooks
from kvroute.loadtests.mock_engine.pd.shared_storage import SharedStore
from kvroute.loadtests.mock_engine.routes import ROUTES, UNGUARDED
from kvroute.loadtests.mock_engine.scheduler import Scheduler
from kvroute.loadtests.mock_engine.streams import StreamAnswer
from kvroute.loadtests.mock_engine.wire import ApiError, Request, json_response, rejected

_DOWN_S = 0.5
"""After a request that ends the process."""


REBIND_TRIES, REBIND_S = 50, 0.1


class MockEngine:
    """Engine `index` of a fleet. `faults` may be assigned to at any time."""

    def __init__(self, options: MockOptions, index: int) -> None:
        self.options = options
        self.index = index
        self.faults: Faults = replace(options.faults)
        self.journal = Journal(options.journal_ids, options.journal_requests)
        self.port = options.port + index if options.port else 0
        self.incarnation = 0
        self.peers: Listed[MockEngine] = (self,)
        """Whom a request may name to pull from."""
        self.store = SharedStore()
        """Of all peers."""
        self.restarting = False
        self.connections: set[Connection] = set()
        self.accepted = self.bytes_read = self.bytes_written = 0
        self.live: set[Answer] = set()
        self.events: EventPublisher | None = None
        self.pd_books = PdBooks(options.journal_ids)
        self._server: asyncio.Server | None = None
        self._restart: asyncio.Task[None] | None = None
        self.now_s: Callable[[], float] = time.monotonic
        self._requests = 0
        self.health_checks = 0
        self._reset()

    def __repr__(self) -> str:
        return f"<MockEngine {self.index} {self.url} {len(self.live)} live, {self.scheduler!r}>"

    def _reset(self) -> None:
        """The state a process starts with."""
        options = self.options
        self.hash_seed = xxhash.xxh3_64_intdigest(
            b"%d/%d/%d" % (options.seed, self.index, self.incarnation), 0
        )
        self.adapters: dict[str, str] = {name: f"/adapters/{name}" for name in options.adapters}
        self.tiers = make_lower_tiers(options, self.now_s)
        self.scheduler = Scheduler(
            BlockCache(options.capacity_blocks),
            options.step_speed,
            options.block_size_tokens,
            options.max_batched_tokens,
            options.max_sequences,
            self.tiers,
        )
        self._adapter_ids: dict[str, int] = {}
        self.intake = Intake(options, self.hash_seed, self.adapters)
        self.metrics = EngineMetrics(self)
        self.driver = Driver(self)
        self.pd: PdSide = make_pd_side(self)

    @property
    def host(self) -> str:
        """Where it answers; the loopback address when it listens on all."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.options.host, self.options.host)

    @property
    def url(self) -> str:
        """`host` and port."""
        return http_origin(self.host, self.port)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len({id(sequence.payload[0]) for sequence in self.scheduler.waiting})

    @property
    def running(self) -> int:
        """Requests being answered."""
        return len(self.live) - self.waiting

    @property
    def close_idle_s(self) -> float | None:
        """Seconds an idle connection lives."""
        return self.options.close_idle_s if self.faults.close_idle is None else self.faults.close_idle

    def adapter_id(self, name: str) -> int:
        """The integer vLLM gives an adapter, in order of first use."""
        return self._adapter_ids.setdefault(name, len(self._adapter_ids) + 1)

    # Life.

    async def start(self) -> None:
        """Listen; OSError when the port is taken."""
        loop = asyncio.get_running_loop()
        self.now_s = loop.time
        self._server = await loop.create_server(
            lambda: Connection(self), self.options.host, self.port, backlog=1024, reuse_address=True
        )
        self.port = self._server.sockets[0].getsockname()[1]
        if self.options.kv_events and self.events is None:
            topic = f"kv@{self.options.host}:{self.port}@{self.options.model}"
            self.events = EventPublisher(
                self.options.host,
                topic,
                self.options.kv_event_replay_batches,
                self.options.seed + self.index,
                lambda: self.faults,
            )
        if self.events is not None:
            await self.events.start()
        self.driver.start()
        self.pd.start()

    async def stop(self) -> None:
        """Close everything; idempotent."""
        restart, self._restart = self._restart, None
        if restart is not None and restart is not asyncio.current_task():
            restart.cancel()
        await self.driver.stop()
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for answer in list(self.live):
            answer.end("broken")
        self.pd.stop()
        for connection in list(self.connections):
            connection.reset(at_once=True)
        # Lost connections are reported by the loop, not by the reset itself.
        for _ in range(100):
            if not self.connections:
                break
            await asyncio.sleep(0.001)
        if self.events is not None:
            await self.events.stop()

    async def restart(self, refuse_s: float = 0.0) -> None:
        """Die and come back on the same port, with another hash seed; only /debug remembers."""
        if self.restarting:
            return
        self.restarting = True
        try:
            await self.stop()
            self.incarnation += 1
            self._reset()
            await asyncio.sleep(refuse_s)
            await self._start_again()
        finally:
            self.restarting = False

    async def _start_again(self) -> None:
        """Somebody's connection may have the port for a moment, as its own end."""
        for _ in range(REBIND_TRIES):
            try:
                await self.start()
                return
            except OSError:
                await asyncio.sleep(REBIND_S)
        await self.start()

    def begin_restart(self, refuse_s: float) -> None:
        """`restart`, in the background."""
        self._restart = asyncio.get_running_loop().create_task(self.restart(refuse_s))

    def opened(self, connection: Connection) -> None:
        """A client connected."""
        self.accepted += 1
        self.connections.add(connection)

    def closed(self, connection: Connection) -> None:
        """A connection is gone."""
        self.connections.discard(connection)

    # Requests.

    def handle(self, connection: Connection, request: Request) -> None:
        """Answer a request, now or later."""
        key = self.faults.api_key
        if key and request.path not in UNGUARDED and request.header(b"authorization") != f"Bearer {key}":
            connection.reply(unauthorized())
            return
        dialect = DIALECTS.get(request.path) if request.method == b"POST" else None
        if dialect is not None:
            self._generate(connection, request, dialect)
            return
        route = ROUTES.get((request.method, request.path))
        if not request.path.startswith("/debug"):
            self.journal.poll(request)
        try:
            if route is None:
                connection.reply(json_response({"detail": "Not Found"}, 404))
            else:
                route(self, connection, request)
        except ApiError as error:
            connection.reply(json_response(orjson.loads(error.body), error.status))

    def _generate(self, connection: Connection, request: Request, dialect: Dialect) -> None:
        refusal: ApiError | None = None
        try:
            faults, restart_s = faults_for(request, self.faults)
        except FaultError as error:
            faults, restart_s, refusal = CLEAN, None, rejected(str(error))
        if restart_s is not None:
            self.begin_restart(restart_s)
        reading = self.intake.read(dialect, request.body, faults)
        refusal = refusal or reading.error
        id = request.header(b"x-request-id") or reading.id or self._new_id()
        entry = self.journal.open(id, request)
        entry.hints = reading.hints.given()
        if faults.pull_fail and reading.hints.pulls:
            refusal = refusal or ApiError(500, "KV load failure", "InternalServerError")
        if faults.misbehaves:
            if 400 <= faults.status < 500:
                self.pd.rejected(reading.pd, rejected("The mock engine was told to fail."))
            Misbehaviour(self, connection, request, entry, faults).start()
        elif reading.call is None or refusal is not None:
            refusal = refusal or rejected("not understood")
            self.pd.rejected(reading.pd, refusal)
            Answer(self, connection, request, entry, faults).refuse(refusal)
        else:
            call = reading.call.copy(dialect.id_prefix + id, faults.cached_tokens)
            self._answer(connection, request, entry, faults, call, reading, dialect)

    def _answer(
        self,
        connection: Connection,
        request: Request,
        entry: Entry,
        faults: Faults,
        call: Call,
        reading: Reading,
        dialect: Dialect,
    ) -> None:
        """Generate an answer to a call, unless prefill and decode do not let it."""
        try:
            self.pd.admit(call, reading.pd)
        except ApiError as refusal:
            Answer(self, connection, request, entry, faults).refuse(refusal)
            return
        except EngineDies:
            Answer(self, connection, request, entry, faults)
            self.journal.end(entry, "fatal")
            self.pd_books.deaths += 1
            self.begin_restart(_DOWN_S)
            return
        kind = StreamAnswer if call.stream else PlainAnswer
        answer = kind(self, connection, request, entry, faults, call, dialect.script(call, reading.words))
        answer.hints, answer.pd = reading.hints, reading.pd
        self.pd.begin(answer)
        self.driver.submit(answer)

    def _new_id(self) -> str:
        self._requests += 1
        return f"{self.options.seed & 0xFFFF:04x}{self.index:04x}{self.incarnation:04x}{self._requests:020x}"

    def ended(self, answer: Answer, outcome: str) -> None:
        """An answer is over: whatever runs for it stops."""
        self.live.discard(answer)
        if isinstance(answer, TokenAnswer):
            self.metrics.ended(answer, outcome)
            self.pd.ended(answer, outcome)
            self.driver.ended(answer, outcome)
