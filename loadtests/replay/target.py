"""One endpoint, as a client sees it: what it serves, and one request at a time of many."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence

import orjson

from kvroute.clock import monotonic
from kvroute.config_groups import Timeouts
from kvroute.endpoint import Endpoint
from kvroute.loadtests.replay.answer import TIMEOUTS, Request, measured
from kvroute.loadtests.replay.gaps import Gaps
from kvroute.loadtests.replay.stream import TokenStream
from kvroute.loadtests.results.measured import Measured
from kvroute.router.errors import GatewayError, shorten
from kvroute.router.meter import Meter
from kvroute.router.pool import UpstreamPool
from kvroute.router.sweeper import Sweeper
from kvroute.router.upstream import Response, StaleConnection, UpstreamConnection

ASK_S = 20.0
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+): *([\x20-\x7e]*)")
_OWN_HEADERS = frozenset({"host", "content-length", "content-type", "transfer-encoding", "connection"})


class ReplayError(ValueError):
    """Nothing can be sent; the message says why."""


class Target:
    """An OpenAI endpoint behind a URL. Close it when done."""

    def __init__(
        self, url: str, timeout_s: float, api_key: str | None = None, headers: Sequence[str] = ()
    ) -> None:
        """ReplayError for a URL, key or header that cannot be used."""
        try:
            self.endpoint = Endpoint.parse(url)
        except ValueError as error:
            raise ReplayError(f"--url: {error}") from None
        self.timeout_s = timeout_s
        self._timeouts = Timeouts(connect_s=min(timeout_s, 60), first_byte_s=timeout_s, idle_s=timeout_s)
        loop = asyncio.get_running_loop()
        self._pool = UpstreamPool(self.endpoint, self._timeouts, Sweeper(loop), loop)
        self._fields = _fields(api_key, headers)

    def close(self) -> None:
        """Cut what is still open."""
        self._pool.close()

    async def model(self) -> str:
        """The first that is served. ReplayError when nobody answers, or nothing is."""
        status, body = await self._say(b"GET", "/v1/models", b"")
        served = _served(body) if status == 200 else []
        if not served:
            raise ReplayError(self._fault(f"GET /v1/models: {status}, and no models", body, "--model"))
        return served[0]

    async def check(self, path: str, body: bytes) -> None:
        """Whether a request like this is answered at all; ReplayError says what came instead."""
        status, said = await self._say(b"POST", path, body)
        if status in (401, 403):
            raise ReplayError(self._fault(f"POST {path}: {status}", said, "--api-key"))
        if status != 200:
            raise ReplayError(
                self._fault(f"POST {path}: {status}", said, "another --model, --api or --prompts")
            )

    def _fault(self, what: str, body: bytes, remedy: str) -> str:
        said = shorten(" ".join(body.decode(errors="replace").split()), 300)
        return f"--url: {self.endpoint.url}: {what} ({said}); is {remedy} needed?"

    async def _say(self, method: bytes, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body, within `ASK_S`."""
        pieces: list[bytes] = []
        try:
            async with asyncio.timeout(ASK_S):
                response = await self._exchange(
                    method, path, body, b"", monotonic() + ASK_S, lambda data, _: pieces.append(data)
                )
        except (GatewayError, TimeoutError) as error:
            said = error.message if isinstance(error, GatewayError) else f"no answer within {ASK_S:g} s"
            raise ReplayError(f"--url: {self.endpoint.url}: {said}") from None
        return response.status, b"".join(pieces)

    async def ask(self, request: Request, epoch_s: float, gaps: Gaps) -> Measured:
        """One streamed answer. Never raises but for cancellation: what went wrong is in the result.

        The times of the result count from `epoch_s` (monotonic), as the request's own do.
        """
        stream, meter = TokenStream(gaps), Meter(None)

        def read(data: bytes, now_s: float) -> None:
            meter.feed(data, now_s)
            stream.feed(data, now_s)

        sent_s = monotonic()
        response, failure = Response(), None
        deadline_s = epoch_s + request.due_s + self.timeout_s
        try:
            response = await self._exchange(
                b"POST", request.path, request.body, request.fields, deadline_s, read
            )
        except GatewayError as error:
            failure = "timeout" if error.failure in TIMEOUTS else error.failure.value
        return measured(request, sent_s, epoch_s, response, failure, stream, meter)

    async def _exchange(
        self,
        method: bytes,
        path: str,
        body: bytes,
        fields: bytes,
        deadline_s: float,
        read: Callable[[bytes, float], None],
    ) -> Response:
        """The head of the response, once all of its body was read. GatewayError when it broke off."""
        endpoint = self.endpoint
        head = b"%b %b%b HTTP/1.1\r\nHost: %b\r\nAccept: */*\r\n%b%b" % (
            method,
            endpoint.base_path.encode(),
            path.encode(),
            endpoint.authority.encode(),
            self._fields,
            fields,
        )
        if body:
            head += b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(body)
        head += b"\r\n"
        connection = self._pool.take_idle()
        if connection is not None:
            try:
                return await self._send(connection, head, body, deadline_s, read)
            except StaleConnection:
                pass  # it had closed: once more on a fresh one
        return await self._send(await self._pool.connect(), head, body, deadline_s, read)

    async def _send(
        self,
        connection: UpstreamConnection,
        head: bytes,
        body: bytes,
        deadline_s: float,
        read: Callable[[bytes, float], None],
    ) -> Response:
        try:
            response = await connection.send(head, body, False, self._timeouts, deadline_s)
            read(connection.take_body(), monotonic())
            await connection.stream_to(read)
            return response
        finally:
            connection.finish()


def _fields(api_key: str | None, headers: Sequence[str]) -> bytes:
    """Header lines of every request. ReplayError names what cannot be sent."""
    lines = []
    if api_key is not None:
        if not (api_key.isascii() and api_key.isprintable()):
            raise ReplayError("--api-key: only printable ASCII characters are accepted")
        lines.append(f"Authorization: Bearer {api_key}")
    for header in headers:
        found = _HEADER.fullmatch(header)
        if found is None:
            raise ReplayError(f"--header: {shorten(header)!r} is not understood; 'name: value' is expected")
        if found[1].lower() in _OWN_HEADERS:
            raise ReplayError(f"--header: {found[1]} is set by the client itself")
        lines.append(header)
    return "".join(f"{line}\r\n" for line in lines).encode()


def _served(body: bytes) -> list[str]:
    """Names in a list of models, adapters last; empty for anything else."""
    try:
        cards = orjson.loads(body)["data"]
        cards = sorted(cards, key=lambda card: bool(card.get("parent")))
        return [card["id"] for card in cards if isinstance(card["id"], str)]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []
