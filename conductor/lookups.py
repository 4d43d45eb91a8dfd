"""Serves gateways' lookups on a Unix or TCP socket, by the protocol of wire.py."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import cast

import structlog

from kvroute.conductor import wire
from kvroute.conductor.core import Conductor, Engine, Instance
from kvroute.listening import BACKLOG
from kvroute.types import NO_MATCH, Trust

log = structlog.get_logger(__name__)

MAX_CONNECTIONS = 256
MAX_BUFFERED_BYTES = 64 * 2**20
"""Unfinished frames of all connections; whose frame passes it is closed."""
WRITE_BUFFER_BYTES = 2**20
"""Answers that a gateway has not read; beyond it may ask no more."""
SLICE_S = 0.002
"""Work for one connection at a stretch, before others get their turn."""
ANSWERS_PER_FRAME = 16
"""The first of many must not wait for the last: each has a budget of its own."""
HELLO_S = 5.0
ROWS_PER_FRAME = 50_000
MAX_ERROR_CHARS = 512


class LookupServer:
    """Any number of gateways; each connection's requests are answered in order, in batches as they come."""

    def __init__(self, conductor: Conductor) -> None:
        self.conductor = conductor
        self.connections: set[_Client] = set()
        self.closed: Counter[str] = Counter()
        """Connections the server ended, by reason."""
        self.frames = 0
        self.messages = 0
        self._server: asyncio.Server | None = None
        self._unix_socket: tuple[str, int] | None = None
        """Path and inode."""
        self.address = ""

    async def start(self, address: str) -> None:
        """Listen; raises `ValueError` for an address that is none, `OSError` when it cannot be had."""
        where = wire.SocketAddress.parse(address)
        loop = asyncio.get_running_loop()
        if where.unix_path is not None:
            self._server = await loop.create_unix_server(
                lambda: _Client(self), where.unix_path, backlog=BACKLOG
            )
            os.chmod(where.unix_path, 0o660)
            self._unix_socket = where.unix_path, os.stat(where.unix_path).st_ino
            self.address = address
        else:
            self._server = await loop.create_server(
                lambda: _Client(self), where.host, where.port, backlog=BACKLOG
            )
            host, port = self._server.sockets[0].getsockname()[:2]
            self.address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"

    async def close(self) -> None:
        """Stop to listen and end every connection; idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        for client in list(self.connections):
            client.end("shutdown")
        await server.wait_closed()
        if self._unix_socket is not None:
            path, inode = self._unix_socket
            with contextlib.suppress(OSError):
                if os.stat(path).st_ino == inode:  # else another conductor has taken the path over
                    os.unlink(path)

    @property
    def buffered_bytes(self) -> int:
        """Gauge: unfinished frames held."""
        return sum(client.reader.buffered_bytes for client in self.connections)


class _Client(asyncio.Protocol):
    """One gateway, and the workers it follows by its own names."""

    def __init__(self, server: LookupServer) -> None:
        self.reader = wire.FrameReader()
        self._server = server
        self._conductor = server.conductor
        self._workers: dict[str, Instance] = {}
        self._bodies: deque[bytes] = deque()
        self._requests: Iterator[wire.Request] = iter(())
        self._answers: list[wire.Answer] = []
        self._greeted = False
        self._working = False
        self._ended = False
        self._write_paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none of its subclasses
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._server.connections.add(self)
        self._hello_timer = asyncio.get_running_loop().call_later(HELLO_S, self.end, "silent")
        if len(self._server.connections) > MAX_CONNECTIONS:
            self.end("too_many")

    def data_received(self, data: bytes) -> None:
        if self._ended:
            return
        try:
            self._bodies.extend(self.reader.feed(data))
        except wire.WireError as error:
            self.end(error.reason, str(error))
            return
        if self._server.buffered_bytes > MAX_BUFFERED_BYTES:
            self.end("buffered")
        elif self._bodies and not self._working:
            self._work()

    def pause_writing(self) -> None:
        # Who does not read its answers may ask no more.
        self._write_paused = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._write_paused = False
        if not self._ended and not self._working:
            self._transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._ended = True
        self._hello_timer.cancel()
        self._server.connections.discard(self)
        for instance in self._workers.values():
            self._conductor.linger(instance)
        self._workers.clear()

    def end(self, reason: str, message: str = "") -> None:
        """Close at once; idempotent."""
        if self._ended:
            return
        self._ended = True
        self._server.closed[reason] += 1
        if reason != "shutdown":
            peer = self._transport.get_extra_info("peername")
            log.warning("lookup connection closed", reason=reason, error=message, peer=str(peer))
        self._transport.abort()

    def _work(self) -> None:
        """Answer what has come, for `SLICE_S` at a stretch."""
        self._working = True
        until = perf_counter() + SLICE_S
        try:
            while not self._ended and perf_counter() < until:
                request = next(self._requests, None)
                if request is not None:
                    self._server.messages += 1
                    self._handle(request)
                    if len(self._answers) >= ANSWERS_PER_FRAME:
                        self._flush()
                elif self._bodies:
                    self._server.frames += 1
                    self._requests = iter(wire.decode(wire.requests_decoder, self._bodies.popleft()))
                    self._flush()
                else:
                    self._working = False
                    break
        except wire.WireError as error:
            self._working = False
            self.end(error.reason, str(error))
        if self._ended:
            return
        self._flush()
        if self._working:
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._work)
        elif not self._write_paused:
            self._transport.resume_reading()

    def _flush(self) -> None:
        answers, self._answers = self._answers, []
        for batch in _batches(answers):
            self._transport.write(wire.frame(batch))

    def _handle(self, request: wire.Request) -> None:
        if not self._greeted:
            self._greet(request)
        elif isinstance(request, wire.Match):
            self._answers.append(self._match(request))
        elif isinstance(request, wire.Predict):
            instance = self._known(request.worker_id)
            if instance is not None:
                self._conductor.predict(instance.worker_id, request.keys.unpack())
        elif isinstance(request, wire.Observe):
            instance = self._known(request.worker_id)
            if instance is not None:
                self._conductor.observe(
                    instance.worker_id, request.predicted_tokens, request.cached_tokens, request.prompt_tokens
                )
        elif isinstance(request, wire.Follow):
            self._answers.append(wire.Followed(request.id, self._follow(request)))
        elif isinstance(request, wire.Unfollow):
            left = self._workers.pop(request.worker_id, None)
            if left is not None:
                self._conductor.leave(left)
        else:
            raise wire.WireError("protocol", "a second hello")

    def _greet(self, request: wire.Request) -> None:
        if not isinstance(request, wire.Hello):
            raise wire.WireError("protocol", "the first message is no hello")
        self._answers.append(wire.Hello(wire.PROTOCOL))
        if request.protocol != wire.PROTOCOL:
            self._flush()
            raise wire.WireError(
                "protocol", f"the gateway speaks protocol {request.protocol}, this conductor {wire.PROTOCOL}"
            )
        self._greeted = True
        self._hello_timer.cancel()

    def _match(self, request: wire.Match) -> wire.Matched:
        instances = [self._known(worker_id) for worker_id in request.worker_ids]
        known = [instance.worker_id for instance in instances if instance is not None]
        found = iter(self._conductor.match([keys.unpack() for keys in request.keys], known))
        nothing = wire.Row.pack(NO_MATCH, Trust.LOAD_ONLY)
        rows = [nothing if instance is None else wire.Row.pack(*next(found)) for instance in instances]
        return wire.Matched(request.id, rows)

    def _known(self, worker_id: str) -> Instance | None:
        instance = self._workers.get(worker_id)
        if instance is None:
            self._conductor.counts.unknown_workers += 1
        return instance

    def _follow(self, request: wire.Follow) -> str | None:
        """What is wrong with it, or None."""
        if request.worker_id not in self._workers and len(self._workers) >= wire.MAX_WORKERS:
            return f"{wire.MAX_WORKERS} workers are followed by this connection, which is the limit"
        try:
            engine = Engine(
                request.url,
                request.namespace,
                tuple(source.unpack() for source in request.sources),
                request.block_tokens,
                request.min_block_tokens,
                request.silent_tier_blocks,
            )
            instance = self._conductor.follow(engine)
        except ValueError as error:
            return str(error)[:MAX_ERROR_CHARS]
        left = self._workers.get(request.worker_id)
        self._workers[request.worker_id] = instance
        if left is not None:
            self._conductor.leave(left)
        return None


def _batches(answers: Sequence[wire.Answer]) -> Iterator[list[wire.Answer]]:
    """In order, cut where the rows of a batch pass `ROWS_PER_FRAME`."""
    batch: list[wire.Answer] = []
    rows = 0
    for answer in answers:
        batch.append(answer)
        rows += len(answer.rows) if isinstance(answer, wire.Matched) else 1
        if rows > ROWS_PER_FRAME:
            yield batch
            batch, rows = [], 0
    if batch:
        yield batch
