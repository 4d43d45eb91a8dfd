"""The client's side: one HTTP/1.1 connection, its limits, and how a response is written to it."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol, cast

import structlog

from kvroute.clock import monotonic
from kvroute.config_groups import Limits, Timeouts
from kvroute.router.errors import Failure, GatewayError
from kvroute.router.request_parser import Request, RequestParser
from kvroute.router.sweeper import NEVER, Sweeper

log = structlog.get_logger(__name__)

MAX_PIPELINED = 16
LINGER_S = 5.0
MAX_LINGER_S = 30.0


class Handler(Protocol):
    """Answers requests. Cancelled when the client goes away."""

    async def handle(self, request: Request, client: ClientConnection) -> None: ...

    def refused(self, error: GatewayError) -> None:
        """A request was answered with `error` before it was complete."""


class Source(Protocol):
    """Where a response body comes from, so that a slow reader can stop it."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...


@dataclass(slots=True)
class ServerState:
    """What all client connections share."""

    handler: Handler
    limits: Limits
    timeouts: Timeouts
    sweeper: Sweeper
    loop: asyncio.AbstractEventLoop
    connections: set[ClientConnection] = field(default_factory=set)
    empty: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while there is no connection."""
    buffered_bytes: int = 0
    closing: bool = False

    def __post_init__(self) -> None:
        self.empty.set()

    def opened(self, connection: ClientConnection) -> None:
        self.connections.add(connection)
        self.empty.clear()
        self.sweeper.watch(connection)

    def lost(self, connection: ClientConnection) -> None:
        self.connections.discard(connection)
        self.sweeper.forget(connection)
        if not self.connections:
            self.empty.set()


class ClientConnection(asyncio.Protocol):
    """Reads requests one after another and runs the handler for each in a task of its own.

    The task is cancelled as soon as the connection is lost, so whatever it holds is released then; that
    is the only way a disconnect is handled, before the first byte or in the middle of a stream.
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._requests = RequestParser(state, self._arrived, self._go_on)
        self._queue: deque[Request] = deque()
        self._task: asyncio.Task[None] | None = None
        self._discarding = False
        self._linger_until_s = 0.0
        self._current: Request | None = None
        self._source: Source | None = None
        self._chunked = False
        self._paused = False
        self.started = False
        """A response head has been written for the current request."""
        self.deadline_s = NEVER

    # --- reading -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        state = self._state
        if len(state.connections) >= state.limits.connections:
            message = f"{state.limits.connections} client connections are open (limits.connections)"
            error = GatewayError(Failure.OVERLOADED, message, retry_after_s=1)
            state.handler.refused(error)
            self.transport.write(error.response(None, close=True))
            self.transport.close()
            self._discarding = True
            return
        state.opened(self)
        self.deadline_s = monotonic() + state.timeouts.client_idle_s

    def connection_lost(self, exc: Exception | None) -> None:
        self._discarding = True
        self._state.lost(self)
        self._requests.refuse(GatewayError(Failure.MALFORMED, "the client left in the middle of a request"))
        for request in self._queue:
            self._state.buffered_bytes -= len(request.body)
        self._queue.clear()
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        if self._discarding:
            self.deadline_s = min(monotonic() + LINGER_S, self._linger_until_s)
            return
        parser = self._requests
        if self._task is None and not parser.receiving:
            self.deadline_s = monotonic() + self._state.timeouts.request_s
        parser.feed(data)
        if parser.error is not None and self._task is None:
            self._send_refusal(parser.error)

    def _arrived(self, request: Request) -> None:
        if self._task is None and not self._paused:
            self._begin(request)
        elif len(self._queue) < MAX_PIPELINED:
            self._queue.append(request)
        else:
            self._state.buffered_bytes -= len(request.body)
            message = f"more than {MAX_PIPELINED} pipelined requests"
            self._requests.refuse(GatewayError(Failure.OVERLOADED, message))

    def _go_on(self) -> None:
        if self._task is None:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _send_refusal(self, error: GatewayError) -> None:
        """Answer and close, but read on for a while: closing on unread data resets the answer away."""
        self._state.handler.refused(error)
        self.transport.write(error.response(None, close=True))
        self._discarding = True
        now = monotonic()
        self._linger_until_s = now + MAX_LINGER_S
        self.deadline_s = now + LINGER_S
        if self.transport.can_write_eof():
            self.transport.write_eof()

    # --- running -------------------------------------------------------------------------------

    def _begin(self, request: Request) -> None:
        if not self._paused:
            self.deadline_s = NEVER
        self.started = False
        self._current = request
        self._task = self._state.loop.create_task(self._run(request))

    async def _run(self, request: Request) -> None:
        try:
            await self._state.handler.handle(request, self)
        except asyncio.CancelledError:
            self.transport.abort()
            raise
        except Exception:
            if self.started:
                self.transport.abort()
            else:
                error = GatewayError(Failure.INTERNAL, "internal error of the gateway")
                self.respond(error.response(None, close=not self.keep_alive))
            log.exception("handler failed", target=request.target[:200].decode("latin-1"))
        finally:
            self.drop_request_body()
            self._finish()

    def _finish(self) -> None:
        self._task = None
        self._source = None
        keep = self.keep_alive
        self._current = None
        if self.transport.is_closing() or not keep:
            self._close()
        elif self._queue:
            if not self._paused:
                self._begin(self._queue.popleft())
        elif self._requests.error is not None:
            self._send_refusal(self._requests.error)
        elif not self._paused:
            self.deadline_s = monotonic() + self._state.timeouts.client_idle_s

    def _close(self) -> None:
        """Close once the client has read what was written, which it must do in time."""
        self.transport.close()
        if not self._paused:
            self.deadline_s = monotonic() + self._state.timeouts.client_stall_s

    def on_deadline(self) -> None:
        if self._discarding or self._paused or self.transport.is_closing():
            self.transport.abort()
        elif self._task is not None:
            return
        elif self._requests.receiving:
            limit = self._state.timeouts.request_s
            error = GatewayError(Failure.REQUEST_TIMEOUT, f"request did not arrive in {limit:g} s")
            self._requests.refuse(error)
            self._send_refusal(error)
        else:
            self._close()

    def close_when_idle(self) -> None:
        """Part of shutdown: idle connections end now, busy ones after their response."""
        if self._task is None and not self._requests.receiving:
            self.transport.close()

    def abort(self) -> None:
        self.transport.abort()

    def drop_request_body(self) -> None:
        """The body will not be sent again: give its memory back while the response streams. Idempotent."""
        request = self._current
        if request is not None and request.body:
            self._state.buffered_bytes -= len(request.body)
            request.body = b""

    # --- writing -------------------------------------------------------------------------------

    @property
    def keep_alive(self) -> bool:
        """Whether the connection stays open after the current response."""
        request = self._current
        return request is not None and request.keep_alive and not request.http10 and not self._state.closing

    def respond(self, data: bytes) -> None:
        """Write a whole response, head included."""
        self.started = True
        self.transport.write(data)

    def start(self, head: bytes, body: bytes, chunked: bool, end: bool) -> None:
        """Write the head and the first part of the body in one go; `end` when there is no more."""
        self.started = True
        self._chunked = chunked
        if not chunked:
            self._write_joined(head, body)
        elif not end:
            self._write_joined(head, b"%x\r\n%b\r\n" % (len(body), body) if body else b"")
        else:
            self._write_joined(head, b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n")

    def _write_joined(self, head: bytes, body: bytes) -> None:
        if len(body) < 16_384:
            self.transport.write(head + body)
        else:
            self.transport.writelines((head, body))

    def write(self, data: bytes) -> None:
        """The next part of the body, not empty; for nobody when the client has just left."""
        if not self._discarding:
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def end(self) -> None:
        if self._chunked:
            self.transport.write(b"0\r\n\r\n")

    def break_body(self) -> None:
        """End a response that cannot be completed so that the client sees it is incomplete.

        What was written is delivered; without the last chunk, or short of its length, the body is broken.
        A body that only ends with the connection can be broken by a reset alone.
        """
        request = self._current
        if request is not None and request.http10:
            self._reset()
        else:
            self.transport.close()

    def _reset(self) -> None:
        """RST instead of FIN: closing with SO_LINGER at 0 s."""
        sock = self.transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def reads_from(self, source: Source) -> None:
        """Let back-pressure act on `source` until the response ends."""
        self._source = source
        if self._paused:
            source.pause()

    def pause_writing(self) -> None:
        self._paused = True
        self.deadline_s = monotonic() + self._state.timeouts.client_stall_s
        if self._source is not None:
            self._source.pause()

    def resume_writing(self) -> None:
        self._paused = False
        if not self._discarding and not self.transport.is_closing():
            self.deadline_s = (
                NEVER if self._task is not None else monotonic() + self._state.timeouts.client_idle_s
            )
        if self._task is None and self._queue:
            self._begin(self._queue.popleft())  # it waited until its predecessors' answers were read
        if self._source is not None:
            self._source.resume()
