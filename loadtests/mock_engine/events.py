"""KV cache events over ZMQ, in the shape of vLLM 0.32: a PUB socket, and a ROUTER that replays."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import groupby
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
import zmq.asyncio

from kvroute.loadtests.mock_engine.disturbance import Disturbance, Frames, shaped
from kvroute.loadtests.mock_engine.faults import CLEAN, Faults
from kvroute.loadtests.mock_engine.steps import Outcome, Stored

if TYPE_CHECKING:
    from kvroute.conductor.tiers.stack import TierChange
    from kvroute.loadtests.mock_engine.engine import MockEngine

_END_OF_REPLAY = b"\xff" * 8
_HIGH_WATER = 100_000


class EventPublisher:
    """Of one engine. Ports are chosen at the first start and kept over restarts; seq starts again at 0."""

    def __init__(
        self,
        host: str,
        topic: str,
        replay_batches: int,
        seed: int = 0,
        faults: Callable[[], Faults] = lambda: CLEAN,
    ) -> None:
        self.topic = topic
        self.seq = 0
        """Of the next batch."""
        self.cleared = False
        """The cache was emptied; the next batch says so first."""
        self._replay_batches = replay_batches
        self._buffer: deque[tuple[bytes, bytes]] = deque(maxlen=replay_batches)
        self._bind_host = f"[{host}]" if ":" in host else host
        self._ports = [0, 0]
        self._encode = msgspec.msgpack.Encoder().encode
        self._pub: zmq.Socket[bytes] | None = None
        self._router: zmq.asyncio.Socket | None = None
        self._replayer: asyncio.Task[None] | None = None
        self._seed = seed
        self._faults = faults
        self._disturbance = Disturbance(seed)

    def source(self) -> dict[str, Any]:
        """What GET /kv_event_sources says of it. A wildcard means this node's address."""
        host = "*" if self._bind_host in ("0.0.0.0", "[::]") else self._bind_host
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://{host}:{self._ports[0]}",
            "replay_endpoint": f"tcp://{host}:{self._ports[1]}",
            "buffer_steps": self._replay_batches,
            "hwm": _HIGH_WATER,
            "max_queue_size": _HIGH_WATER,
            "topic": self.topic,
        }

    async def start(self) -> None:
        """Bind both sockets."""
        self.seq = 0
        self._disturbance = Disturbance(self._seed)
        self._buffer.clear()
        self._pub = zmq.Context.instance().socket(zmq.PUB)
        self._router = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        sockets: list[zmq.Socket[Any]] = [self._pub, self._router]
        for index, socket in enumerate(sockets):
            socket.set_hwm(_HIGH_WATER)
            socket.linger = 0
            socket.ipv6 = self._bind_host.startswith("[")
            await self._bind(socket, index)
        self._replayer = asyncio.get_running_loop().create_task(self._replay())

    async def stop(self) -> None:
        """Close both sockets; idempotent."""
        replayer, self._replayer = self._replayer, None
        if replayer is not None:
            replayer.cancel()
            with suppress(asyncio.CancelledError):
                await replayer
        for socket in (self._pub, self._router):
            if socket is not None:
                socket.close(linger=0)
        self._pub = self._router = None

    def publish(self, engine: MockEngine, outcome: Outcome, one_by_one: bool = False) -> None:
        """Send one batch, or one per stored block as decoding fills them."""
        events: list[dict[str, Any]] = []
        if self.cleared:
            self.cleared = False
            events.append({"type": "AllBlocksCleared"})
        events += _in_lower_tiers(engine, outcome.demoted)
        events += [
            {"type": "BlockRemoved", "block_hashes": [key], "medium": "GPU", "group_idx": 0}
            for key in outcome.removed
        ]
        for stored in outcome.stored:
            if not one_by_one:
                events.append(_stored(engine, stored))
                continue
            for index in range(stored.start, stored.stop):
                events.append(_stored(engine, Stored(stored.sequence, index, index + 1)))
                self._send(events)
                events = []
        events += _in_lower_tiers(engine, outcome.offloaded)
        if events:
            self._send(events)

    def _send(self, events: list[dict[str, Any]]) -> None:
        if self._pub is None:
            return
        seq = self.seq.to_bytes(8, "big")
        self.seq += 1
        faults = self._faults()
        payload = self._encode([time.time(), shaped(events, faults), 0])
        self._buffer.append((seq, payload))
        for frames in self._disturbance.pass_on((self.topic.encode(), seq, payload), faults):
            if faults.event_delay:
                asyncio.get_running_loop().call_later(faults.event_delay, self._send_frames, frames)
            else:
                self._send_frames(frames)

    def _send_frames(self, frames: Frames) -> None:
        if self._pub is not None:
            with suppress(zmq.Again):
                self._pub.send_multipart(frames, zmq.NOBLOCK)

    async def _bind(self, socket: zmq.Socket[Any], index: int) -> None:
        # ZMQ closes a socket in the background: after a restart the port may be free only a little later.
        for attempt in range(200):
            try:
                socket.bind(f"tcp://{self._bind_host}:{self._ports[index]}")
                break
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE or attempt == 199:
                    raise
                await asyncio.sleep(0.01)
        endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self._ports[index] = int(endpoint.rstrip(b"\0").rpartition(b":")[2])

    async def _replay(self) -> None:
        router = self._router
        assert router is not None
        while True:
            frames = await router.recv_multipart()
            if len(frames) != 3 or self._faults().no_replay:
                continue
            client, _, first = frames
            for seq, payload in list(self._buffer):
                if seq >= first:
                    await router.send_multipart((client, b"", self.topic.encode(), seq, payload))
            await router.send_multipart((client, b"", b"", _END_OF_REPLAY, b""))


def _in_lower_tiers(engine: MockEngine, changes: list[TierChange]) -> list[dict[str, Any]]:
    """As vLLM's offloading tells it: by hash alone, to be resolved by what the GPU's events said."""
    events = []
    for (medium, stored), run in groupby(changes, lambda change: (change.medium, change.stored)):
        hashes = [change.key for change in run]
        event = {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium}
        if stored:
            event |= {
                "type": "BlockStored",
                "parent_block_hash": None,
                "token_ids": [],
                "block_size": engine.options.block_size_tokens,
                "lora_id": None,
                "lora_name": None,
            }
        events.append(event)
    return events


def _stored(engine: MockEngine, stored: Stored) -> dict[str, Any]:
    sequence, size = stored.sequence, engine.options.block_size_tokens
    answer, part = sequence.payload
    call, tokens = answer.call, answer.call.parts[part].all_tokens
    lora = call.lora
    extras = [
        list(filter(None, (lora, call.salt if i == 0 else None))) for i in range(stored.start, stored.stop)
    ]
    return {
        "type": "BlockStored",
        "block_hashes": list(sequence.keys[stored.start : stored.stop]),
        "parent_block_hash": sequence.keys[stored.start - 1] if stored.start else None,
        "token_ids": tokens[stored.start * size : stored.stop * size].tolist(),
        "block_size": size,
        "lora_id": None if lora is None else engine.adapter_id(lora),
        "medium": "GPU",
        "lora_name": lora,
        "extra_keys": [extra or None for extra in extras],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
