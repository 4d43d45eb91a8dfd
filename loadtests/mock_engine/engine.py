"""One mock engine: its listening socket, its scheduler and the requests it is answering."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from collections.abc import Sequence as Listed
from contextlib import suppress
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
from kvroute.loadtests.mock_engine.dialects.base import Dialect
from kvroute.loadtests.mock_engine.events import EventPublisher
from kvroute.loadtests.mock_engine.faults import CLEAN, FaultError, Faults
from kvroute.loadtests.mock_engine.intake import Intake, faults_for
from kvroute.loadtests.mock_engine.journal import Journal
from kvroute.loadtests.mock_engine.lower_tiers import make_lower_tiers
from kvroute.loadtests.mock_engine.metrics import EngineMetrics
from kvroute.loadtests.mock_engine.options import MockOptions
from kvroute.loadtests.mock_engine.pulls import Pull, plan_pull
from kvroute.loadtests.mock_engine.routes import ROUTES, UNGUARDED
from kvroute.loadtests.mock_engine.scheduler import Scheduler
from kvroute.loadtests.mock_engine.sequences import Phase, Sequence
from kvroute.loadtests.mock_engine.steps import Outcome
from kvroute.loadtests.mock_engine.streams import StreamAnswer
from kvroute.loadtests.mock_engine.wire import ApiError, Request, json_response, rejected


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
        self.restarting = False
        self.connections: set[Connection] = set()
        self.accepted = self.bytes_read = self.bytes_written = 0
        self.live: set[Answer] = set()
        self.events: EventPublisher | None = None
        self._server: asyncio.Server | None = None
        self._stepper: asyncio.Task[None] | None = None
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
        self._wake = asyncio.Event()

    @property
    def url(self) -> str:
        """Where it answers; the loopback address when it listens on all."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.options.host, self.options.host)
        return http_origin(host, self.port)

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
        if not self.options.instant:
            self._stepper = loop.create_task(self._run_steps())

    async def stop(self) -> None:
        """Close everything; idempotent."""
        restart, self._restart = self._restart, None
        if restart is not None and restart is not asyncio.current_task():
            restart.cancel()
        stepper, self._stepper = self._stepper, None
        if stepper is not None:
            stepper.cancel()
            with suppress(asyncio.CancelledError):
                await stepper
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for answer in list(self.live):
            answer.end("broken")
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
            await self.start()
        finally:
            self.restarting = False

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
        if faults.hang or faults.die_before or faults.status or faults.no_content or faults.error_body:
            Misbehaviour(self, connection, request, entry, faults).start()
        elif reading.call is None or refusal is not None:
            Answer(self, connection, request, entry, faults).refuse(refusal or rejected("not understood"))
        else:
            call = reading.call.copy(dialect.id_prefix + id, faults.cached_tokens)
            kind = StreamAnswer if call.stream else PlainAnswer
            script = dialect.script(call, reading.words)
            answer = kind(self, connection, request, entry, faults, call, script)
            answer.hints = reading.hints
            self._submit(answer)

    def _new_id(self) -> str:
        self._requests += 1
        return f"{self.options.seed & 0xFFFF:04x}{self.index:04x}{self.incarnation:04x}{self._requests:020x}"

    # Tokens.

    def _submit(self, answer: TokenAnswer) -> None:
        pull = plan_pull(self, answer)
        if self.options.instant and (pull is None or not pull.seconds):
            self._enqueue(answer, pull)
            answer.start()
            return
        answer.start()
        delay_s = self.options.request_overhead_s / self.options.speed + (pull.seconds if pull else 0.0)
        asyncio.get_running_loop().call_later(delay_s, self._enqueue, answer, pull)

    def _enqueue(self, answer: TokenAnswer, pull: Pull | None) -> None:
        if answer.ended:
            return
        if self.tiers is not None:
            for keys, start in pull.blocks if pull else ():
                self.tiers.receive(keys, start)
            for part in answer.call.parts:
                self.tiers.begin(part.keys, answer.hints, self.options.block_size_tokens)
        for index, part in enumerate(answer.call.parts):
            part.sequence = Sequence(
                answer.call.id, len(part.tokens), part.kv_output_tokens, part.keys, (answer, index)
            )
            self.scheduler.add(part.sequence)
        if self.options.instant:
            self._admit_instantly()
        else:
            self._wake.set()

    def _admit_instantly(self) -> None:
        if self._server is None:
            return
        outcome = self.scheduler.admit_instantly()
        self._publish(outcome)
        for sequence in outcome.tokens:
            answer, index = sequence.payload
            self.metrics.started(answer)
            answer.on_tokens(index, answer.call.parts[index].output_tokens)

    async def _run_steps(self) -> None:
        """Let the scheduler's time pass on the clock, without drift while there is work."""
        loop = asyncio.get_running_loop()
        due_s = 0.0
        while True:
            step = self.scheduler.step()
            if step is None:
                self._wake.clear()
                await self._wake.wait()
                due_s = loop.time()
                continue
            for sequence, _ in step.prefills:
                self.metrics.started(sequence.payload[0])
            due_s = max(due_s, loop.time() - 0.05) + step.duration_s / self.options.speed
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            outcome = self.scheduler.complete(step)
            self._publish(outcome)
            for sequence in outcome.tokens:
                answer, index = sequence.payload
                extra = 0
                if sequence.generated_tokens == sequence.output_tokens:
                    extra = answer.call.parts[index].output_tokens - sequence.output_tokens
                answer.on_tokens(index, 1 + extra)

    def _publish(self, outcome: Outcome, one_by_one: bool = False) -> None:
        if self.events is None:
            return
        if not self.options.tier_events:
            outcome.demoted, outcome.offloaded = [], []
        if outcome.has_changes or self.events.cleared:
            self.events.publish(self, outcome, one_by_one)

    def ended(self, answer: Answer, outcome: str) -> None:
        """An answer is over: its sequences leave the scheduler."""
        self.live.discard(answer)
        if not isinstance(answer, TokenAnswer):
            return
        self.metrics.ended(answer, outcome)
        for part in answer.call.parts:
            sequence = part.sequence
            if sequence is None:
                continue
            if self.options.instant and outcome == "finished" and sequence.phase is Phase.DECODING:
                finished = self.scheduler.finish_instantly(sequence, sequence.output_tokens)
                self._publish(finished, one_by_one=True)
            else:
                self.scheduler.abort(sequence)
            if self.tiers is not None:
                self.tiers.finish(part.keys, answer.hints, self.options.block_size_tokens)
        if self.options.instant and self.scheduler.waiting:
            self._admit_instantly()
        self._wake.set()
