"""Where P2pNccl engines say who they are: msgpack to a ZMQ ROUTER, again and again while they live."""

from __future__ import annotations

import asyncio
from typing import Literal

import msgspec
import structlog
import zmq
import zmq.asyncio
from msgspec import Struct
from pydantic import TypeAdapter, ValidationError

from kvroute.clock import Clock, monotonic
from kvroute.config_groups import P2pAddress
from kvroute.router.metrics import Counter

log = structlog.get_logger(__name__)

LIFETIME_S = 5.0
"""As in vLLM's own proxy; an engine registers every 3 s."""
MAX_ENTRIES = 4096
MAX_MESSAGE_BYTES = 4096

Kind = Literal["P", "D"]


class _Registration(Struct, frozen=True):
    type: Kind
    http_address: str
    zmq_address: str


_decode = msgspec.msgpack.Decoder(_Registration).decode
_address = TypeAdapter[str](P2pAddress).validate_python


class Registrations:
    """Owns its socket and task from `start` to `close`."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._entries: dict[tuple[str, str], tuple[str, float]] = {}
        self.refused = Counter(
            "kvroute_pd_registrations_refused",
            "Registrations of P2pNccl engines that do not count: undecodable, address or full.",
            ("reason",),
        )
        self.port: int | None = None
        """Where it listens."""
        self._context: zmq.asyncio.Context | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> None:
        """Port 0 takes a free one. Raises OSError."""
        self._context = zmq.asyncio.Context()
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.IPV6, int(":" in host))
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        bare = host.strip("[]")
        try:
            socket.bind(f"tcp://[{bare}]:{port}" if ":" in bare else f"tcp://{bare}:{port}")
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, f"pd.register_port {port} on {host}: {error.strerror}") from error
        self.port = int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._task = asyncio.create_task(self._read(socket))

    def close(self) -> None:
        """Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
        context, self._context = self._context, None
        if context is not None:
            context.destroy(linger=0)
        self._entries.clear()
        self.port = None

    def address(self, kind: Kind, http_address: str) -> str | None:
        """host:port of the ZMQ socket of the engine at that HTTP address; None when it is not heard of."""
        entry = self._entries.get((kind, http_address))
        return entry[0] if entry is not None and entry[1] > self._clock() else None

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            self.take(frames[-1])

    def take(self, message: bytes) -> None:
        """One registration."""
        try:
            news = _decode(message)
        except msgspec.MsgspecError as error:
            self._refuse("undecodable", str(error))
            return
        key, now_s = (news.type, news.http_address), self._clock()
        try:
            _address(news.http_address)
            address = _address(news.zmq_address)
        except ValidationError as error:
            self._refuse("address", error.errors()[0]["msg"])
            return
        if key not in self._entries and len(self._entries) >= MAX_ENTRIES:
            self._entries = {key: entry for key, entry in self._entries.items() if entry[1] > now_s}
            if len(self._entries) >= MAX_ENTRIES:
                self._refuse("full", f"{MAX_ENTRIES} engines are registered")
                return
        if key not in self._entries:
            log.info("p2p engine registered", kind=news.type, http=news.http_address, zmq=address)
        self._entries[key] = address, now_s + LIFETIME_S

    def _refuse(self, reason: str, fault: str) -> None:
        if not self.refused.value(reason):
            log.warning("p2p registration refused", reason=reason, fault=fault)
        self.refused.add(reason)
