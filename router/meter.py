"""Reads a response on the side, as it is relayed: times, token usage, and errors inside the stream."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from kvroute.router.metrics import Series

TAIL_BYTES = 2 * 1024
_KEEP_BYTES = 2 * TAIL_BYTES
_IN_BAND_ERROR = re.compile(
    rb'(?:^|\n)(?:event: ?error|data: ?\{"(?:error"|object": ?"error|type": ?"error))'
)
# A quote inside a JSON string is escaped, so an unescaped key is a key. One level of nesting is enough for
# the details objects. `"usage": null` does not match: it comes in streams before the last chunk.
_USAGE = re.compile(rb'"(?:usage|meta_info)": ?(\{(?:[^{}]++|\{[^{}]*+\})*+\})')


class Usage(Struct, frozen=True, gc=False):
    """Token counts as the engine reports them; None where it does not."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


NO_USAGE = Usage()


class Meter:
    """Fed with every read of a body; keeps no more than the last few KiB.

    Usage stands at the end of a response, streamed or not, so only the tail is looked at, once, when all
    is relayed: no event is parsed on the way, and a body without any blank line costs nothing more.
    """

    __slots__ = ("_itl", "_kept", "_kept_bytes", "body_bytes", "first_s", "last_s", "reads", "streams")

    def __init__(self, itl: Series | None) -> None:
        """`itl` takes the time between reads of a body that is a stream of server-sent events."""
        self._itl = itl
        self.streams = itl is not None
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self.body_bytes = 0
        self.reads = 0
        self.first_s: float | None = None
        self.last_s = 0.0

    def feed(self, data: bytes, now_s: float) -> None:
        """Count one read at `now_s`, on the clock of the caller."""
        if self.first_s is None:
            self.first_s = now_s
        elif self._itl is not None:
            self._itl.observe(now_s - self.last_s)
        self.last_s = now_s
        self.reads += 1
        size = len(data)
        self.body_bytes += size
        self._kept.append(data)
        self._kept_bytes += size
        if self._kept_bytes > _KEEP_BYTES:
            tail = self.tail()
            self._kept = [tail]
            self._kept_bytes = len(tail)

    def itl_s(self, output_tokens: int | None) -> float | None:
        """Mean time between tokens of a stream; where the engine did not count them, between reads."""
        gaps = (self.reads if output_tokens is None else output_tokens) - 1
        if self.first_s is None or not self.streams or gaps < 1:
            return None
        return (self.last_s - self.first_s) / gaps

    def tail(self) -> bytes:
        """The last bytes of the body, at most TAIL_BYTES."""
        if len(self._kept) == 1:
            return self._kept[0][-TAIL_BYTES:]
        size = 0
        pieces: list[bytes] = []
        for piece in reversed(self._kept):
            pieces.append(piece[-TAIL_BYTES:])
            size += len(pieces[-1])
            if size >= TAIL_BYTES:
                break
        return b"".join(reversed(pieces))[-TAIL_BYTES:]

    @property
    def at_event_border(self) -> bool:
        """True when a further server-sent event may follow what was relayed so far."""
        return self.tail()[-4:].endswith((b"\n\n", b"\r\r", b"\r\n\r\n"))

    def in_band_error(self) -> bool:
        """True when the end of a stream holds an error event."""
        tail = self.tail()
        return b"error" in tail and _IN_BAND_ERROR.search(tail) is not None

    def usage(self) -> Usage:
        """Token counts from the last `usage` object (OpenAI, Anthropic) or SGLang's `meta_info`."""
        tail = self.tail()
        start = max(tail.rfind(b'"usage"'), tail.rfind(b'"meta_info"'))
        found = _USAGE.search(tail, start) if start >= 0 else None
        if found is None:  # none, or the last one is null or cut: an earlier one may still count
            found = _last_match(tail)
        try:
            return NO_USAGE if found is None else _decode_usage(found[1]).usage()
        except msgspec.DecodeError:
            return NO_USAGE


def _last_match(tail: bytes) -> re.Match[bytes] | None:
    matches = list(_USAGE.finditer(tail))
    return matches[-1] if matches else None


Count = Annotated[int, Meta(ge=0)]


class _Details(Struct):
    cached_tokens: Count | None = None


class _WireUsage(Struct):
    """The names of OpenAI's chat and responses APIs, of Anthropic's, and of SGLang's `meta_info`."""

    prompt_tokens: Count | None = None
    input_tokens: Count | None = None
    completion_tokens: Count | None = None
    output_tokens: Count | None = None
    cached_tokens: Count | None = None
    cache_read_input_tokens: Count | None = None
    cache_creation_input_tokens: Count | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None

    def usage(self) -> Usage:
        details = self.prompt_tokens_details or self.input_tokens_details
        cached = details.cached_tokens if details is not None else None
        if cached is None:
            cached = self.cached_tokens if self.cached_tokens is not None else self.cache_read_input_tokens
        return Usage(
            self.prompt_tokens if self.prompt_tokens is not None else self._all_input_tokens(),
            self.completion_tokens if self.completion_tokens is not None else self.output_tokens,
            cached,
        )

    def _all_input_tokens(self) -> int | None:
        """Anthropic's count leaves out what was read from a cache or written to one."""
        if self.input_tokens is None:
            return None
        return (
            self.input_tokens + (self.cache_read_input_tokens or 0) + (self.cache_creation_input_tokens or 0)
        )


def usage_in(answer: Mapping[str, Any]) -> Usage:
    """Of an answer that was read whole."""
    try:
        return msgspec.convert(answer.get("usage"), _WireUsage).usage()
    except msgspec.ValidationError:
        return NO_USAGE


_decode_usage = msgspec.json.Decoder(_WireUsage).decode
