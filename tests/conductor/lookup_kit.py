"""A lookup server and gateways of it in one process, and either end with every byte written by the test."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from kvroute.conductor import wire
from kvroute.conductor.core import Conductor
from kvroute.conductor.events import EventSource
from kvroute.conductor.index import Holder
from kvroute.conductor.keys import Namespace, token_keys
from kvroute.conductor.lookups import LookupServer
from kvroute.conductor.remote import RemoteConductor, RemoteOptions
from kvroute.types import PrefixMatch, PromptKeys, Trust
from tests.conductor.still_feed import StillFeed, still_conductor
from tests.kit import until

IDS = list(range(1000, 1512))
MODEL = Namespace(model="m")
PATIENT_S = 30.0
STUCK_S = 90.0
"""Of a test's body: an answer that never comes fails it."""
HELLO = wire.frame([wire.Hello(wire.PROTOCOL)])
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def keys_of(ids: Sequence[int] = IDS, block: int = 16) -> PromptKeys:
    return token_keys(ids, MODEL.root("ids"), block)


def source(port: int, rank: int = 0) -> EventSource:
    return EventSource(f"tcp://1.1.1.1:{port}", dp_rank=rank)


class Pair:
    """A lookup server over a conductor without engines, and gateways of it."""

    def __init__(self, path: Path, linger_s: float) -> None:
        self.address = f"unix://{path}"
        self.conductor, self.feed = still_conductor(linger_s)
        self.server = LookupServer(self.conductor)
        self.clients: list[RemoteConductor] = []

    async def gateway(self, **options: Any) -> RemoteConductor:
        given = {"budget_s": PATIENT_S, "reconnect_min_s": 0.01, "reconnect_max_s": 0.02, **options}
        client = RemoteConductor(RemoteOptions(self.address, **given))
        client.start()
        self.clients.append(client)
        await until(lambda: client.connected)
        return client

    def holder(self, endpoint: str, rank: int = 0) -> Holder:
        """Of whoever follows that endpoint."""
        (worker_id,) = [
            name
            for name, sources in self.feed.workers.items()
            if any(one.endpoint == endpoint for one in sources)
        ]
        return Holder(worker_id, rank)


@contextlib.asynccontextmanager
async def paired(tmp_path: Path, linger_s: float = 60.0) -> AsyncIterator[Pair]:
    pair = Pair(tmp_path / "s", linger_s)
    await pair.server.start(pair.address)
    try:
        async with asyncio.timeout(STUCK_S):
            yield pair
    finally:
        for client in pair.clients:
            await client.close()
        await pair.server.close()
        await pair.conductor.close()


async def told(client: RemoteConductor) -> None:
    """What was sent before has been dealt with: requests of a connection are answered in order."""
    assert (await client.match([], [])).fallback is None


async def read_frame(reader: asyncio.StreamReader) -> list[wire.Request]:
    length = int.from_bytes(await reader.readexactly(4), "big")
    requests: list[wire.Request] = wire.requests_decoder.decode(await reader.readexactly(length))
    return requests


def matched(requests: list[wire.Request], rows: int | None = None) -> bytes:
    nothing = wire.Row.pack(PrefixMatch(tokens=7), Trust.EXACT)
    return wire.frame(
        [
            wire.Matched(one.id, [nothing] * (len(one.worker_ids) if rows is None else rows))
            for one in requests
            if isinstance(one, wire.Match)
        ]
    )


@contextlib.asynccontextmanager
async def scripted(handler: Handler, **options: Any) -> AsyncIterator[RemoteConductor]:
    """A gateway of a conductor whose connections `handler` serves."""
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await handler(reader, writer)
        writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    given = {"budget_s": 0.02, "reconnect_min_s": 0.01, "reconnect_max_s": 0.02, **options}
    client = RemoteConductor(RemoteOptions(f"tcp://127.0.0.1:{port}", **given))
    client.start()
    try:
        async with asyncio.timeout(STUCK_S):
            yield client
    finally:
        await client.close()
        server.close()
        for writer in writers:
            writer.transport.abort()


@contextlib.asynccontextmanager
async def served(tmp_path: Path) -> AsyncIterator[tuple[LookupServer, Conductor, StillFeed]]:
    conductor, feed = still_conductor()
    server = LookupServer(conductor)
    await server.start(f"unix://{tmp_path}/s")
    try:
        async with asyncio.timeout(STUCK_S):
            yield server, conductor, feed
    finally:
        await server.close()


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body
