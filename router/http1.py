"""The client's side: one HTTP/1.1 connection, its limits, and how a response is written to it."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol, cast

import httptools
import structlog
from msgspec import Struct

from kvroute.clock import monotonic
from kvroute.config import Limits, Timeouts
from kvroute.router.errors import Failure, GatewayError
from kvroute.router.headers import Headers
from kvroute.router.sweeper import NEVER, Sweeper

log = structlog.get_logger(__name__)

MAX_PIPELINED = 16
LINGER_S = 5.0
MAX_LINGER_S = 30.0


class Request(Struct):
    """One request, complete: the body has arrived in full."""

    method: bytes
    target: bytes
    """Path and query exactly as sent (origin form)."""
    headers: Headers
    fields: dict[bytes, bytes]
    """Lower-case name to value, the first where a name comes twice."""
    body: bytes
    keep_alive: bool
    http10: bool
    received_s: float


class Handler(Protocol):
    """Answers requests. Cancelled when the client goes away."""

    async def handle(self, request: Request, client: ClientConnection) -> None: ...


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
        self._parser = httptools.HttpRequestParser(self)
        self._queue: deque[Request] = deque()
        self._task: asyncio.Task[None] | None = None
        self._refusal: GatewayError | None = None
        self._discarding = False
        self._linger_until_s = 0.0
        self._current: Request | None = None
        self._source: Source | None = None
        self._chunked = False
        self._paused = False
        self.started = False
        """A response head has been written for the current request."""
        self.deadline_s = NEVER
        self._reset_message()

    def _reset_message(self) -> None:
        self._target = b""
        self._headers: Headers = []
        self._fields: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._head_bytes = 0
        self._framing_bytes = 0
        """Received since the last body byte, once the head is over: chunk sizes and trailers."""
        self._in_head = True

    # --- reading -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        state = self._state
        if len(state.connections) >= state.limits.connections:
            error = GatewayError(Failure.NO_WORKER, "too many client connections", retry_after_s=1)
            self.transport.write(error.response(None, close=True))
            self.transport.close()
            self._discarding = True
            return
        state.opened(self)
        self.deadline_s = state.loop.time() + state.timeouts.client_idle_s

    def connection_lost(self, exc: Exception | None) -> None:
        self._discarding = True
        self._state.lost(self)
        self._release_body()
        for request in self._queue:
            self._state.buffered_bytes -= len(request.body)
        self._queue.clear()
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        if self._discarding:
            self.deadline_s = min(monotonic() + LINGER_S, self._linger_until_s)
            return
        if self._refusal is not None:
            return  # it is sent once the current response is; nothing after it will be answered
        if self._in_head:
            if not self._head_bytes and self._task is None:
                self.deadline_s = monotonic() + self._state.timeouts.request_s
            self._head_bytes += len(data)
        else:
            self._framing_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._refuse(GatewayError(Failure.MALFORMED, f"malformed HTTP request: {error}"))
        received = self._head_bytes if self._in_head else self._framing_bytes
        if received > self._state.limits.header_bytes:
            self._refuse_headers()
        if self._refusal is not None and self._task is None:
            self._send_refusal()

    def _decline_upgrade(self, rest: bytes) -> None:
        """Read on as if no upgrade had been offered (RFC 9110 7.8).

        The parser takes what follows such a head for another protocol, yet it can be a body: Java's client
        offers h2c with its POSTs. A new parser is given the framing of this message and then the rest.
        """
        offered, self._parser = self._parser, httptools.HttpRequestParser(self)
        if offered.get_method() == b"CONNECT":
            self._refuse(GatewayError(Failure.MALFORMED, "CONNECT is not accepted"))
            return
        framing = [
            b"%b: %b\r\n" % (name, value)
            for name, value in self._headers
            if name.lower() in (b"content-length", b"transfer-encoding")
        ]
        if not offered.should_keep_alive():
            framing.append(b"Connection: close\r\n")
        version = offered.get_http_version().encode()
        try:
            self._parser.feed_data(
                b"%b / HTTP/%b\r\n%b\r\n" % (offered.get_method(), version, b"".join(framing))
            )
            self._parser.feed_data(rest)
        except httptools.HttpParserUpgrade:
            message = "a request with an Upgrade header cannot be followed by another before its response"
            self._refuse(GatewayError(Failure.MALFORMED, message))
        except httptools.HttpParserError as error:
            self._refuse(GatewayError(Failure.MALFORMED, f"malformed HTTP request: {error}"))

    def on_url(self, url: bytes) -> None:
        if self._in_head:
            self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # a trailer is no header (RFC 9110 6.5.1)
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        if not self._in_head:
            return
        self._in_head = False
        if self._head_bytes > self._state.limits.header_bytes:
            size = len(self._target) + sum(len(name) + len(value) + 4 for name, value in self._headers)
            if size > self._state.limits.header_bytes:
                self._refuse_headers()
                return
        fields = self._fields = {name.lower(): value for name, value in reversed(self._headers)}
        if int(fields.get(b"content-length", 0)) > self._state.limits.body_bytes:
            self._refuse_body()
        elif b"transfer-encoding" in fields and any(
            name.lower() == b"transfer-encoding" and value.lower() != b"chunked"
            for name, value in self._headers
        ):
            message = "the only transfer coding accepted in a request is chunked"
            self._refuse(GatewayError(Failure.MALFORMED, message))
        elif fields.get(b"expect", b"").lower() == b"100-continue" and self._may_continue():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _may_continue(self) -> bool:
        return self._task is None and self._parser.get_http_version() == "1.1"

    def on_body(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        self._framing_bytes = 0
        self._body.append(data)
        self._body_bytes += len(data)
        self._state.buffered_bytes += len(data)
        if self._body_bytes > self._state.limits.body_bytes:
            self._refuse_body()
        elif self._state.buffered_bytes > self._state.limits.buffered_bytes:
            message = "the gateway holds as many request bytes as limits.buffered_bytes allows"
            self._refuse(GatewayError(Failure.OVERLOADED, message, retry_after_s=1))

    def on_message_complete(self) -> None:
        parser = self._parser
        if self._refusal is not None or parser.should_upgrade():
            return
        body = self._body
        request = Request(
            method=parser.get_method(),
            target=self._target,
            headers=self._headers,
            fields=self._fields,
            body=body[0] if len(body) == 1 else b"".join(body),
            keep_alive=parser.should_keep_alive(),
            http10=parser.get_http_version() != "1.1",
            received_s=monotonic(),
        )
        self._reset_message()
        if not request.target.startswith(b"/") and not self._to_origin_form(request):
            self._state.buffered_bytes -= len(request.body)
            self._refuse(GatewayError(Failure.MALFORMED, "request target must be a path or an http URL"))
        elif self._task is None:
            self._begin(request)
        elif len(self._queue) < MAX_PIPELINED:
            self._queue.append(request)
        else:
            self._state.buffered_bytes -= len(request.body)
            self._refuse(GatewayError(Failure.OVERLOADED, f"more than {MAX_PIPELINED} pipelined requests"))

    @staticmethod
    def _to_origin_form(request: Request) -> bool:
        """RFC 9112 3.2.2: a server accepts `http://host/path` as it would `/path`."""
        scheme, separator, rest = request.target.partition(b"://")
        if request.target == b"*" and request.method == b"OPTIONS":
            return True
        if not separator or scheme.lower() not in (b"http", b"https"):
            return False
        authority = re.match(rb"[^/?]*", rest)
        assert authority is not None
        path = rest[authority.end() :]
        request.target = path if path.startswith(b"/") else b"/" + path
        return True

    # --- refusing ------------------------------------------------------------------------------

    def _refuse(self, error: GatewayError) -> None:
        self._release_body()
        self._refusal = self._refusal or error

    def _refuse_headers(self) -> None:
        limit = self._state.limits.header_bytes
        self._refuse(
            GatewayError(
                Failure.HEADERS_TOO_LARGE, f"request head is over {limit} bytes (limits.header_bytes)"
            )
        )

    def _refuse_body(self) -> None:
        limit = self._state.limits.body_bytes
        self._refuse(
            GatewayError(Failure.BODY_TOO_LARGE, f"request body is over {limit} bytes (limits.body_bytes)")
        )

    def _send_refusal(self) -> None:
        """Answer and close, but read on for a while: closing on unread data resets the answer away."""
        assert self._refusal is not None
        log.info("refused", reason=self._refusal.failure.value, message=self._refusal.message)
        self.transport.write(self._refusal.response(None, close=True))
        self._discarding = True
        now = monotonic()
        self._linger_until_s = now + MAX_LINGER_S
        self.deadline_s = now + LINGER_S
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _release_body(self) -> None:
        self._state.buffered_bytes -= self._body_bytes
        self._body = []
        self._body_bytes = 0

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
            log.exception("handler failed", target=request.target[:200].decode("latin-1"))
            if self.started:
                self.transport.abort()
            else:
                error = GatewayError(Failure.INTERNAL, "internal error of the gateway")
                self.respond(error.response(None, close=not self.keep_alive))
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
            self._begin(self._queue.popleft())
        elif self._refusal is not None:
            self._send_refusal()
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
        elif self._head_bytes:
            limit = self._state.timeouts.request_s
            self._refuse(GatewayError(Failure.REQUEST_TIMEOUT, f"request did not arrive in {limit:g} s"))
            self._send_refusal()
        else:
            self._close()

    def close_when_idle(self) -> None:
        """Part of shutdown: idle connections end now, busy ones after their response."""
        if self._task is None and not self._head_bytes:
            self.transport.close()

    def abort(self) -> None:
        self.transport.abort()

    @property
    def busy(self) -> bool:
        return self._task is not None

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
        if self._source is not None:
            self._source.resume()
