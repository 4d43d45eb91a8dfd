"""Reads a response on the side, as it is relayed: times, token usage, and errors inside the stream."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import orjson

from kvroute.router.metrics import Series

TAIL_BYTES = 8 * 1024
_KEEP_BYTES = 4 * TAIL_BYTES
_IN_BAND_ERROR = re.compile(
    rb'(?:^|\n)(?:event: ?error|data: ?\{"(?:error"|object": ?"error|type": ?"error))'
)
# A quote inside a JSON string is escaped, so an unescaped key is a key. One level of nesting is enough for
# the details objects. `"usage": null` does not match: it comes in streams before the last chunk.
_USAGE = re.compile(rb'"(?:usage|meta_info)": ?(\{(?:[^{}]++|\{[^{}]*+\})*+\})')


@dataclass(frozen=True, slots=True)
class Usage:
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

    __slots__ = ("_itl", "_kept", "_kept_bytes", "body_bytes", "first_s", "last_s")

    def __init__(self, itl: Series | None) -> None:
        self._itl = itl
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self.body_bytes = 0
        self.first_s: float | None = None
        self.last_s = 0.0

    def feed(self, data: bytes, now_s: float) -> None:
        """Count one read at `now_s`, on the clock of the caller."""
        if self.first_s is None:
            self.first_s = now_s
        elif self._itl is not None:
            self._itl.observe(now_s - self.last_s)
        self.last_s = now_s
        size = len(data)
        self.body_bytes += size
        self._kept.append(data)
        self._kept_bytes += size
        if self._kept_bytes > _KEEP_BYTES:
            tail = self.tail()
            self._kept = [tail]
            self._kept_bytes = len(tail)

    def tail(self) -> bytes:
        """The last bytes of the body, at most TAIL_BYTES."""
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
        return _IN_BAND_ERROR.search(self.tail()) is not None

    def usage(self) -> Usage:
        """Token counts from the last `usage` object (OpenAI, Anthropic) or SGLang's `meta_info`."""
        objects = _USAGE.findall(self.tail())
        try:
            return _to_usage(orjson.loads(objects[-1])) if objects else NO_USAGE
        except orjson.JSONDecodeError:
            return NO_USAGE


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _to_usage(found: dict[str, Any]) -> Usage:
    details = found.get("prompt_tokens_details") or found.get("input_tokens_details") or {}
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    for name in ("cached_tokens", "cache_read_input_tokens"):
        cached = found.get(name) if cached is None else cached
    prompt = found.get("prompt_tokens", found.get("input_tokens"))
    completion = found.get("completion_tokens", found.get("output_tokens"))
    return Usage(_count(prompt), _count(completion), _count(cached))
