"""The gateway between scripted ends; at the end every book is checked: memory, tasks, connections, timers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from kvroute.router.server import GatewayServer
from tests.kit import Client, Engine, Received, Script, Wire, gateway, until

PROMPTLY_S = 10.0
"""Leaves a busy machine room, and is far below every time limit that a test waits for nobody to reach."""
DONE = b"data: [DONE]\n\n"


@contextlib.asynccontextmanager
async def edge(*engines: Engine, **fields: Any) -> AsyncIterator[GatewayServer]:
    """A gateway without an admin port; nothing that requests took may be left when they are over."""
    async with gateway(*engines, **{"admin": {"enabled": False}, **fields}) as server:
        yield server
        await at_rest(server)


async def at_rest(server: GatewayServer) -> None:
    """No request runs, no request body is held, no connection is in use and no timer watches one."""
    state, members = server.state, server.registry.members.values()
    await until(lambda: not handlers())
    for member in members:
        member.pool.close_idle()
    await until(lambda: all(member.pool.open_connections == 0 for member in members))
    await until(lambda: len(state.sweeper) == len(state.connections))
    await until(lambda: state.buffered_bytes == 0)


def handlers() -> int:
    """Tasks that handle a request."""
    coroutines = (task.get_coro() for task in asyncio.all_tasks())
    return sum(getattr(each, "__qualname__", "") == "ClientConnection._run" for each in coroutines)


def event(text: str) -> bytes:
    """One chunk of a completion stream."""
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n"


EVENTS = [event(f"token {number} é") for number in range(5)]


def stream(*pieces: bytes, end: bool = True) -> Script:
    """A chunked event stream, one HTTP chunk per piece; without `end` the connection is cut after them."""

    async def script(_request: Received, wire: Wire) -> None:
        await wire.start_stream()
        for piece in pieces:
            await wire.chunk(piece)
        if end:
            await wire.chunk(b"")
        else:
            await asyncio.sleep(0.02)  # let the last piece leave: a reset would overtake it
            wire.reset()

    return script


def raw(data: bytes, *, close: bool = False) -> Script:
    """These bytes and nothing else; then the connection is closed or takes the next request."""

    async def script(_request: Received, wire: Wire) -> None:
        await wire.send(data)
        if close:
            wire.close()

    return script


def send_reset(wire: Wire) -> None:
    """RST; what a closed connection sends otherwise is a FIN, which can be the end of a body."""
    sock = wire.writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wire.reset()


class Lasting:
    """Sends `pieces`, then stays until the gateway leaves. `wire` is that of the last request."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces
        self.wire: Wire
        self.begun = asyncio.Event()
        self.left = asyncio.Event()

    async def __call__(self, _request: Received, wire: Wire) -> None:
        self.wire = wire
        if self.pieces:
            await wire.start_stream()
            for piece in self.pieces:
                await wire.chunk(piece)
        self.begun.set()
        try:
            await wire.eof(12 * PROMPTLY_S)
        finally:
            self.left.set()


async def first_chunk(server: GatewayServer, target: str, body: Any) -> Client:
    """A client that has had the head and the first chunk of a response."""
    client = await Client.connect(server.url)
    await client.send(target, body)
    status, _, _ = await client.head()
    assert status == 200
    assert await client.chunk()
    return client


async def promptly(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), PROMPTLY_S)


def resident_bytes() -> int:
    """Memory of this process, which holds the gateway and both ends."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
