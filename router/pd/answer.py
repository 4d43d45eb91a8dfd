"""What the gateway changes in the head of a decode worker's answer: the id, and the length with the body."""

from __future__ import annotations

from kvroute.router.upstream import Response


def own_headers(response: Response, request_id: str, body_bytes: int | None = None) -> None:
    """Put them in place, where they are there."""
    headers = response.headers
    for at, (name, _) in enumerate(headers):
        lower = name.lower()
        if lower == b"x-request-id":
            headers[at] = (name, request_id.encode("latin-1", "replace"))
        elif lower == b"content-length" and body_bytes is not None:
            headers[at] = (name, b"%d" % body_bytes)
