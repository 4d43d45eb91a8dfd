from __future__ import annotations

import asyncio
import ssl

import pytest

from kvroute.config import Config
from kvroute.config_groups import Breaker as BreakerOptions
from kvroute.config_groups import Timeouts, WorkerConfig
from kvroute.endpoint import Endpoint
from kvroute.router.breaker import Breaker
from kvroute.router.headers import Headers
from kvroute.router.heads import request_head, response_head
from kvroute.router.pool import UpstreamPool
from kvroute.router.request_parser import Request
from kvroute.router.sweeper import Sweeper
from kvroute.router.upstream import Response
from kvroute.router.workers import Member
from kvroute.types import Worker


def _member(url: str = "http://[::1]:8000/base", api_key: str | None = None) -> Member:
    endpoint = Endpoint.parse(url)
    loop = asyncio.get_running_loop()
    tls = ssl.create_default_context() if endpoint.tls else None
    return Member(
        Worker(id="w#1", url=url),
        WorkerConfig.model_validate({"url": url, "api_key": api_key}),
        endpoint,
        UpstreamPool(endpoint, Timeouts(), Sweeper(loop), loop, tls),
        Breaker(BreakerOptions()),
    )


def _request(
    method: bytes = b"POST", *headers: tuple[bytes, bytes], body: bytes = b"{}", http10: bool = False
) -> Request:
    return Request(
        method=method,
        target=b"/v1/x?a=b",
        headers=list(headers),
        fields={name.lower(): value for name, value in reversed(headers)},
        body=body,
        keep_alive=True,
        http10=http10,
        received_s=0.0,
    )


def _head(request: Request, member: Member, config: Config) -> list[bytes]:
    head = request_head(request, member, config, "made")
    assert head.endswith(b"\r\n\r\n")
    return head[:-4].split(b"\r\n")


async def test_a_request_head_changes_only_what_the_hop_owns() -> None:
    request = _request(
        b"POST", (b"Host", b"gateway"), (b"X-B", b"1"), (b"Content-Length", b"9"), (b"x-b", b"2")
    )
    assert _head(request, _member(), Config()) == [
        b"POST /base/v1/x?a=b HTTP/1.1",
        b"Host: [::1]:8000",
        b"X-B: 1",
        b"x-b: 2",
        b"X-Request-Id: made",
        b"Content-Length: 2",
    ]


@pytest.mark.parametrize(
    ("front", "worker", "sent"),
    [
        (None, None, b"Authorization: Bearer client"),
        ("front", None, None),
        (None, "worker", b"Authorization: Bearer worker"),
        ("front", "worker", b"Authorization: Bearer worker"),
    ],
)
async def test_whose_key_is_sent(front: str | None, worker: str | None, sent: bytes | None) -> None:
    request = _request(b"POST", (b"Authorization", b"Bearer client"))
    lines = _head(request, _member(api_key=worker), Config.model_validate({"api_key": front}))
    assert [line for line in lines if line.lower().startswith(b"authorization")] == ([sent] if sent else [])


@pytest.mark.parametrize(("method", "length"), [(b"GET", False), (b"DELETE", False), (b"POST", True)])
async def test_a_length_of_zero_is_stated_where_a_body_is_expected(method: bytes, length: bool) -> None:
    assert (b"Content-Length: 0" in _head(_request(method, body=b""), _member(), Config())) is length


def _response(status: int = 200, headers: Headers | None = None) -> Response:
    response = Response()
    response.status, response.reason, response.headers = status, b"Fine", headers or []
    names = {name.lower(): value for name, value in response.headers}
    response.content_length = b"content-length" in names
    response.chunked = names.get(b"transfer-encoding") == b"chunked"
    return response


SIZED: Headers = [(b"Content-Length", b"2")]
CHUNKED: Headers = [(b"Transfer-Encoding", b"chunked")]


@pytest.mark.parametrize(
    ("response", "request_", "chunked", "framing"),
    [
        (_response(200, SIZED), _request(), False, [b"Content-Length: 2"]),
        (_response(200, CHUNKED), _request(), True, [b"transfer-encoding: chunked"]),
        (_response(200), _request(), True, [b"transfer-encoding: chunked"]),
        (_response(200, CHUNKED), _request(http10=True), False, []),
        (_response(200, CHUNKED), _request(b"HEAD"), False, []),
        (_response(200, SIZED), _request(b"HEAD"), False, [b"Content-Length: 2"]),
        (_response(204), _request(), False, []),
        (_response(304, SIZED), _request(), False, [b"Content-Length: 2"]),
    ],
)
def test_how_a_body_is_framed(
    response: Response, request_: Request, chunked: bool, framing: list[bytes]
) -> None:
    head, is_chunked = response_head(response, request_, (), keep_alive=True)
    assert is_chunked is chunked
    assert head == b"\r\n".join([b"HTTP/1.1 %d Fine" % response.status, *framing, b"\r\n"])


def test_close_and_our_own_lines_come_last() -> None:
    head, _ = response_head(_response(200, SIZED), _request(), (b"x-own: 1",), keep_alive=False)
    assert head == b"HTTP/1.1 200 Fine\r\nContent-Length: 2\r\nconnection: close\r\nx-own: 1\r\n\r\n"


async def test_the_next_attempt_s_head_is_its_own() -> None:
    """What is kept of one head, for the next: lines left out in one are not left out in another."""
    asked = _request(b"POST", (b"X-Request-Id", b"theirs"), (b"x-kept", b"1"), (b"Connection", b"x-hop"))
    asked.headers.append((b"x-hop", b"1"))
    member, config = _member(), Config()
    own = [(b"X-Request-Id", b"ours")]
    first = request_head(asked, member, config, "id", None, own, 7)
    assert first == request_head(asked, member, config, "id", None, own, 7)
    assert b"x-hop" not in first
    assert b"\r\nx-kept: 1\r\nX-Request-Id: ours\r\nContent-Length: 7\r\n\r\n" in first
    second = request_head(asked, member, config, "id", 3)
    assert b"\r\nX-Request-Id: theirs\r\n" in second
    assert b"\r\nContent-Length: 2\r\n" in second


async def test_a_known_rank_takes_the_place_of_the_client_s() -> None:
    asked = _request(b"POST", (b"X-Data-Parallel-Rank", b"7"), (b"x-kept", b"1"))
    member = _member()
    ours = request_head(asked, member, Config(), "id", 3)
    assert ours.lower().count(b"x-data-parallel-rank") == 1
    assert b"\r\nX-data-parallel-rank: 3\r\n" in ours
    assert b"\r\nx-kept: 1\r\n" in ours
    assert b"\r\nX-Data-Parallel-Rank: 7\r\n" in request_head(asked, member, Config(), "id")
