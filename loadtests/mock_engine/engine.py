"""One mock engine: its listening socket, its scheduler and the requests it is answering."""

from __future__ import annotations

import asyncio
import zlib
from contextlib import suppress
from dataclasses import replace
from typing import Any

import orjson
import xxhash

from kvroute.loadtests.mock_engine.answers import (
    Answer,
    Misbehaviour,
    PlainAnswer,
    StreamAnswer,
    TokenAnswer,
    unauthorized,
)
from kvroute.loadtests.mock_engine.block_cache import BlockCache
from kvroute.loadtests.mock_engine.block_keys import block_keys, root_key
from kvroute.loadtests.mock_engine.connection import Connection
from kvroute.loadtests.mock_engine.dialects import DIALECTS
from kvroute.loadtests.mock_engine.dialects.base import Body, Call, Defaults, Dialect, Part
from kvroute.loadtests.mock_engine.events import EventPublisher
from kvroute.loadtests.mock_engine.faults import CLEAN, FAULT_HEADER, FaultError, Faults, parse_header
from kvroute.loadtests.mock_engine.journal import Entry, Journal
from kvroute.loadtests.mock_engine.metrics import EngineMetrics
from kvroute.loadtests.mock_engine.options import MockOptions
from kvroute.loadtests.mock_engine.routes import ROUTES, UNGUARDED
from kvroute.loadtests.mock_engine.scheduler import Outcome, Phase, Scheduler, Sequence
from kvroute.loadtests.mock_engine.tokens import Words, plain_words, wide_words
from kvroute.loadtests.mock_engine.wire import ApiError, Request, invalid, json_response, rejected


