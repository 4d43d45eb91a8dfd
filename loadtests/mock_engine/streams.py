"""Answering with server-sent events: pace, framing, and where a fault breaks the stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvroute.loadtests.mock_engine.answers import GARBAGE, TokenAnswer
from kvroute.loadtests.mock_engine.connection import Connection
from kvroute.loadtests.mock_engine.dialects.base import Call, Script
from kvroute.loadtests.mock_engine.faults import Faults
from kvroute.loadtests.mock_engine.journal import Entry
from kvroute.loadtests.mock_engine.tokens import TOKEN_BYTES
from kvroute.loadtests.mock_engine.wire import ApiError, Framing, Request, head

if TYPE_CHECKING:
    from kvroute.loadtests.mock_engine.engine import MockEngine

_WRITE_BYTES = 32 * 1024
_RUN_TOKENS = 128
_FLOOD = b"x" * _WRITE_BYTES


class StreamAnswer(TokenAnswer):
    """Server-sent events, one chunk per token."""

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
        super().__init__(engine, connection, request, entry, faults, call, script)
        self._framing = Framing(faults, chunked=not (faults.no_length or request.http_1_0))
        self._pending = b""
        """Head and events held back for one write."""
        self._head_sent = False
        self._flood_left = faults.flood_bytes
        self._ran = False
        self._uniform: tuple[bytes, bytes] | None = None
        if self._framing.plain and not faults.join and len(call.parts) == 1:
            self._uniform = self._framed(script.uniform())

    def advance(self) -> None:
        if self.ended or self.is_blocked or not self._head_due:
            return
        if self.connection.paused or self._timer is not None:
            return
        if (self.faults.join or self.faults.garbage_body) and self.ready < self.total:
            return
        if not self._head_sent:
            self._send_head()
        if self.faults.garbage_body:
            self._pending += self._framing.frame(GARBAGE)
            self._complete()
        elif self.faults.scripted:
            self._advance_scripted()
        else:
            self._advance_freely()

    def fail(self, error: ApiError) -> None:
        if not self._head_sent:
            self.refuse(error)
            return
        self._pending += self._framing.frame(self.script.error(error.message))
        self._complete("rejected")

    def _framed(self, around: tuple[bytes, bytes] | None) -> tuple[bytes, bytes] | None:
        """What stands around each word on the wire, given what does in an event."""
        if around is None:
            return None
        before, after = around
        return b"%x\r\n%b" % (len(before) + TOKEN_BYTES + len(after), before), after + b"\r\n"

    def _send_head(self) -> None:
        # As the real engine does, the head goes out before the first token is there. When one is, they
        # share a write.
        self._head_sent = True
        self._pending = head(200, self.headers(self._framing.headers()))
        if not self.ready or self.faults.scripted:
            self._flush()

    def _flush(self) -> None:
        if self._pending:
            self.connection.write(self._pending)
            self._pending = b""

    def _advance_freely(self) -> None:
        """As many tokens as are ready and the transport takes."""
        frame, one_chunk = self._framing.frame, self.faults.join
        while self.sent < self.ready and not self.connection.paused:
            events: list[bytes] = []
            size = 0
            while self.sent < self.ready and (size < _WRITE_BYTES or one_chunk):
                event = self._run() or self.next_token()
                size += len(event)
                events.append(event if one_chunk or self._ran else frame(event))
            if self.sent == self.total:
                closing = self.script.closing()
                events.append(closing if one_chunk else frame(closing))
            self.entry.events = self.sent
            data = b"".join(events)
            self._pending += frame(data) if one_chunk else data
            if self.sent == self.total:
                self._complete()
                return
            self._flush()

    def _run(self) -> bytes:
        """Framed events that differ in their word alone, many at a time; nothing where there are none.

        The first and the last event of an answer carry more than a word.
        """
        count = min(self.ready, self.total - 1, self.sent + _RUN_TOKENS) - self.sent
        self._ran = count > 0 < self.sent and self._uniform is not None
        if not self._ran or self._uniform is None:
            return b""
        data = self.script.words.run(self.call.parts[0].start + self.sent, count, *self._uniform)
        self.sent += count
        self._part_sent[0] += count
        return data

    def _advance_scripted(self) -> None:
        """One event at a time, looking at the faults after each."""
        while not self.ended and not self.connection.paused:
            if self._breaks():
                return
            if self._flood_left:
                self._flood()
                continue
            if self.sent >= self.ready:
                return
            self._pending += self._framing.frame(self.next_token())
            self.entry.events = self.sent
            if self.sent == self.total and not self._cut_here():
                self._pending += self._framing.frame(self.script.closing())
                self._complete()
                return
            if not self.faults.join:
                self._flush()
            if self.faults.gap and not self._cut_here():
                self.after(self.faults.gap, self.advance)
                return

    def _cut_here(self) -> bool:
        faults, sent = self.faults, self.sent
        return sent in (
            faults.die_at,
            faults.close_at,
            faults.hang_at,
            faults.corrupt_at,
            faults.error_event_at,
        )

    def _breaks(self) -> bool:
        """Do what a fault wants after this many events; True when the stream goes no further."""
        if not self._cut_here():
            return False
        faults, sent = self.faults, self.sent
        if sent == faults.error_event_at:
            self._pending += self._framing.frame(self.script.error("The mock engine was told to fail."))
            self._complete("broken")
            return True
        self._flush()
        if sent == faults.die_at:
            self.break_off(self.connection.reset)
        elif sent == faults.close_at:
            self.break_off(self.connection.close)
        elif sent == faults.corrupt_at:
            self.connection.write(b"zz;not-a-size\r\n")
            self.break_off(self.connection.close)
        return True

    def _flood(self) -> None:
        """Bytes of one endless event, as fast as the client reads, then the end of the stream."""
        size = min(self._flood_left, _WRITE_BYTES)
        self._flood_left -= size
        self._flush()
        self.connection.write(self._framing.frame(_FLOOD[:size]))
        if not self._flood_left:
            self._pending = self._framing.frame(b"\n\ndata: [DONE]\n\n")
            self._complete()

    def _complete(self, outcome: str = "finished") -> None:
        self._pending += self._framing.end()
        self._flush()
        self.end(outcome)
        self.connection.done(self._framing.chunked and not self.faults.close)
