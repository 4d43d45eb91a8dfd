"""Answering one request: waiting for its tokens, keeping its pace, and breaking off where a fault says so.

No tasks: an answer moves when tokens arrive, when the transport takes bytes again or when a timer fires.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvroute.loadtests.mock_engine.connection import Connection
from kvroute.loadtests.mock_engine.dialects.base import Call, Script
from kvroute.loadtests.mock_engine.faults import Faults
from kvroute.loadtests.mock_engine.journal import Entry
from kvroute.loadtests.mock_engine.kv_hints import NO_HINTS
from kvroute.loadtests.mock_engine.pd.base import Fetch
from kvroute.loadtests.mock_engine.pd.fields import NO_PD
from kvroute.loadtests.mock_engine.wire import (
    JSON,
    ApiError,
    Header,
    Request,
    compressed,
    head,
    json_response,
    response,
)

if TYPE_CHECKING:
    from kvroute.loadtests.mock_engine.engine import MockEngine

GARBAGE = b'\x00\xff<html>{"kv_transfer_params": \x80' * 4


class Answer:
    """What all answers share: one connection, one journal entry, at most one timer, one ending."""

    def __init__(
        self, engine: MockEngine, connection: Connection, request: Request, entry: Entry, faults: Faults
    ) -> None:
        self.engine = engine
        self.connection = connection
        self.request = request
        self.entry = entry
        self.faults = faults
        self.ended = False
        self._timer: asyncio.TimerHandle | None = None
        engine.live.add(self)
        connection.answer_with(self)

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Run `action` later, unless the answer ends first."""

        def fire() -> None:
            self._timer = None
            action()

        self._timer = asyncio.get_running_loop().call_later(delay_s, fire)

    def resume(self) -> None:
        """The transport takes bytes again."""

    def lost(self) -> None:
        """The client is gone: whatever runs for it stops now."""
        self.end("aborted")

    def end(self, outcome: str) -> None:
        """Stop, free what is held and note the outcome; idempotent."""
        if self.ended:
            return
        self.ended = True
        if self._timer is not None:
            self._timer.cancel()
        self.engine.journal.end(self.entry, outcome)
        self.engine.ended(self, outcome)

    def finish(self, keep_alive: bool = True) -> None:
        """The answer is complete."""
        self.end("finished")
        self.connection.done(keep_alive and not self.faults.close)

    def refuse(self, error: ApiError, headers: list[Header] | None = None) -> None:
        """An error object in place of an answer."""
        self.entry.status = error.status
        self.end("rejected")
        self.connection.write(response(error.status, error.body, headers=self.headers(headers)))
        self.connection.done(not self.faults.close)

    def headers(self, more: list[Header] | None = None) -> list[Header]:
        """Headers every response of this engine bears."""
        headers = [(b"x-mock-engine", b"%d" % self.engine.index)]
        if self.entry.id.isascii() and self.entry.id.isprintable():
            headers.append((b"x-request-id", self.entry.id.encode()))
        if self.faults.close:
            headers.append((b"connection", b"close"))
        return headers + (more or [])

    def break_off(self, how: Callable[[], None]) -> None:
        """A fault ends the connection."""
        self.end("broken")
        how()


class Misbehaviour(Answer):
    """A request that is never understood: a hang, a reset, a status."""

    def start(self) -> None:
        """Act once `ttft` has passed."""
        if self.faults.hang:
            return
        if self.faults.ttft:
            self.after(self.faults.ttft, self._act)
        else:
            self._act()

    def _act(self) -> None:
        faults = self.faults
        if faults.die_before:
            self.break_off(self.connection.reset)
        elif faults.status:
            retry = [] if faults.retry_after is None else [(b"retry-after", b"%g" % faults.retry_after)]
            self.refuse(ApiError(faults.status, "The mock engine was told to fail.", "MockFault"), retry)
        elif faults.no_content:
            self.entry.status = 204
            self.connection.write(head(204, self.headers()))
            self.finish()
        else:
            self.entry.status = 200
            error = ApiError(500, "The mock engine was told to fail.", "InternalServerError").body
            self.connection.write(response(200, error, headers=self.headers()))
            self.finish()


