"""Whether a decode worker that was asked first does the request or declines it, by its first words."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import orjson

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
