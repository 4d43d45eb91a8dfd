"""The worker's side: one HTTP/1.1 connection to an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import httptools
from msgspec import Struct

from kvroute.clock import monotonic
from kvroute.config_groups import Timeouts
from kvroute.router.errors import Failure, GatewayError
from kvroute.router.headers import Headers
from kvroute.router.sweeper import NEVER

if TYPE_CHECKING:
    from kvroute.router.pool import UpstreamPool

NOTED_LENGTHS = frozenset(
    map(len, ("content-type", "content-length", "content-encoding", "transfer-encoding"))
)
MAX_HEAD_BYTES = 256 * 2**10


class StaleConnection(Exception):
    """A pooled connection closed before a single response byte: nobody's fault, safe to send again."""


class Response(Struct):
    """A response whose head has arrived, together with the first part of its body or its end."""

    status: int = 0
    reason: bytes = b""
    headers: Headers = []  # a fresh list for every response (msgspec copies it)
    content_type: bytes = b""
    """In lower case."""
    encoded: bool = False
    """The body has a Content-Encoding."""
    content_length: bool = False
    chunked: bool = False

    @property
    def ends_with_connection(self) -> bool:
        return self.status >= 200 and not (self.content_length or self.chunked or self.status in (204, 304))


Sink = Callable[[bytes, float], None]
"""Takes the rest of a response body, read by read, with the time of the read (monotonic, s)."""


