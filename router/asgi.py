"""Runs an ASGI app for one complete request: the gateway's own few routes are not on the hot path."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any

from kvroute.router.request_parser import Request

Message = MutableMapping[str, Any]
App = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]


async def run_app(app: App, request: Request, *, keep_alive: bool) -> tuple[int, bytes]:
    """Status and the whole HTTP response, with a Content-Length; the app's answer is buffered."""
    raw_path, _, query = request.target.partition(b"?")
    scope: Message = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "GET" if request.method == b"HEAD" else request.method.decode("latin-1"),
        "scheme": "http",
        "path": raw_path.decode("latin-1"),
        "raw_path": raw_path,
        "root_path": "",
        "query_string": query,
        "headers": [(name.lower(), value) for name, value in request.headers],
        "client": None,
        "server": None,
    }
    sent: list[Message] = []
    incoming: list[Message] = [
        {"type": "http.disconnect"},
        {"type": "http.request", "body": request.body, "more_body": False},
    ]

    async def receive() -> Message:
        return incoming.pop() if len(incoming) > 1 else incoming[0]

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope, receive, send)
    body = b"".join(message.get("body", b"") for message in sent[1:])
    status = HTTPStatus(sent[0]["status"])
    lines = [b"HTTP/1.1 %d %b" % (status, status.phrase.encode())]
    lines += [b"%b: %b" % (n, v) for n, v in sent[0].get("headers", ()) if n.lower() != b"content-length"]
    lines.append(b"content-length: %d" % len(body))
    if not keep_alive:
        lines.append(b"connection: close")
    head = b"\r\n".join(lines) + b"\r\n\r\n"
    return sent[0]["status"], head if request.method == b"HEAD" else head + body
