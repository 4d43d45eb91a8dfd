"""Message heads: what is passed on as received, and the few lines a hop owns."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from kvroute.config import Config
from kvroute.router.headers import HOP_BY_HOP, REWRITTEN_ON_REQUEST, named_by_connection
from kvroute.router.request_parser import Request
from kvroute.router.upstream import Response
from kvroute.router.workers import Member

NO_BODY_STATUSES = (204, 304)
# Methods whose request carries no Content-Length when there is no body (RFC 9110 8.6).
BODILESS_METHODS = (b"GET", b"HEAD", b"OPTIONS", b"DELETE", b"TRACE")


def request_head(
    request: Request,
    member: Member,
    config: Config,
    request_id: str,
    dp_rank: int | None = None,
    own: Sequence[tuple[bytes, bytes]] = (),
    body_bytes: int | None = None,
) -> bytes:
    """Head of one attempt. `own` headers stand in place of the client's of these names, `body_bytes` is the
    length of a body that is not the client's.

    Ours are Host, Content-Length, Authorization where keys are configured, a missing X-Request-Id, and
    X-data-parallel-rank (vLLM's name for it) where a rank is known to hold the prompt's beginning.
    """
    api_key = member.config.api_key
    dropped = _left_out(
        tuple([name for name, _ in own]),
        has_key=api_key is not None or config.api_key is not None,
        has_rank=dp_rank is not None,
    )
    if b"connection" in request.fields and (named := named_by_connection(request.headers)):
        dropped = dropped | named
    kept = request.client_lines
    if kept is None or kept[0] is not dropped:
        of_client = [b"%b: %b\r\n" % header for header in request.headers if header[0].lower() not in dropped]
        kept = request.client_lines = dropped, b"".join(of_client)
    start = b"%b %b%b HTTP/1.1\r\n%b\r\n%b"
    lines = [start % (request.method, member.base_path, request.target, member.host_line, kept[1])]
    for header in own:
        lines.append(b"%b: %b\r\n" % header)
    if b"x-request-id" not in request.fields and b"x-request-id" not in dropped:
        lines.append(b"X-Request-Id: %b\r\n" % request_id.encode("latin-1"))
    if api_key is not None:
        lines.append(b"Authorization: Bearer %b\r\n" % api_key.get_secret_value().encode())
    if dp_rank is not None:
        lines.append(b"X-data-parallel-rank: %d\r\n" % dp_rank)
    size = len(request.body) if body_bytes is None else body_bytes
    if size or request.method not in BODILESS_METHODS:
        lines.append(b"Content-Length: %d\r\n" % size)
    lines.append(b"\r\n")
    return b"".join(lines)


@lru_cache(maxsize=256)
def _left_out(own: tuple[bytes, ...], *, has_key: bool, has_rank: bool) -> frozenset[bytes]:
    """Lower-case names of a client's headers that do not go on; the same object for the same arguments."""
    dropped = REWRITTEN_ON_REQUEST | {name.lower() for name in own}
    if has_key:
        dropped |= {b"authorization"}
    return dropped | {b"x-data-parallel-rank"} if has_rank else dropped


def response_head(
    response: Response, request: Request, extra: Sequence[bytes], *, keep_alive: bool
) -> tuple[bytes, bool]:
    """Head for the client, and whether the body is to be chunked. `extra` are header lines to add."""
    named = named_by_connection(response.headers)
    dropped = HOP_BY_HOP | named if named else HOP_BY_HOP
    lines = [b"HTTP/1.1 %d %b" % (response.status, response.reason)]
    for name, value in response.headers:
        lower = name.lower()
        # A length beside chunks is stale: the chunks say where the body ends (RFC 9112 6.3).
        if lower not in dropped and not (response.chunked and lower == b"content-length"):
            lines.append(b"%b: %b" % (name, value))
    bodiless = request.method == b"HEAD" or response.status in NO_BODY_STATUSES
    chunked = not bodiless and (response.chunked or not response.content_length) and not request.http10
    if chunked:
        lines.append(b"transfer-encoding: chunked")
    if not keep_alive:
        lines.append(b"connection: close")
    lines.extend(extra)
    lines.append(b"\r\n")
    return b"\r\n".join(lines), chunked
