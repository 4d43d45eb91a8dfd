from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvroute.router.asgi import Message, run_app
from kvroute.router.request_parser import Request
from tests.kit import Client, Engine
from tests.router.edge import edge

Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


def _request(method: bytes = b"POST", target: bytes = b"/p%C3%A9?a=1?b", body: bytes = b"body") -> Request:
    headers = [(b"X-Odd", b"1"), (b"x-odd", b"2")]
    return Request(
        method=method,
        target=target,
        headers=headers,
        fields={name.lower(): value for name, value in reversed(headers)},
        body=body,
        keep_alive=True,
        http10=False,
        received_s=0.0,
    )


async def _answer(_scope: Message, _receive: Receive, send: Send) -> None:
    await send(
        {"type": "http.response.start", "status": 201, "headers": [(b"a", b"1"), (b"Content-Length", b"9")]}
    )
    await send({"type": "http.response.body", "body": b"one ", "more_body": True})
    await send({"type": "http.response.body", "body": b"two"})


async def test_the_app_sees_the_request() -> None:
    seen: dict[str, Any] = {}

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        seen.update(scope)
        seen["messages"] = [await receive() for _ in range(3)]
        await _answer(scope, receive, send)

    await run_app(app, _request(), keep_alive=True)
    assert (seen["type"], seen["method"], seen["query_string"]) == ("http", "POST", b"a=1?b")
    assert seen["headers"] == [(b"x-odd", b"1"), (b"x-odd", b"2")]
    assert seen["raw_path"] == b"/p%C3%A9"
    assert seen["messages"] == [
        {"type": "http.request", "body": b"body", "more_body": False},
        {"type": "http.disconnect"},
        {"type": "http.disconnect"},
    ]


@pytest.mark.parametrize("keep_alive", [True, False])
async def test_the_response_is_buffered_and_has_its_own_length(keep_alive: bool) -> None:
    status, data = await run_app(_answer, _request(), keep_alive=keep_alive)
    close = b"" if keep_alive else b"connection: close\r\n"
    assert status == 201
    assert data == b"HTTP/1.1 201 Created\r\na: 1\r\ncontent-length: 7\r\n" + close + b"\r\none two"


async def test_head_is_get_without_the_body() -> None:
    _, data = await run_app(_answer, _request(b"HEAD"), keep_alive=True)
    assert data == b"HTTP/1.1 201 Created\r\na: 1\r\ncontent-length: 7\r\n\r\n"


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/metrics", "/v1/models"])
async def test_the_gateway_s_own_routes_answer_get_and_head_on_one_connection(path: str) -> None:
    async with Engine() as engine, edge(engine) as server:
        client = await Client.connect(server.url)
        head = await client.ask(path, method="HEAD")
        assert (head.status, head.body) == (200, b"")
        answer = await client.ask(path + "?x=1", method="GET")
        assert answer.status == 200
        assert answer.body
        client.close()
        assert engine.received == []
