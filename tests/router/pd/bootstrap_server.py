"""A bootstrap server as vLLM's Mooncake connector has it, which answers what the test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any


class BootstrapServer:
    """`answer` is an object, or the bytes of a body; None: it says nothing before `go`."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.status = 200
        self.port = 0
        self.seen: list[bytes] = []
        self.asked = asyncio.Event()
        self.go = asyncio.Event()
        self.go.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            self.seen.append(head.split(b"\r\n")[0])
            self.asked.set()
            await self.go.wait()
            body = self.answer if isinstance(self.answer, bytes) else json.dumps(self.answer).encode()
            length = f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            writer.write(f"HTTP/1.1 {self.status} X\r\n{length}".encode() + body)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def bootstrap_server(answer: Any) -> AsyncIterator[BootstrapServer]:
    server = BootstrapServer(answer)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        server.go.set()
        listening.close()