class TokenAnswer(Answer):
    """An answer made of generated tokens."""

    def __init__(
        self,
        engine: MockEngine,
        connection: Connection,
        request: Request,
        entry: Entry,
        faults: Faults,
        call: Call,
        script: Script,
    ) -> None:
        super().__init__(engine, connection, request, entry, faults)
        self.call = call
        self.hints = NO_HINTS
        self.pd = NO_PD
        self.fetches: list[Fetch] = []
        """KV that it gets from other engines, or that they get here while it waits, by prompt."""
        self.is_blocked = False
        """Nothing is sent before `unblock`."""
        self.script = script
        self.total = call.output_tokens
        self.ready = 0
        """Tokens generated."""
        self.sent = 0
        """Tokens on the wire."""
        self.arrived_s = engine.now_s()
        self.started_s: float | None = None
        self.token_s: float | None = None
        self._order: list[int] | None = [] if len(call.parts) > 1 else None
        self._part_sent = [0] * len(call.parts)
        self._head_due = not faults.ttft
        entry.status = 200

    def start(self) -> None:
        """Begin; tokens may be there already."""
        if self.faults.ttft:
            self.after(self.faults.ttft, self._head_time)
        self.advance()

    def _head_time(self) -> None:
        self._head_due = True
        self.advance()

    def on_tokens(self, part: int, count: int) -> None:
        """`count` more tokens of a part were generated."""
        self.ready += count
        self.engine.metrics.tokens(self, count)
        if self._order is not None:
            self._order.extend([part] * count)
        self.advance()

    def unblock(self) -> None:
        """Go on."""
        self.is_blocked = False
        self.advance()

    def fail(self, error: ApiError) -> None:
        """Its tokens will not come."""
        self.refuse(error)

    def resume(self) -> None:
        self.advance()

    def advance(self) -> None:
        """Send whatever may go now."""
        raise NotImplementedError

    def next_token(self) -> bytes:
        """The event of the next token, the opening with the first."""
        part = 0 if self._order is None else self._order[self.sent]
        index = self._part_sent[part]
        self._part_sent[part] = index + 1
        opening = b"" if self.sent else self.script.opening()
        self.sent += 1
        return opening + self.script.token(part, index)


class PlainAnswer(TokenAnswer):
    """One JSON object, when all tokens are there and its time has come."""

    _waited = False

    def advance(self) -> None:
        if self.ended or self.is_blocked or not self._head_due or self._timer is not None:
            return
        if self.ready < self.total:
            return
        if self.faults.gap and not self._waited:
            self._waited = True
            self.after(self.faults.gap * (self.total - 1), self.advance)
            return
        if not self.sent:
            self._write()

    def _write(self) -> None:
        faults = self.faults
        body = GARBAGE if faults.garbage_body else self.script.plain()
        headers = self.headers([(b"content-type", JSON)])
        if faults.gzip:
            body = compressed(body)
            headers.append((b"content-encoding", b"gzip"))
        if not faults.no_length:
            headers.append((b"content-length", b"%d" % len(body)))
        self.sent = self.entry.events = self.total
        cut = next((at for at in (faults.die_at, faults.close_at, faults.hang_at) if at is not None), None)
        if cut is not None:
            body = body[: len(body) // 2] if cut else b""
        self.connection.write(head(200, headers) + body)
        if faults.die_at is not None:
            self.break_off(self.connection.reset)
        elif faults.close_at is not None:
            self.break_off(self.connection.close)
        elif faults.hang_at is None:
            self.finish(not faults.no_length)


class DelayedReply:
    """A reply of another route, some seconds late."""

    def __init__(self, connection: Connection, data: bytes, delay_s: float) -> None:
        connection.answer_with(self)
        self._timer = asyncio.get_running_loop().call_later(delay_s, connection.reply, data)

    def resume(self) -> None:
        """Nothing waits for the transport."""

    def lost(self) -> None:
        """The client did not wait."""
        self._timer.cancel()


def unauthorized() -> bytes:
    """What vLLM says without a key."""
    return json_response({"error": "Unauthorized"}, 401)
