"""From the bytes of a client connection to complete requests, within the limits."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import httptools
from msgspec import Struct

from kvroute.clock import monotonic
from kvroute.router.errors import Failure, GatewayError
from kvroute.router.headers import Headers

if TYPE_CHECKING:
    from kvroute.router.client import ServerState


MAX_PIECES = 256


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
    client_lines: tuple[frozenset[bytes], bytes] | None = None
    """Of the last attempt's head: the names that were left out, and the lines of all others."""


class RequestParser:
    """Calls `arrived` with every complete request, and `go_on` when a client waits for 100 Continue.

    On the first fault it sets `error` and reads no further. Body bytes count in the server's
    `buffered_bytes` from arrival; whoever takes a request takes over its share.
    """

    def __init__(
        self, state: ServerState, arrived: Callable[[Request], None], go_on: Callable[[], None]
    ) -> None:
        self._state = state
        self._arrived = arrived
        self._go_on = go_on
        self._parser = httptools.HttpRequestParser(self)
        self.error: GatewayError | None = None
        self._reset_message()

    def _reset_message(self) -> None:
        self._target = b""
        self._headers: Headers = []
        self._fields: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._joined = bytearray()
        self._body_bytes = 0
        self._head_bytes = 0
        self._framing_bytes = 0
        """Received since the last body byte, once the head is over: chunk sizes and trailers."""
        self._in_head = True

    @property
    def receiving(self) -> bool:
        """True in the middle of a request."""
        return self._head_bytes > 0

    def feed(self, data: bytes) -> None:
        """Parse what was read; nothing once there is an error."""
        if self.error is not None:
            return
        if self._in_head:
            self._head_bytes += len(data)
        else:
            self._framing_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self.refuse(GatewayError(Failure.MALFORMED, f"malformed HTTP request: {error}"))
        received = self._head_bytes if self._in_head else self._framing_bytes
        if received > self._state.limits.header_bytes:
            self._refuse_headers()

    def refuse(self, error: GatewayError) -> None:
        """Read no further; the first error stands. Gives back what the unfinished request holds."""
        self._state.buffered_bytes -= self._body_bytes
        self._body = []
        self._joined = bytearray()
        self._body_bytes = 0
        self.error = self.error or error

    def _refuse_headers(self) -> None:
        limit = self._state.limits.header_bytes
        message = f"request head is over {limit} bytes (limits.header_bytes)"
        self.refuse(GatewayError(Failure.HEADERS_TOO_LARGE, message))

    def _refuse_body(self) -> None:
        limit = self._state.limits.body_bytes
        message = f"request body is over {limit} bytes (limits.body_bytes)"
        self.refuse(GatewayError(Failure.BODY_TOO_LARGE, message))

    def _decline_upgrade(self, rest: bytes) -> None:
        """Read on as if no upgrade had been offered (RFC 9110 7.8).

        The parser takes what follows such a head for another protocol, yet it can be a body: Java's client
        offers h2c with its POSTs. A new parser is given the framing of this message and then the rest.
        """
        offered, self._parser = self._parser, httptools.HttpRequestParser(self)
        if offered.get_method() == b"CONNECT":
            self.refuse(GatewayError(Failure.MALFORMED, "CONNECT is not accepted"))
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
            self.refuse(GatewayError(Failure.MALFORMED, message))
        except httptools.HttpParserError as error:
            self.refuse(GatewayError(Failure.MALFORMED, f"malformed HTTP request: {error}"))

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
            self.refuse(GatewayError(Failure.MALFORMED, message))
        elif self._expects_continue(fields):
            self._go_on()

    def _expects_continue(self, fields: dict[bytes, bytes]) -> bool:
        expected = fields.get(b"expect", b"").lower() == b"100-continue"
        return expected and self._parser.get_http_version() == "1.1"

    def on_body(self, data: bytes) -> None:
        if self.error is not None:
            return
        self._framing_bytes = 0
        self._body.append(data)
        if len(self._body) >= MAX_PIECES:  # a piece weighs 30 bytes and more beside its own
            self._joined += b"".join(self._body)
            self._body.clear()
        self._body_bytes += len(data)
        self._state.buffered_bytes += len(data)
        if self._body_bytes > self._state.limits.body_bytes:
            self._refuse_body()
        elif self._state.buffered_bytes > self._state.limits.buffered_bytes:
            message = "the gateway holds as many request bytes as limits.buffered_bytes allows"
            self.refuse(GatewayError(Failure.OVERLOADED, message, retry_after_s=1))

    def on_message_complete(self) -> None:
        parser = self._parser
        if self.error is not None or parser.should_upgrade():
            return
        body = self._body
        request = Request(
            method=parser.get_method(),
            target=self._target,
            headers=self._headers,
            fields=self._fields,
            body=body[0] if len(body) == 1 and not self._joined else b"".join((self._joined, *body)),
            keep_alive=parser.should_keep_alive(),
            http10=parser.get_http_version() != "1.1",
            received_s=monotonic(),
        )
        self._reset_message()
        if not request.target.startswith(b"/") and not self._to_origin_form(request):
            self._state.buffered_bytes -= len(request.body)
            self.refuse(GatewayError(Failure.MALFORMED, "request target must be a path or an http URL"))
        else:
            self._arrived(request)

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