class UpstreamConnection(asyncio.Protocol):
    """Sends one request at a time.

    `send` gives a future for the response; it is set once the first body byte (or the end) is here, so
    that until then the request can still be given to another worker. `stream_to` takes the rest.
    """

    def __init__(self, pool: UpstreamPool) -> None:
        self._pool = pool
        self._loop = pool.loop
        self._parser = httptools.HttpResponseParser(self)
        self._ready: asyncio.Future[Response] | None = None
        self._done: asyncio.Future[None] | None = None
        self._sink: Sink | None = None
        self._error: GatewayError | None = None
        self._exchanging = False
        self._complete = False
        self._reusable = False
        self._head_only = False
        self._fresh = True
        self._seen_bytes = False
        self._closed = False
        self._half_closed = False
        self._paused = False
        self._in_head = True
        self._framing_bytes = 0
        self._idle_s = 0.0
        self._read_s = 0.0
        self._total_deadline_s = NEVER
        self._pieces: list[bytes] = []
        self._response = Response()
        self.deadline_s = NEVER

    # --- one exchange --------------------------------------------------------------------------

    def send(
        self,
        head: bytes,
        body: bytes,
        head_only: bool,
        timeouts: Timeouts,
        total_deadline_s: float,
        first_byte_by_s: float = NEVER,
    ) -> asyncio.Future[Response]:
        """Write a request. The future raises StaleConnection or GatewayError.

        The first body byte is waited for until `first_byte_by_s` at most, where that is before the time-outs.
        """
        self._exchanging = True
        self._complete = self._reusable = self._seen_bytes = False
        self._head_only = head_only
        self._error = None
        self._in_head = True
        self._framing_bytes = 0
        self._pieces = []
        self._response = Response()
        self._idle_s = timeouts.idle_s
        self._total_deadline_s = total_deadline_s
        self._ready = ready = self._loop.create_future()
        self.deadline_s = min(monotonic() + timeouts.first_byte_s, total_deadline_s, first_byte_by_s)
        if self._closed:
            self._fail_lost()
        elif len(body) < 16_384:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))
        return ready

    def take_body(self) -> bytes:
        """Body bytes that arrived so far and were not given to a sink."""
        pieces = self._pieces
        self._pieces = []
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def give_back(self, data: bytes) -> None:
        """Body bytes that were only looked at: they come first in `take_body`; no sink takes the rest yet."""
        self._sink = self._done = None
        if data:
            self._pieces.insert(0, data)

    @property
    def complete(self) -> bool:
        """The whole response has arrived."""
        return self._complete

    @property
    def closed(self) -> bool:
        """The connection is lost."""
        return self._closed

    @property
    def error(self) -> GatewayError | None:
        """Set when the response broke off."""
        return self._error

    def stream_to(self, sink: Sink) -> asyncio.Future[None]:
        """Give every further read to `sink`; the future ends with the response or raises GatewayError."""
        self._sink = sink
        self._done = done = self._loop.create_future()
        if self._error is not None:
            done.set_exception(self._error)
        elif self._complete:
            done.set_result(None)
        else:
            self._read_s = monotonic()
            self.deadline_s = self._idle_deadline_s
        return done

    def half_close(self) -> bool:
        """Say that nobody waits any more, and read what was answered by then; False where that cannot be."""
        if self._closed or self._complete or not self._transport.can_write_eof():
            return False
        self._half_closed = True
        self._transport.write_eof()
        return True

    @property
    def _idle_deadline_s(self) -> float:
        return min(self._read_s + self._idle_s, self._total_deadline_s)

    def finish(self) -> None:
        """End of the exchange, however it went: back to the pool when clean, else closed. Idempotent."""
        if not self._exchanging:
            return
        self._exchanging = False
        for future in (self._ready, self._done):
            if future is not None and not future.cancel() and not future.cancelled():
                future.exception()  # seen: a cancelled exchange has nobody left to await it
        self._ready = self._done = self._sink = None
        self._pieces = []
        self.deadline_s = NEVER
        if self._paused:
            self.resume()
        if self._may_be_kept():
            self._fresh = False
            self._pool.keep(self)
        else:
            self.close()

    def _may_be_kept(self) -> bool:
        """Nothing is left: no part of a response, and none of a request answered before it was read."""
        return (
            self._complete
            and self._reusable
            and not self._closed
            and not self._half_closed
            and not self._transport.get_write_buffer_size()
        )

    # --- back-pressure -------------------------------------------------------------------------

    def pause(self) -> None:
        """A silent upstream is our own doing from here on: only the total deadline still runs."""
        if not self._paused and not self._closed:
            self._paused = True
            self._transport.pause_reading()
            self.deadline_s = self._total_deadline_s

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            if not self._closed:
                self._transport.resume_reading()
                self._read_s = monotonic()
                self.deadline_s = self._total_deadline_s if self._done is None else self._idle_deadline_s

    # --- asyncio.Protocol ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self._exchanging or self._complete:
            self.close()  # bytes nobody asked for: whatever they are, the connection is out of step
            return
        self._seen_bytes = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._reusable = False
        except httptools.HttpParserError as error:
            self._reusable = False
            if not self._complete:  # else it is what follows the response that is out of order
                message = f"worker sent malformed HTTP: {error.__context__ or error}"
                self.fail(GatewayError(Failure.BAD_RESPONSE, message))
                return
        pieces = self._pieces
        if not pieces and not self._complete:
            self._framing_bytes += len(data)
            if self._framing_bytes > MAX_HEAD_BYTES:
                message = f"worker sent {MAX_HEAD_BYTES} bytes of head, chunk sizes or trailers"
                self.fail(GatewayError(Failure.BAD_RESPONSE, message))
        elif self._sink is not None:
            if pieces:
                self._framing_bytes = 0
                self._read_s = now_s = monotonic()
                self._sink(pieces.pop() if len(pieces) == 1 else self.take_body(), now_s)
            if self._complete and self._done is not None and not self._done.done():
                self._done.set_result(None)
        elif self._ready is not None and not self._ready.done():
            self.deadline_s = self._total_deadline_s
            self._ready.set_result(self._response)

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        self._pool.lost(self)
        if self._exchanging and not self._complete:
            self._fail_lost(exc)

    def _fail_lost(self, exc: Exception | None = None) -> None:
        response = self._response
        if not self._seen_bytes and not self._fresh:
            if self._ready is not None and not self._ready.done():
                self._ready.set_exception(StaleConnection())
            if self._done is not None and not self._done.done():  # it was given up, and heard out
                self._done.set_exception(GatewayError(Failure.RESET, "worker closed the connection"))
        elif response.status and response.ends_with_connection and exc is None and not self._in_head:
            self._complete = True
            self._settle()
        elif response.status:
            message = f"worker closed the connection in the middle of its response ({response.status})"
            self.fail(GatewayError(Failure.DIED, message, upstream_status=response.status))
        else:
            self.fail(GatewayError(Failure.RESET, "worker closed the connection before it answered"))

    def _settle(self) -> None:
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(self._response)
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def fail(self, error: GatewayError) -> None:
        """The response breaks off here."""
        self._error = error
        self._reusable = False
        self._settle_error(error)
        self.close()

    def _settle_error(self, error: GatewayError) -> None:
        for future in (self._ready, self._done):
            if future is not None and not future.done():
                future.set_exception(error)

    def on_deadline(self) -> None:
        if not self._exchanging:
            self.close()
            return
        status = self._response.status or None
        if monotonic() >= self._total_deadline_s:
            error = GatewayError(Failure.TOTAL_TIMEOUT, "timeouts.total_s passed", upstream_status=status)
        elif self._done is not None and monotonic() < self._idle_deadline_s:
            self.deadline_s = self._idle_deadline_s  # a read moves no deadline: it is looked up when due
            return
        elif self._done is None:
            error = GatewayError(
                Failure.FIRST_BYTE_TIMEOUT,
                "worker sent no body byte within timeouts.first_byte_s",
                upstream_status=status,
            )
        else:
            error = GatewayError(
                Failure.IDLE_TIMEOUT, "worker was silent for timeouts.idle_s", upstream_status=status
            )
        self.fail(error)

    def close(self) -> None:
        """Abort, not a graceful close: the engine must see the end now, and nothing is left to flush."""
        if not self._closed:
            self._transport.abort()

    # --- httptools -----------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._complete:
            self._reusable = False
            return
        self._in_head = True
        self._response = Response()

    def on_status(self, reason: bytes) -> None:
        if self._in_head:
            self._response.reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer, or the head of a second response that nobody asked for
        response = self._response
        response.headers.append((name, value))
        lower = name.lower() if len(name) in NOTED_LENGTHS else b""
        if lower == b"content-type":
            response.content_type = value.lower()
        elif lower == b"content-length":
            response.content_length = True
        elif lower == b"content-encoding":
            response.encoded = True
        elif lower == b"transfer-encoding":
            response.chunked = value.lower() == b"chunked"
            if not response.chunked and value.lower() != b"identity":
                raise ValueError(f"transfer coding {value[:40]!r} was not asked for")

    def on_headers_complete(self) -> None:
        if self._complete:
            return
        self._in_head = False
        self._response.status = self._parser.get_status_code()
        if self._response.status < 100 or self._response.status == 101:
            raise ValueError(f"status {self._response.status} is no answer to this request")
        if self._head_only and self._response.status >= 200:
            self._complete = True  # the parser would wait for a body that a HEAD does not have

    def on_body(self, data: bytes) -> None:
        if not self._complete:
            self._pieces.append(data)

    def on_message_complete(self) -> None:
        if self._complete:
            return
        if self._response.status < 200:
            return  # 100 Continue, 103 Early Hints: the real response follows
        self._complete = True
        self._reusable = self._parser.should_keep_alive()
