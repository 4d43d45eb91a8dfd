"""The prefill's count of cached prompt tokens, put in place of the decode worker's as that passes by."""

from __future__ import annotations

import re

# A quote inside a JSON string is escaped, so an unescaped key is a key.
_COUNT = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens)"(\s*:\s*)(\d+)(?=[^\d])')
_BEGUN = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens)"\s*(?::\s*\d*)?')
_NAMES = (b'"cached_tokens"', b'"cache_read_input_tokens"')
_LONGEST = max(map(len, _NAMES)) + 40
"""A count cut by the end of a read, with blanks; longer ones pass as they are."""


class CachedTokens:
    """A decode worker counts all the KV that it was handed as cached; what the request found in a cache is
    what its prefill found. vLLM 0.32 tells its decode worker, older ones do not.

    Bytes come out as they went in but for the digits; what may be the beginning of a count is kept back until
    the next read.
    """

    __slots__ = ("_cached", "_kept")

    def __init__(self, cached_tokens: int) -> None:
        self._cached = b"%d" % cached_tokens
        self._kept = b""

    def feed(self, data: bytes) -> bytes:
        """What may go on of it; nothing, sometimes."""
        if self._kept:
            data = self._kept + data
            self._kept = b""
        if not data.endswith(b"\n\n"):  # else the end of an event, and of no count
            at = self._unfinished(data)
            if at >= 0:
                data, self._kept = data[:at], data[at:]
        at = data.find(b'"cache')
        return data if at < 0 else data[:at] + _COUNT.sub(self._replaced, data[at:])

    def whole(self, body: bytes) -> bytes:
        """A body that is all there."""
        at = max(body.rfind(b'"usage"'), body.rfind(b'"meta_info"'))
        if at < 0:
            return body
        return body[:at] + _COUNT.sub(self._replaced, body[at:])

    def end(self) -> bytes:
        """What was kept back."""
        kept, self._kept = self._kept, b""
        return kept

    def _replaced(self, found: re.Match[bytes]) -> bytes:
        start = found.start(2) - found.start()
        return found[0][:start] + self._cached

    @staticmethod
    def _unfinished(data: bytes) -> int:
        """Where a count begins that goes on in the next read, or may; -1 for nowhere."""
        at = data.find(b'"', max(0, len(data) - _LONGEST))
        while at >= 0:
            if _BEGUN.fullmatch(data, at) or any(name.startswith(data[at:]) for name in _NAMES):
                return at
            at = data.find(b'"', at + 1)
        return -1
