"""One client connection: a parser, a queue of requests, and a transport that may be cut on purpose."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from typing import TYPE_CHECKING, Protocol, cast

import httptools

from kvroute.loadtests.mock_engine.wire import Request

if TYPE_CHECKING:
    from kvroute.loadtests.mock_engine.engine import MockEngine

_NO_LINGER = struct.pack("ii", 1, 0)
_MAX_PIPELINED = 64


class Responder(Protocol):
    """Whoever is answering the current request."""

    def resume(self) -> None:
        """The transport takes bytes again."""

    def lost(self) -> None:
        """The client is gone."""


class Connection(asyncio.Protocol):
    """HTTP/1.1 server side. Requests are answered one at a time, in order."""

    __slots__ = (
        "_body",
        "_engine",
        "_headers",
        "_idle_since_s",
        "_idle_timer",
        "_parser",
        "_queue",
        "_responder",
        "_serving",
        "_transport",
        "_url",
        "paused",
    )

    def __init__(self, engine: MockEngine) -> None:
        self._engine = engine
        self._queue: deque[Request] = deque()
        self._responder: Responder | None = None
        self._serving: Request | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self.paused = False

    # Transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports implement asyncio.Transport without deriving from it.
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpRequestParser(self)
        self._engine.opened(self)
        self._rest()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._engine.closed(self)
        self._queue.clear()
        responder, self._responder = self._responder, None
        if responder is not None:
            responder.lost()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        if self._responder is not None:
            self._responder.resume()

    def data_received(self, data: bytes) -> None:
        self._engine.bytes_read += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass
        except httptools.HttpParserCallbackError:
            raise  # a fault of this code, for the loop to report
        except httptools.HttpParserError:
            if not self._transport.is_closing():
                self.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                self._transport.close()

    # Parser.

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        for name, value in self._headers:
            if name.lower() == b"expect" and value.lower() == b"100-continue":
                self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        path, _, query = self._url.partition(b"?")
        request = Request(
            self._parser.get_method(),
            path.decode("latin-1"),
            query,
            self._headers,
            b"".join(self._body),
            self._parser.should_keep_alive(),
            self._parser.get_http_version() == "1.0",
        )
        if self._serving is None:
            self._serve(request)
        elif len(self._queue) < _MAX_PIPELINED:
            self._queue.append(request)
        else:
            self._transport.abort()

    # Answering.

    def _serve(self, request: Request) -> None:
        if self._transport.is_closing():
            return
        self._serving = request
        self._engine.handle(self, request)

    def answer_with(self, responder: Responder) -> None:
        """From now on this one is told what happens to the connection."""
        self._responder = responder

    def write(self, data: bytes) -> None:
        """Send bytes; dropped when the connection is already closing."""
        if not self._transport.is_closing():
            self._engine.bytes_written += len(data)
            self._transport.write(data)

    def reply(self, data: bytes) -> None:
        """A whole response, then on to the next request."""
        self.write(data)
        self.done()

    def done(self, keep_alive: bool = True) -> None:
        """The current response is complete."""
        request, self._serving, self._responder = self._serving, None, None
        if self._transport.is_closing():
            return
        if not keep_alive or request is None or not request.keep_alive:
            self._transport.close()
        elif self._queue:
            asyncio.get_running_loop().call_soon(self._serve, self._queue.popleft())
            self._serving = request
        else:
            self._rest()

    # Endings.

    def close(self) -> None:
        """Orderly, after what was written has gone out."""
        self._transport.close()

    def reset(self, at_once: bool = False) -> None:
        """A TCP reset, once what was written has gone out."""
        if self._transport.is_closing() and not at_once:
            return
        if self._transport.get_write_buffer_size() and not at_once:
            asyncio.get_running_loop().call_later(0.001, self.reset)
            return
        sock: socket.socket | None = self._transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self._transport.abort()

    # Idle.

    def _rest(self) -> None:
        limit_s = self._engine.close_idle_s
        if limit_s is None:
            return
        loop = asyncio.get_running_loop()
        self._idle_since_s = loop.time()
        if self._idle_timer is None:
            self._idle_timer = loop.call_later(limit_s, self._close_if_idle)

    def _close_if_idle(self) -> None:
        self._idle_timer = None
        limit_s = self._engine.close_idle_s
        if self._serving is not None or limit_s is None:
            return
        loop = asyncio.get_running_loop()
        left_s = self._idle_since_s + limit_s - loop.time()
        if left_s > 0.0005:
            self._idle_timer = loop.call_later(left_s, self._close_if_idle)
        else:
            self._transport.close()
