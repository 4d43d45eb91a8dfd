"""Requests are kept apart from wrong KV in an engine that cannot reset its cache: by vLLM's `cache_salt`.

vLLM looks a prompt's KV up under it: what lies in its cache under none, or under another one, is never found
(0.32; on the routes here since 0.9). KV that another engine hands over is not looked up.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from msgspec.structs import replace

from kvroute.router.errors import Failure, GatewayError
from kvroute.router.hints.hints import DIGESTS
from kvroute.router.pd.body import Fields, leg_body, read_fields
from kvroute.router.pd.planning import HARMLESS
from kvroute.router.request_parser import Request
from kvroute.router.workers import Member

FIELD = "cache_salt"
ROUTES = frozenset({b"/v1/chat/completions", b"/v1/completions"})


def salt_of(path: bytes, fields: Fields, member: Member) -> Mapping[str, Any]:
    """The field, by the client's own one and the worker's; none where the worker has no salt.

    Raises GatewayError where the request cannot be kept apart.
    """
    if not member.salt:
        return {}
    if path not in ROUTES:
        raise _cannot()
    given = bytes(fields[FIELD]) if FIELD in fields else b""
    return {FIELD: blake2b(given, key=member.salt.encode(), digest_size=16).hexdigest()}


def salted(request: Request, member: Member) -> Request:
    """A request that this worker does alone; raises GatewayError as `salt_of`."""
    path = request.target.partition(b"?")[0]
    if not member.salt or request.method != b"POST" or path in HARMLESS:
        return request
    fields = read_fields(request.body) if DIGESTS.isdisjoint(request.fields) else None
    if fields is None:
        raise _cannot()
    return replace(request, body=leg_body(fields, salt_of(path, fields, member)))


def _cannot() -> GatewayError:
    message = (
        "the worker's cache may hold wrong KV, and this request cannot be kept apart from it (cache_salt)"
    )
    return GatewayError(Failure.SPOILT, message)
