"""The gateway's end of one connection to a remote conductor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import cast

from kvroute.conductor import wire

FRAME_GOAL_BYTES = 2**16
"""A batch goes out as several frames beyond it: the conductor is at work on the first while others arrive."""
WRITE_BUFFER_BYTES = 4 * 2**20
"""A burst of lookups fits; beyond it the conductor is taken to read nothing."""


class Link(asyncio.Protocol):
    """Frames in and out; the first answer must be the conductor's hello."""

    def __init__(self, answered: Callable[[Sequence[wire.Answer]], None]) -> None:
        loop = asyncio.get_running_loop()
        self.greeted: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[Exception | None] = loop.create_future()
        self.paused = False
        self.misbehaved = False
        self._answered = answered
        self._reader = wire.FrameReader()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none of its subclasses
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._transport.write(wire.frame([wire.Hello(wire.PROTOCOL)]))

    def send(self, messages: Sequence[wire.Message]) -> tuple[int, int]:
        """Write them as one batch, or as several where one would be large.

        Returns how many frames that made, and how many messages were left out, as no frame could hold them.
        """
        assert self._transport is not None
        left_out = 0
        frames = []
        for batch in _batches(messages):
            try:
                frames.append(wire.frame(batch))
            except wire.WireError:  # one of them is larger than it looked
                for message in batch:
                    try:
                        frames.append(wire.frame([message]))
                    except wire.WireError:
                        left_out += 1
        for frame in frames:
            self._transport.write(frame)
        return len(frames), left_out

    def data_received(self, data: bytes) -> None:
        if self.closed.done():
            return
        try:
            for body in self._reader.feed(data):
                answers = wire.decode(wire.answers_decoder, body)
                if not self.greeted.done():
                    answers = _check_hello(answers)
                    self.greeted.set_result(None)
                if answers:
                    self._answered(answers)
        except wire.WireError as error:
            self.misbehaved = True
            self.abort(error)

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False

    def connection_lost(self, error: Exception | None) -> None:
        self._end(error or ConnectionResetError("the conductor closed the connection"))

    def abort(self, error: Exception | None = None) -> None:
        """Close at once; idempotent."""
        if self._transport is not None:
            self._transport.abort()
        self._end(error)

    def _end(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(error)
        if not self.greeted.done():
            if error is None:
                self.greeted.cancel()
            else:
                self.greeted.set_exception(error)
                self.greeted.exception()  # whoever waits for it still gets it; nobody may


def _check_hello(answers: list[wire.Answer]) -> list[wire.Answer]:
    """What follows the hello; raises `WireError` when there is none, or of another protocol."""
    if not answers or not isinstance(answers[0], wire.Hello):
        raise wire.WireError("protocol", "the conductor's first message is no hello")
    if answers[0].protocol != wire.PROTOCOL:
        raise wire.WireError(
            "protocol", f"the conductor speaks protocol {answers[0].protocol}, this gateway {wire.PROTOCOL}"
        )
    return answers[1:]


def _batches(messages: Sequence[wire.Message]) -> list[list[wire.Message]]:
    """In order, cut where a batch passes `FRAME_GOAL_BYTES` or has all the messages a frame may."""
    batches: list[list[wire.Message]] = [[]]
    size = 0
    for message in messages:
        part = _key_bytes(message)
        full = len(batches[-1]) == wire.MAX_MESSAGES or size + part > FRAME_GOAL_BYTES
        if batches[-1] and full:
            batches.append([])
            size = 0
        batches[-1].append(message)
        size += part
    return batches


def _key_bytes(message: wire.Message) -> int:
    if isinstance(message, wire.Match):
        return sum(len(keys.packed) for keys in message.keys) + sum(map(len, message.worker_ids))
    return len(message.keys.packed) if isinstance(message, wire.Predict) else 256