class MockEngine:
    """Engine `index` of a fleet. `faults` may be assigned to at any time."""

    def __init__(self, options: MockOptions, index: int) -> None:
        self.options = options
        self.index = index
        self.faults: Faults = replace(options.faults)
        self.journal = Journal(options.journal_ids, options.journal_requests)
        self.port = options.port + index if options.port else 0
        self.incarnation = 0
        self.restarting = False
        self.connections: set[Connection] = set()
        self.accepted = self.bytes_read = self.bytes_written = 0
        self.live: set[Answer] = set()
        self.events: EventPublisher | None = None
        self._server: asyncio.Server | None = None
        self._stepper: asyncio.Task[None] | None = None
        self._restart: asyncio.Task[None] | None = None
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
        self.scheduler = Scheduler(
            BlockCache(options.capacity_blocks),
            options.step_speed,
            options.block_size_tokens,
            options.max_batched_tokens,
            options.max_sequences,
        )
        self.metrics = EngineMetrics(self)
        self._wake = asyncio.Event()

    @property
    def url(self) -> str:
        """Where it answers; the loopback address when it listens on all."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.options.host, self.options.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

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

    # Life.

    async def start(self) -> None:
        """Listen; OSError when the port is taken."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(self), self.options.host, self.port, backlog=1024, reuse_address=True
        )
        self.port = self._server.sockets[0].getsockname()[1]
        if self.options.kv_events and self.events is None:
            topic = f"kv@{self.options.host}:{self.port}@{self.options.model}"
            self.events = EventPublisher(self.options.host, topic, self.options.kv_event_replay_batches)
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
            self.journal.polls.append((None, request))
        try:
            if route is None:
                connection.reply(json_response({"detail": "Not Found"}, 404))
            else:
                route(self, connection, request)
        except ApiError as error:
            connection.reply(json_response(orjson.loads(error.body), error.status))

    def _generate(self, connection: Connection, request: Request, dialect: Dialect) -> None:
        body, error = _parsed(request.body)
        id = self._request_id(request, body, dialect)
        entry = self.journal.open(id, request)
        try:
            faults, restart_s = self._faults_for(request)
        except FaultError as fault:
            faults, restart_s, error = CLEAN, None, rejected(str(fault))
        if restart_s is not None:
            self.begin_restart(restart_s)
        if faults.hang or faults.die_before or faults.status or faults.no_content or faults.error_body:
            Misbehaviour(self, connection, request, entry, faults).start()
            return
        try:
            if error is not None:
                raise error
            answer = self._understood(connection, request, entry, dialect, body, faults)
        except ApiError as refusal:
            Answer(self, connection, request, entry, faults).refuse(refusal)
            return
        self._submit(answer)

    def _understood(
        self,
        connection: Connection,
        request: Request,
        entry: Entry,
        dialect: Dialect,
        body: Body,
        faults: Faults,
    ) -> TokenAnswer:
        """The request as an answer in the making; `ApiError` refuses it."""
        options = self.options
        model = body.get("model") or options.model
        if model != options.model and model not in self.adapters:
            raise ApiError(404, f"The model `{model}` does not exist.", "NotFoundError", "model")
        defaults = Defaults(options.model, options.max_tokens, options.output_tokens, faults.n)
        call = dialect.parse(body, entry.id, defaults)
        call.cached_tokens_lie = faults.cached_tokens
        words = (wide_words if faults.unicode else plain_words)(options.seed)
        for index, part in enumerate(call.parts):
            part.start = words.start(zlib.crc32(part.tokens.tobytes()))
            part.sequence = self._sequence(call, index, part, words)
        kind = StreamAnswer if call.stream else PlainAnswer
        return kind(self, connection, request, entry, faults, call, dialect.script(call, words))

    def _sequence(self, call: Call, index: int, part: Part, words: Words) -> Sequence:
        """What the scheduler sees of a prompt; more events than the context has room for need no KV."""
        output = min(part.output_tokens, self.options.max_tokens - len(part.tokens))
        lora = call.model if call.model in self.adapters else None
        tokens = part.tokens + words.tokens(part.start, output - 1)
        keys = block_keys(tokens, self.options.block_size_tokens, root_key(self.hash_seed, lora, call.salt))
        return Sequence(f"{call.id}-{index}", len(part.tokens), output, keys, payload=tokens)

    def _request_id(self, request: Request, body: Body, dialect: Dialect) -> str:
        given = request.header(b"x-request-id")
        if given is None:
            given = next((v for name in dialect.id_fields if isinstance(v := body.get(name), str)), None)
        if given is not None:
            return given
        self._requests += 1
        return f"{self.options.seed & 0xFFFF:04x}{self.index:04x}{self.incarnation:04x}{self._requests:020x}"

    def _faults_for(self, request: Request) -> tuple[Faults, float | None]:
        """The faults of one request, and the seconds of a restart it asks for."""
        header = request.header(FAULT_HEADER)
        faults = self.faults
        if header is None and faults == CLEAN:
            return CLEAN, None
        if faults.times is not None:
            if faults.times:
                faults.times -= 1
            else:
                faults = CLEAN
        settings: dict[str, Any] = {} if header is None else dict(parse_header(header))
        restart = settings.pop("restart", None)
        try:
            restart_s = None if restart is None else float(restart)
        except ValueError as error:
            raise FaultError(f"fault restart={restart!r}: expected float") from error
        return faults.merged(settings), restart_s

    # Tokens.

    def _submit(self, answer: TokenAnswer) -> None:
        if self.options.instant:
            self._enqueue(answer)
            answer.start()
            return
        answer.start()
        delay_s = self.options.request_overhead_s / self.options.speed
        asyncio.get_running_loop().call_later(delay_s, self._enqueue, answer)

    def _enqueue(self, answer: TokenAnswer) -> None:
        if answer.ended:
            return
        for index, part in enumerate(answer.call.parts):
            assert part.sequence is not None
            part.sequence.payload = (answer, index, part.sequence.payload)
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
            answer, index, _ = sequence.payload
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
                answer, index, _ = sequence.payload
                extra = 0
                if sequence.generated_tokens == sequence.output_tokens:
                    extra = answer.call.parts[index].output_tokens - sequence.output_tokens
                answer.on_tokens(index, 1 + extra)

    def _publish(self, outcome: Outcome, one_by_one: bool = False) -> None:
        events = self.events
        if events is not None and (outcome.removed or outcome.stored or events.cleared):
            events.publish(self, outcome, one_by_one)

    def ended(self, answer: Answer, outcome: str) -> None:
        """An answer is over: its sequences leave the scheduler."""
        self.live.discard(answer)
        if not isinstance(answer, TokenAnswer):
            return
        self.metrics.ended(answer, outcome)
        for part in answer.call.parts:
            sequence = part.sequence
            if sequence is None or not isinstance(sequence.payload, tuple):
                continue
            if self.options.instant and outcome == "finished" and sequence.phase is Phase.DECODING:
                finished = self.scheduler.finish_instantly(sequence, sequence.output_tokens)
                self._publish(finished, one_by_one=True)
            else:
                self.scheduler.abort(sequence)
        if self.options.instant and self.scheduler.waiting:
            self._admit_instantly()
        self._wake.set()


def _parsed(body: bytes) -> tuple[Body, ApiError | None]:
    """The JSON object of a request, or what is wrong with it."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        return {}, invalid(f"1 validation error:\n  ('body', {error.pos}): JSON decode error: {error.msg}")
    if not isinstance(value, dict):
        return {}, invalid("1 validation error:\n  ('body',): Input should be a valid dictionary")
    return value, None
