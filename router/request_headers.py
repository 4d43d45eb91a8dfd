"""What a client may say of its request in headers: session, tenant, priority, limits.

They are end-to-end headers: each passes on to the worker as it came. A value that cannot be read is refused,
since a limit that silently does not hold is worse than none. Nothing here is proof of who a client is: where
tenants compete, the proxy in front sets these headers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvroute.types import RequestView

SESSION_HEADERS = (b"x-session-id", b"x-kvroute-session")
TENANT_HEADERS = (b"x-kvroute-tenant", b"x-llm-d-inference-fairness-id", b"x-gateway-inference-fairness-id")
"""The last two are those of the endpoint picker of the Gateway API Inference Extension, new and old."""
PRIORITY_HEADER = b"x-kvroute-priority"
CONTINUES_HEADER = b"x-kvroute-session-continues"
TTFT_HEADERS = (b"x-slo-ttft-ms", b"x-llm-d-slo-ttft-ms")
ITL_HEADERS = (b"x-slo-itl-ms", b"x-slo-tpot-ms", b"x-llm-d-slo-tpot-ms")
E2E_HEADERS = (b"x-slo-e2e-ms",)
"""Limits in milliseconds, under llm-d's names too. Of several names for one thing, the first that is there
counts."""
READ_HEADERS = frozenset(
    {
        *SESSION_HEADERS,
        *TENANT_HEADERS,
        PRIORITY_HEADER,
        CONTINUES_HEADER,
        *TTFT_HEADERS,
        *ITL_HEADERS,
        *E2E_HEADERS,
    }
)
MAX_TENANT_BYTES = 128
MAX_PRIORITY = 2**31 - 1
NOTHING_SAID = RequestView()
_MILLISECONDS = re.compile(rb"[0-9]{1,9}(?:\.[0-9]{1,9})?")
_PRIORITY = re.compile(rb"[+-]?[0-9]{1,10}")


class MalformedRequest(Exception):
    """A request that cannot be routed on; the message names the field, the fault and what is accepted."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


def read_headers(headers: Mapping[bytes, bytes]) -> tuple[RequestView, int | None]:
    """(What the headers alone say, the priority among it); `headers` by lower-case name.

    The priority is None where no header gives one, and the body's counts. Raises `MalformedRequest`.
    """
    if READ_HEADERS.isdisjoint(headers):
        return NOTHING_SAID, None
    session = _first(headers, SESSION_HEADERS)
    priority = _priority(headers)
    view = RequestView(
        session_id=session[1].decode("latin-1") if session is not None else None,
        tenant=_tenant(headers),
        priority=priority or 0,
        ttft_limit_s=_limit_s(headers, TTFT_HEADERS),
        itl_limit_s=_limit_s(headers, ITL_HEADERS),
        e2e_limit_s=_limit_s(headers, E2E_HEADERS),
        continues=_continues(headers),
    )
    return view, priority


def _first(headers: Mapping[bytes, bytes], names: tuple[bytes, ...]) -> tuple[bytes, bytes] | None:
    """(Name, value) of the first that is there and not empty."""
    for name in names:
        if value := headers.get(name):
            return name, value
    return None


def _tenant(headers: Mapping[bytes, bytes]) -> str:
    found = _first(headers, TENANT_HEADERS)
    if found is None:
        return ""
    name, value = found
    if len(value) > MAX_TENANT_BYTES:
        raise _malformed(name, f"is {len(value)} bytes long", f"up to {MAX_TENANT_BYTES} are accepted")
    return value.decode("latin-1")


def _priority(headers: Mapping[bytes, bytes]) -> int | None:
    value = headers.get(PRIORITY_HEADER)
    if not value:
        return None
    if _PRIORITY.fullmatch(value) is None or abs(int(value)) > MAX_PRIORITY:
        expected = f"an integer from -{MAX_PRIORITY} to {MAX_PRIORITY} is expected, the lower the sooner"
        raise _malformed(PRIORITY_HEADER, f"is {_shown(value)}", expected)
    return int(value)


def _limit_s(headers: Mapping[bytes, bytes], names: tuple[bytes, ...]) -> float | None:
    found = _first(headers, names)
    if found is None:
        return None
    name, value = found
    if _MILLISECONDS.fullmatch(value) is None or not (limit_ms := float(value)):
        expected = "a number of milliseconds above 0, such as 250 or 12.5, is expected"
        raise _malformed(name, f"is {_shown(value)}", expected)
    return limit_ms / 1e3


def _continues(headers: Mapping[bytes, bytes]) -> bool | None:
    value = headers.get(CONTINUES_HEADER)
    if not value:
        return None
    said = {b"true": True, b"false": False}.get(value.lower())
    if said is None:
        raise _malformed(CONTINUES_HEADER, f"is {_shown(value)}", "true or false is expected")
    return said


def _malformed(name: bytes, fault: str, expected: str) -> MalformedRequest:
    header = name.decode()
    return MalformedRequest(f"header {header} {fault}; {expected}", header)


def _shown(value: bytes) -> str:
    return repr(value[:40].decode("latin-1")) + ("..." if len(value) > 40 else "")
