"""A worker whose every byte the test writes, a client that shows every byte, and a gateway between them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from kvroute.config import Config
from kvroute.router.server import GatewayServer

CHAT = "/v1/chat/completions"
HANG_S = 30.0
"""Ends a test that hangs, and says nothing of speed: what takes 50 ms takes seconds on a busy machine."""
ASKING: dict[str, Any] = {"source": "engine", "tokenize_timeout_s": HANG_S}
"""A model whose engines tokenise, for as long as a busy machine needs."""
PROBED = ("/health", "/metrics", "/v1/models", "/server_info?config_format=json", "/kv_event_sources")


@dataclass
class Received:
    """A request as it arrived at a scripted engine."""

    method: str
    target: str
    headers: list[tuple[bytes, bytes]]
    body: bytes
    connection: int
    at_s: float

    def header(self, name: str) -> str | None:
        wanted = name.lower().encode()
        return next((value.decode("latin-1") for key, value in self.headers if key.lower() == wanted), None)

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Wire:
    """The engine's end of one connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    closed: bool = False

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(
        self, status: int, body: bytes, *headers: str, content_type: str = "application/json"
    ) -> None:
        lines = [
            f"HTTP/1.1 {status} X",
            f"content-type: {content_type}",
            f"content-length: {len(body)}",
            *headers,
        ]
        await self.send("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    async def start_stream(self, *headers: str) -> None:
        lines = ["HTTP/1.1 200 OK", "content-type: text/event-stream", "transfer-encoding: chunked", *headers]
        await self.send("\r\n".join(lines).encode() + b"\r\n\r\n")

    async def chunk(self, data: bytes) -> None:
        """One HTTP chunk; b"" ends the body."""
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    def reset(self) -> None:
        """Cut the connection without a word."""
        self.closed = True
        self.writer.transport.abort()

    def close(self) -> None:
        self.closed = True
        self.writer.close()

    async def eof(self, within_s: float = HANG_S) -> float:
        """Wait until the peer closes; seconds it took. TimeoutError when it does not."""
        started = time.monotonic()
        async with asyncio.timeout(within_s):
            with contextlib.suppress(ConnectionError):
                while await self.reader.read(65536):
                    pass
        self.closed = True
        return time.monotonic() - started


Script = Callable[[Received, Wire], Awaitable[None]]


async def answer_ok(_request: Received, wire: Wire) -> None:
    await wire.answer(200, b'{"ok":true}')


@dataclass
class Engine:
    """Answers probes by itself and everything else by `script`. `url` is known once started.

    Change `health`, `models` or `script` at any time; `stop` refuses connections, `start` takes them again
    at the same port.
    """

    script: Script = answer_ok
    models: tuple[str, ...] = ("m",)
    health: int | None = 200
    """Status of /health; None never answers."""
    metrics: str | None = ""
    """Body of /metrics; None never answers."""
    kv_event_sources: dict[str, Any] | int = 404
    """Answer of /kv_event_sources, or its status when it is none."""
    keeps_probes: bool = True
    """False closes the connection of every probe, so that traffic finds none of them in the pool."""
    host: str = "127.0.0.1"
    unix_path: str | None = None
    ssl: Any = None
    port: int = 0
    received: list[Received] = field(default_factory=list)
    probes: int = 0
    connections: int = 0
    wires: list[Wire] = field(default_factory=list)
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def url(self) -> str:
        if self.unix_path:
            return f"unix://{self.unix_path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.ssl else 'http'}://{host}:{self.port}"

    async def start(self) -> Engine:
        if self.unix_path:
            self._server = await asyncio.start_unix_server(self._serve, self.unix_path)
        else:
            self._server = await asyncio.start_server(self._serve, self.host, self.port, ssl=self.ssl)
            self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        """Refuse new connections and cut the open ones."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for wire in self.wires:
            wire.reset()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aenter__(self) -> Engine:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.connections += 1
        number = self.connections
        wire = Wire(reader, writer)
        self.wires.append(wire)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while not wire.closed:
                request = await _read_request(reader, number)
                if not await self._answer_probe(request, wire):
                    self.received.append(request)
                    await self.script(request, wire)
        writer.close()

    async def _answer_probe(self, request: Received, wire: Wire) -> bool:
        if request.method != "GET" or request.target not in PROBED:
            return False
        self.probes += 1
        close = () if self.keeps_probes else ("connection: close",)
        if request.target == "/health":
            await (asyncio.sleep(3600) if self.health is None else wire.answer(self.health, b"", *close))
        elif request.target == "/metrics":
            text = self.metrics
            await (
                asyncio.sleep(3600)
                if text is None
                else wire.answer(200, text.encode(), *close, content_type="text/plain")
            )
        elif request.target == "/v1/models":
            cards = [{"id": name, "object": "model", "owned_by": "vllm"} for name in self.models]
            await wire.answer(200, json.dumps({"object": "list", "data": cards}).encode(), *close)
        elif request.target == "/kv_event_sources":
            said = self.kv_event_sources
            status, body = (said, b"{}") if isinstance(said, int) else (200, json.dumps(said).encode())
            await wire.answer(status, body, *close)
        else:
            await wire.answer(404, b"{}", *close)
        return True


async def _read_request(reader: asyncio.StreamReader, connection: int) -> Received:
    head = await reader.readuntil(b"\r\n\r\n")
    first, *rest = head[:-4].split(b"\r\n")
    headers = [(name, value.strip()) for name, _, value in (line.partition(b":") for line in rest)]
    method, target, _ = first.decode("latin-1").split(" ")
    length = next((int(value) for name, value in headers if name.lower() == b"content-length"), 0)
    body = await reader.readexactly(length)
    return Received(method, target, headers, body, connection, time.monotonic())


@dataclass
class Answer:
    """A response, undecoded: `raw` is every byte that came."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    raw: bytes
    complete: bool
    """False when the connection ended before the body did."""

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """`error.code` of an OpenAI-shaped error."""
        return str(self.json()["error"]["code"])


class Client:
    """A raw HTTP/1.1 client on one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, url: str) -> Client:
        host, _, port = url.partition("://")[2].rpartition(":")
        return cls(*await asyncio.open_connection(host.strip("[]"), int(port), limit=2**20))

    async def send(self, target: str, body: Any = None, *headers: str, method: str = "POST") -> None:
        """Write a request; a body that is not bytes is sent as JSON."""
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [f"{method} {target} HTTP/1.1", "Host: gateway", *headers]
        if body is not None:
            lines.append(f"Content-Length: {len(data)}")
            if not any(line.lower().startswith("content-type:") for line in headers):
                lines.append("Content-Type: application/json")
        self.writer.write("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + data)
        await self.writer.drain()

    async def head(self) -> tuple[int, list[tuple[str, str]], bytes]:
        """Status, headers and the raw head."""
        raw = await self.reader.readuntil(b"\r\n\r\n")
        first, *rest = raw[:-4].decode("latin-1").split("\r\n")
        pairs = [(name, value.strip()) for name, _, value in (line.partition(":") for line in rest)]
        return int(first.split(" ")[1]), pairs, raw

    async def chunk(self) -> bytes:
        """The next chunk of a chunked body; b"" is its end."""
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        return (await self.reader.readexactly(size + 2))[:-2]

    async def receive(self, *, head_only: bool = False) -> Answer:
        status, headers, raw = await self.head()
        fields = {name.lower(): value for name, value in headers}
        body, complete = b"", True
        try:
            if head_only or status in (204, 304):
                pass
            elif fields.get("transfer-encoding") == "chunked":
                while piece := await self.chunk():
                    body += piece
            elif "content-length" in fields:
                body = await self.reader.readexactly(int(fields["content-length"]))
            else:
                body = await self.reader.read()
        except asyncio.IncompleteReadError as error:
            body, complete = body + error.partial, False
        except ConnectionError:
            complete = False
        return Answer(status, headers, body, raw + body, complete)

    async def ask(self, target: str, body: Any = None, *headers: str, method: str = "POST") -> Answer:
        await self.send(target, body, *headers, method=method)
        return await self.receive(head_only=method == "HEAD")

    def abort(self) -> None:
        self.writer.transport.abort()

    def close(self) -> None:
        self.writer.close()


async def ask(url: str, target: str, body: Any = None, *headers: str, method: str = "POST") -> Answer:
    """One request on a connection of its own."""
    client = await Client.connect(url)
    try:
        return await client.ask(target, body, *headers, method=method)
    finally:
        client.close()


FAST: dict[str, Any] = {
    "port": 0,
    "admin": {"port": 0, "enabled": False},  # its server takes 0.2 s to stop
    "policy": "round_robin",
    "health": {
        "interval_s": 0.1,
        "timeout_s": 5.0,
        "metrics_interval_s": 0.1,
        "models_interval_s": 0.1,
        "slow_start_s": 0,
    },
    "shutdown": {"keep_serving_s": 0, "drain_s": 1},
}


def fast_config(*engines: Engine, **fields: Any) -> Config:
    """A configuration with free ports and quick probes; groups given are merged over it."""
    merged: dict[str, Any] = {**FAST, "workers": [engine.url for engine in engines]}
    for name, value in fields.items():
        merged[name] = {**merged[name], **value} if isinstance(merged.get(name), dict) else value
    return Config(**merged)


@contextlib.asynccontextmanager
async def gateway(*engines: Engine, ready: bool = True, **fields: Any) -> AsyncIterator[GatewayServer]:
    """A gateway in front of started engines; on the way out its books must balance."""
    server = GatewayServer(fast_config(*engines, **fields))
    await server.start()
    try:
        if ready:
            wanted = len(engines)
            await until(
                lambda: sum(m.state.value == "ready" for m in server.registry.members.values()) >= wanted
            )
        yield server
        await until(lambda: all(m.load.requests == 0 for m in server.registry.members.values()))
        server.registry.check_integrity()
        server.knowledge.index.check_integrity()
        assert all(m.load.pending_prefill_tokens == 0 for m in server.registry.members.values())
    finally:
        await server.stop()


async def until(condition: Callable[[], bool], within_s: float = HANG_S) -> float:
    """Wait for a condition; seconds it took. Fails when it does not come true."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < within_s, f"not true within {within_s} s"
        await asyncio.sleep(0.005)
    return time.monotonic() - started
