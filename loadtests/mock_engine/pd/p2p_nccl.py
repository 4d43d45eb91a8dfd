"""The P2pNcclConnector of vLLM before 0.32, one after the other: the request's id says where the KV goes.

The prefill engine pushes to the decode engine's store and keeps nothing. There the KV waits for its request,
and a request waits for its KV, both without a limit. Every engine tells a ROUTER its addresses, again and
again; the address of its own ZMQ socket is the HTTP one.
"""

from __future__ import annotations

import asyncio
import re
from array import array
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from kvroute.loadtests.mock_engine.pd.base import EngineDies, Fetch, PdSide
from kvroute.loadtests.mock_engine.pd.fields import PdFields
from kvroute.loadtests.mock_engine.sequences import Sequence
from kvroute.types import Role

if TYPE_CHECKING:
    from kvroute.loadtests.mock_engine.answers import TokenAnswer
    from kvroute.loadtests.mock_engine.dialects.base import Call
    from kvroute.loadtests.mock_engine.engine import MockEngine

_TO = {
    Role.PREFILL: re.compile(r"___decode_addr_(.*):(\d+)_"),
    Role.DECODE: re.compile(r"___prefill_addr_(.*):(\d+)___"),
}
_PING_S = 3.0

Key = tuple[str, int]


class P2pNccl(PdSide):
    """Of the prefill or the decode role: such an engine takes nothing whole."""

    vllm_name = "P2pNcclConnector"

    def __init__(self, engine: MockEngine) -> None:
        super().__init__(engine)
        self._computing: dict[Sequence, Key] = {}
        self._arrived: OrderedDict[Key, tuple[array[int], bool]] = OrderedDict()
        self._awaited: dict[Key, Fetch] = {}
        self._socket: zmq.Socket[bytes] | None = None
        self._ping: asyncio.TimerHandle | None = None

    # Registration.

    def start(self) -> None:
        address = self.engine.options.register_at
        if address and self.role is not Role.BOTH:
            self._socket = zmq.Context.instance().socket(zmq.DEALER)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt_string(zmq.IDENTITY, self._address)
            self._socket.connect(address)
            self._register()

    def _register(self) -> None:
        kind = "P" if self.role is Role.PREFILL else "D"
        news = {"type": kind, "http_address": self._address, "zmq_address": self._address}
        if self._socket is not None:
            with suppress(zmq.Again):
                self._socket.send(msgspec.msgpack.encode(news), zmq.NOBLOCK)
            self._ping = asyncio.get_running_loop().call_later(_PING_S, self._register)

    def stop(self) -> None:
        super().stop()
        if self._ping is not None:
            self._ping.cancel()
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.close(linger=0)

    @property
    def _address(self) -> str:
        return f"{self.engine.host}:{self.engine.port}"

    # Requests.

    def admit(self, call: Call, fields: PdFields) -> None:
        pattern = _TO.get(self.role)
        if pattern is not None and pattern.search(call.id) is None:
            raise EngineDies("a request id without an address")

    def queue(self, answer: TokenAnswer, index: int, sequence: Sequence) -> bool:
        key = answer.call.id, index
        if self.role is Role.PREFILL:
            sequence.hold = True
            self._computing[sequence] = key
        elif self.role is Role.DECODE:
            source = self._other(answer.call.id)
            if source is not None and key in source._computing.values():
                self.books.note("order_violations", answer.entry.id)
            fetch = Fetch(answer, index, key)
            answer.fetches.append(fetch)
            self.expect(sequence, fetch)
        return True

    def prefilled(self, sequence: Sequence) -> None:
        answer, index = sequence.payload
        part, key = answer.call.parts[index], self._computing.pop(sequence)
        self.engine.driver.let_go(sequence)
        target = self._other(answer.call.id)
        if target is not None:
            seconds = self.move_s(len(part.tokens)) + answer.faults.handoff_delay
            target.push(key, part.tokens, part.is_wrong, seconds)

    def push(self, key: Key, tokens: array[int], is_wrong: bool, seconds: float) -> None:
        """A prefill engine sends a prompt's KV."""
        if seconds > 0:
            asyncio.get_running_loop().call_later(seconds, self.push, key, tokens, is_wrong, 0.0)
        elif self.is_up:
            if key in self._arrived:
                self.books.note("repeated", key[0])
            self._arrived[key] = tokens, is_wrong
            if len(self._arrived) > self.books.max_ids:
                self._arrived.popitem(last=False)
            if key in self._awaited:
                self._take(self._awaited[key])

    def fetch(self, sequence: Sequence) -> None:
        fetch = self._fetches[sequence]
        self._awaited[fetch.id] = fetch
        if fetch.id in self._arrived:
            self.after(fetch, fetch.answer.faults.handoff_delay, self._take)

    def forgone(self, fetch: Fetch, outcome: str) -> None:
        if self._awaited.get(fetch.id) is fetch:
            del self._awaited[fetch.id]
        self._arrived.pop(fetch.id, None)

    def ended(self, answer: TokenAnswer, outcome: str) -> None:
        super().ended(answer, outcome)
        for part in answer.call.parts:
            if part.sequence is not None:
                self._computing.pop(part.sequence, None)

    def parked(self) -> list[Any]:
        return [id for id, _ in self._arrived]

    def _take(self, fetch: Fetch) -> None:
        tokens, is_wrong = self._arrived.pop(fetch.id)
        del self._awaited[fetch.id]
        wrong = "poisoned" if is_wrong else None
        self.received(fetch, wrong if tokens == fetch.part.tokens else "foreign")

    def _other(self, id: str) -> P2pNccl | None:
        """The engine that a request's id names."""
        match = _TO[self.role].search(id)
        side = None if match is None else self.peer(int(match[2]))
        return side if isinstance(side, P2pNccl) else None
