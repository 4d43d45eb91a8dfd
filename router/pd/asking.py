"""Whether a decode worker that was asked first does the request, declines it, or gives it up later."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import orjson

from kvroute.router.errors import Failure, GatewayError
from kvroute.router.pd.connector import DecodeFirst
from kvroute.router.upstream import Response, UpstreamConnection

MAX_LOOKED_AT_BYTES = 2**20
"""An answer that has said nothing in so much is relayed."""
_BORDER = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_DATA = re.compile(rb"(?:^|[\r\n])data: ?([^\r\n]*)")


async def declines(connector: DecodeFirst, response: Response, connection: UpstreamConnection) -> bool:
    """Look at as much of the body as it takes; what was looked at is given back.

    Raises GatewayError when the worker breaks off meanwhile.
    """
    if connection.error is not None:
        raise connection.error
    is_stream = response.content_type.startswith(b"text/event-stream")
    seen = bytearray(connection.take_body())
    told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    verdict = _verdict(connector, bytes(seen), is_stream=is_stream, over=connection.complete)
    if verdict is None:

        def look(data: bytes, _now_s: float) -> None:
            nonlocal verdict
            seen.extend(data)
            if verdict is None and is_stream:
                verdict = _verdict(connector, bytes(seen), is_stream=True, over=False)
            if verdict is not None and not told.done():
                told.set_result(None)

        ended = connection.stream_to(look)
        await asyncio.wait((ended, told), return_when=asyncio.FIRST_COMPLETED)
        if verdict is None:
            await ended
            verdict = _verdict(connector, bytes(seen), is_stream=is_stream, over=True)
    connection.give_back(bytes(seen))
    return bool(verdict)


def _verdict(connector: DecodeFirst, body: bytes, *, is_stream: bool, over: bool) -> bool | None:
    """None while it cannot be told."""
    if not is_stream:
        return _judged(connector, body) if over else None
    *events, _ = _BORDER.split(body)
    for event in events:
        for data in _DATA.findall(event):
            verdict = False if data == b"[DONE]" else _judged(connector, data)
            if verdict is not None:
                return verdict
    return False if over or len(body) > MAX_LOOKED_AT_BYTES else None


def _judged(connector: DecodeFirst, text: bytes) -> bool | None:
    try:
        value: Any = orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return connector.declined(value) if isinstance(value, dict) else False


class GivingUp:
    """Of a stream that has begun well: its worker may decline it in the middle, where it was preempted and
    finds too little of its KV again (vLLM RFC 24256).

    Events come out whole, as they went in; none does from the one that declines on, of which `fail` hears.
    """

    __slots__ = ("_connector", "_fail", "_failed", "_kept")

    def __init__(self, connector: DecodeFirst, fail: Callable[[GatewayError], None]) -> None:
        self._connector = connector
        self._fail = fail
        self._failed = False
        self._kept = b""

    def feed(self, data: bytes) -> bytes:
        """What may go on of it; nothing, sometimes."""
        if self._failed:
            return b""
        if self._kept:
            data, self._kept = self._kept + data, b""
        if not data.endswith(b"\n\n"):
            ends = [found.end() for found in _BORDER.finditer(data)]
            at = ends[-1] if ends else len(data) if len(data) > MAX_LOOKED_AT_BYTES else 0
            data, self._kept = data[:at], data[at:]
        return self._judge(data) if self._connector.declines_by in data else data

    def whole(self, body: bytes) -> bytes:
        """A body that is all there."""
        return self.feed(body) + self.end()

    def end(self) -> bytes:
        """What was kept back, which is no event."""
        kept, self._kept = self._kept, b""
        return kept

    def _judge(self, events: bytes) -> bytes:
        start = 0
        for border in _BORDER.finditer(events):
            event = events[start : border.end()]
            if any(_judged(self._connector, data) for data in _DATA.findall(event)):
                self._failed, self._kept = True, b""
                message = "the worker gave the request up when it had lost KV of it (cache_hit_threshold)"
                self._fail(GatewayError(Failure.GIVEN_UP, message))
                return events[:start]
            start = border.end()
        return events
