"""Hop-by-hop rules of RFC 9110: what a proxy must not pass on."""

from __future__ import annotations

from collections.abc import Iterable

Headers = list[tuple[bytes, bytes]]
"""Name as received, value as received, in order, duplicates kept."""

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_FRAMING = frozenset({b"content-length"})  # whoever lists it as hop-by-hop would unframe the message
_NONE: frozenset[bytes] = frozenset()
_PLAIN = frozenset({b"close", b"keep-alive", b"Keep-Alive"})
# These are written anew on every hop: the body is buffered, and the answer to an expectation is ours.
REWRITTEN_ON_REQUEST = HOP_BY_HOP | {b"content-length", b"expect", b"host"}


def named_by_connection(headers: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """Further hop-by-hop names that the message's own Connection header lists, in lower case."""
    names: frozenset[bytes] = _NONE
    for name, value in headers:
        if len(name) == 10 and name.lower() == b"connection" and value not in _PLAIN:
            names |= {token.strip().lower() for token in value.split(b",")}
    return names - _FRAMING if names else names
