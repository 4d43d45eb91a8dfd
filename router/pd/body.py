"""The bodies of the two legs: a client's fields with a few put in their place, values byte for byte."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw

Fields = dict[str, Raw]
"""The top level of a JSON object: each value as the slice of bytes that it is."""

_decode = msgspec.json.Decoder(Fields).decode
_encode = msgspec.json.encode
ONE, FALSE = Raw(b"1"), Raw(b"false")
NOT_IN_PREFILL = ("stream_options", "min_tokens", "kv_transfer_params")
LIMITS: Mapping[bytes, str] = {
    b"/v1/chat/completions": "max_tokens",
    b"/v1/completions": "max_tokens",
    b"/v1/messages": "max_tokens",
    b"/v1/responses": "max_output_tokens",
}
"""The field that bounds the output, by route: those that can be split."""


def read_fields(body: bytes) -> Fields | None:
    """None for a body that is not one UTF-8 JSON object that strict parsers take (NaN, a lone surrogate).

    Of a name that comes twice the last counts, as in the engines' parsers. Some 2.7 GB/s, no objects.
    """
    try:
        return _decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return None


def read_oddly(body: bytes) -> dict[str, Any]:
    """An object that `read_fields` refuses, as Python's own parser sees it: engines read with that.

    It takes NaN, a byte order mark and UTF-16. Empty for what it refuses too.
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def leg_body(fields: Fields, own: Mapping[str, Any]) -> bytes:
    """The client's fields with the leg's own in place of theirs, or after them."""
    return _encode({**fields, **own})


def short_prefill(path: bytes, fields: Fields) -> Fields:
    """As `fields`, for one token that is not streamed: all that a prefill leg needs to end with."""
    short = {name: value for name, value in fields.items() if name not in NOT_IN_PREFILL}
    short["stream"] = FALSE
    short[LIMITS[path]] = ONE
    if "max_completion_tokens" in short:
        short["max_completion_tokens"] = ONE
    if path == b"/v1/responses":
        short["store"] = FALSE
    return short


def without(fields: Fields, names: frozenset[str]) -> Fields:
    """As `fields`, but for those of these names."""
    if names.isdisjoint(fields):
        return fields
    return {name: value for name, value in fields.items() if name not in names}
