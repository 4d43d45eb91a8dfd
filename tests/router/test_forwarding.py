"""What a request and its answer look like on the other side: the same, but for the lines a hop owns."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from tests.kit import CHAT, Client, Engine, Received, Wire, ask
from tests.router.edge import edge, raw

ODD = (
    b'{ "zeta":1,"model" : "m",\n\t"max_completion_tokens":5,"top_k":1,"chat_template_kwargs":{"b":1,"a":[]},'
    b'"stream_options":{"include_usage":true},"f":1.0e+2,"big":123456789012345678901234567890,"dup":1,"dup":2,'
    b'"messages":[{"role":"user","content":"\\u00e9\\/"}],"best_of":null,"guided_json":"{}","vllm_xargs":{}}\n'
)
SILENT = {"decision_headers": False}


def _own(engine: Engine) -> list[tuple[bytes, bytes]]:
    """Headers that the client sent itself."""
    ours = (b"Host", b"X-Request-Id", b"Content-Length")
    return [pair for pair in engine.received[-1].headers if pair[0] not in ours]


async def test_the_body_is_forwarded_byte_for_byte() -> None:
    async with Engine() as engine, edge(engine, policy="prefix_affinity") as server:
        await ask(server.url, CHAT, ODD)
        request = engine.received[0]
        assert request.body == ODD
        assert request.header("content-length") == str(len(ODD))


@pytest.mark.parametrize(
    "target",
    [
        CHAT + "?a=1&a=2&b=%20%C3%A9&c=a+b&d",
        "/x//y/../z/./?",
        "/x?next=http://other/y",
        "/%2e%2e/%00/x;p=1",
        "/x?",
        "/" + "a" * 8000,
    ],
)
async def test_the_target_is_forwarded_as_sent(target: str) -> None:
    async with Engine() as engine, edge(engine) as server:
        assert (await ask(server.url, target, b"{}")).status == 200
        assert engine.received[0].target == target


@pytest.mark.parametrize(
    ("absolute", "origin"),
    [
        ("http://other:99/x?y=1", "/x?y=1"),
        ("HTTPS://other/x", "/x"),
        ("http://other", "/"),
        ("http://other?q=/1", "/?q=/1"),
    ],
)
async def test_an_absolute_target_is_read_as_its_path(absolute: str, origin: str) -> None:
    async with Engine() as engine, edge(engine) as server:
        assert (await ask(server.url, absolute, method="GET")).status == 200
        assert engine.received[0].target == origin
        assert engine.received[0].header("host") == f"127.0.0.1:{engine.port}"


@pytest.mark.parametrize(
    "method", ["GET", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "SEARCH", "PROPFIND"]
)
async def test_every_method_and_route_is_forwarded(method: str) -> None:
    async with Engine() as engine, edge(engine) as server:
        answer = await ask(server.url, "/some/thing", method=method)
        assert (answer.status, answer.body) == (200, b'{"ok":true}')
        assert (engine.received[0].method, engine.received[0].target) == (method, "/some/thing")
        assert (engine.received[0].header("content-length") is None) is (
            method in ("GET", "DELETE", "OPTIONS", "TRACE")
        )


async def test_options_of_the_server_as_a_whole() -> None:
    async with Engine() as engine, edge(engine) as server:
        assert (await ask(server.url, "*", method="OPTIONS")).status == 200
        assert engine.received[0].target == "*"


@pytest.mark.parametrize("framing", ["Content-Length: 1000", "Transfer-Encoding: chunked", "X-None: 1"])
async def test_head_has_the_head_of_get_and_no_body(framing: str) -> None:
    script = raw(f"HTTP/1.1 200 OK\r\n{framing}\r\nETag: x\r\n\r\n".encode())
    async with Engine(script) as engine, edge(engine) as server:
        client = await Client.connect(server.url)
        answer = await client.ask("/file", method="HEAD")
        assert (answer.status, answer.header("etag")) == (200, "x")
        assert answer.header("content-length") == ("1000" if "1000" in framing else None)
        assert (await client.ask("/livez", method="GET")).json() == {"status": "alive"}
        client.close()


@pytest.mark.parametrize(
    "head",
    [
        b"204 No Content\r\nX-A: 1",
        b"204 No Content\r\nContent-Length: 0",
        b"304 Not Modified\r\nContent-Length: 9",
    ],
)
async def test_statuses_without_body(head: bytes) -> None:
    async with Engine(raw(b"HTTP/1.1 " + head + b"\r\n\r\n")) as engine, edge(engine) as server:
        client = await Client.connect(server.url)
        answer = await client.ask("/x", method="GET")
        assert answer.status == int(head[:3])
        assert answer.header("transfer-encoding") is None
        assert (await client.ask("/livez", method="GET")).status == 200
        client.close()


async def test_headers_keep_order_case_and_duplicates_on_the_way_in() -> None:
    sent = [
        "X-b: 2",
        "x-A: 1",
        "COOKIE: a=1",
        "Cookie: b=2",
        "x-empty:",
        "Accept-Encoding: gzip",
        "X-b: \xe9",
    ]
    async with Engine() as engine, edge(engine) as server:
        await ask(server.url, "/x", None, *sent, method="GET")
        assert _own(engine) == [
            (name.encode(), value.strip().encode("latin-1"))
            for name, _, value in (line.partition(":") for line in sent)
        ]


async def test_headers_keep_order_case_and_duplicates_on_the_way_out() -> None:
    lines = [
        "Set-Cookie: a=1; Path=/",
        "sEt-cOOkie: b=2",
        "X-Z: 1",
        "x-a: 2",
        "Server: u\xe9",
        "Set-Cookie: a=3",
    ]
    head = "\r\n".join(["HTTP/1.1 207 Odd Reason", *lines, "Content-Length: 0", "", ""])
    async with Engine(raw(head.encode("latin-1"))) as engine, edge(engine, **SILENT) as server:
        answer = await ask(server.url, "/x", b"{}")
    assert answer.raw == head.encode("latin-1")


async def test_hop_by_hop_headers_stay_on_the_way_in() -> None:
    dropped = [
        "Connection: X-Private , keep-alive, x-other",
        "x-pRIVATE: 1",
        "X-Other: 2",
        "Keep-Alive: timeout=9",
        "TE: trailers",
        "Trailer: X-T",
        "Proxy-Authorization: Basic eA==",
        "Proxy-Connection: keep-alive",
    ]
    async with Engine() as engine, edge(engine) as server:
        assert (await ask(server.url, "/x", None, *dropped, "X-Kept: 3", method="GET")).status == 200
        assert _own(engine) == [(b"X-Kept", b"3")]


async def test_hop_by_hop_headers_stay_on_the_way_out() -> None:
    async def script(_request: Received, wire: Wire) -> None:
        await wire.answer(
            200, b"{}", "Connection: x-hop, Keep-Alive", "X-Hop: 1", "Keep-Alive: timeout=5", "Trailer: a",
            "Proxy-Authenticate: Basic", "Upgrade: h2c", "X-Kept: 3",
        )  # fmt: skip

    async with Engine(script) as engine, edge(engine, **SILENT) as server:
        answer = await ask(server.url, "/x", b"{}")
    assert answer.headers == [("content-type", "application/json"), ("content-length", "2"), ("X-Kept", "3")]


@pytest.mark.parametrize("status", [200, 400])
async def test_compressed_bodies_pass_with_their_coding_and_length(status: int) -> None:
    packed = gzip.compress(b'{"a":"' + b"x" * 5000 + b'"}')

    async def script(_request: Received, wire: Wire) -> None:
        await wire.answer(status, packed, "Content-Encoding: gzip")

    async with Engine(script) as engine, edge(engine) as server:
        answer = await ask(server.url, CHAT, {"model": "m", "stream": True}, "Accept-Encoding: gzip")
        assert engine.received[0].header("accept-encoding") == "gzip"
    assert (answer.status, answer.body, answer.complete) == (status, packed, True)
    assert (answer.header("content-encoding"), answer.header("content-length")) == ("gzip", str(len(packed)))


async def test_a_json_error_to_a_stream_request_stays_a_json_error() -> None:
    body = b'{"error":{"message":"context too long","type":"BadRequestError","code":400}}'

    async def script(_request: Received, wire: Wire) -> None:
        await wire.answer(400, body)

    async with Engine(script) as engine, edge(engine) as server:
        answer = await ask(server.url, CHAT, {"model": "m", "stream": True})
    assert (answer.status, answer.body, answer.header("content-type")) == (400, body, "application/json")
    assert answer.header("content-length") == str(len(body))


async def test_request_ids_are_kept_or_made() -> None:
    async with Engine() as engine, edge(engine) as server:
        await ask(server.url, CHAT, b"{}", "x-REQUEST-id: mine")
        for _ in range(2):
            await ask(server.url, CHAT, b"{}")
        names = [request.header("x-request-id") for request in engine.received]
        assert names[0] == "mine"
        assert len({*names}) == 3
        answer = await ask(server.url, CHAT, b"[", "X-Request-Id: bad")
        assert (answer.status, answer.header("x-request-id")) == (400, "bad")


async def test_the_decision_is_told_unless_switched_off() -> None:
    async with Engine() as engine, edge(engine) as server:
        answer = await ask(server.url, CHAT, b"{}")
        assert answer.header("x-kvroute-worker") == engine.url
        assert answer.header("x-kvroute-decision") == "round_robin; reason=turn; matched_tokens=0"


async def test_a_worker_on_a_unix_socket(tmp_path: Path) -> None:
    async with Engine(unix_path=str(tmp_path / "engine.sock")) as engine, edge(engine) as server:
        answer = await ask(server.url, CHAT, ODD)
        assert (answer.status, answer.header("x-kvroute-worker")) == (200, engine.url)
        assert engine.received[0].body == ODD
