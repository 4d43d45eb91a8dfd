"""Worker URLs: what is accepted, their one form, and that nothing else in the code writes one."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from kvroute.endpoint import Endpoint, EndpointError, http_origin, join_host_port
from tests.kit import CHAT, Engine, Received, Wire, ask, gateway, until

ROOT = Path(__file__).parents[2]
PRODUCT = ("router", "policies", "conductor", "loadtests", "src/kvroute")


@pytest.mark.parametrize(
    ("url", "canonical", "authority", "host", "port"),
    [
        ("http://a:8000", "http://a:8000", "a:8000", "a", 8000),
        ("HTTP://A.Example/", "http://a.example:80", "a.example:80", "a.example", 80),
        ("https://a", "https://a:443", "a:443", "a", 443),
        ("http://10.0.0.1:1", "http://10.0.0.1:1", "10.0.0.1:1", "10.0.0.1", 1),
        ("http://[::1]:8000", "http://[::1]:8000", "[::1]:8000", "::1", 8000),
        ("http://[FD00:0::1]", "http://[fd00::1]:80", "[fd00::1]:80", "fd00:0::1", 80),
        ("http://a:1/base/v2/", "http://a:1/base/v2", "a:1", "a", 1),
    ],
)
def test_a_url_has_one_form(url: str, canonical: str, authority: str, host: str, port: int) -> None:
    endpoint = Endpoint.parse(url)
    assert (endpoint.url, endpoint.authority, endpoint.host, endpoint.port) == (
        canonical,
        authority,
        host,
        port,
    )
    assert Endpoint.parse(endpoint.url).url == endpoint.url
    assert (httpx.URL(endpoint.url).port or port) == port


def test_a_unix_socket_is_a_path() -> None:
    for url in ("unix:///run/a b.sock".replace(" ", "%20"), "unix:/run/a%20b.sock"):
        endpoint = Endpoint.parse(url)
        assert (endpoint.url, endpoint.unix_path) == ("unix:///run/a%20b.sock", "/run/a b.sock")
        assert (endpoint.authority, endpoint.base_path, endpoint.tls) == ("localhost", "", False)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("a:8000", "has scheme 'a'"),
        ("//a:8000", "has scheme 'none'"),
        ("ftp://a", "has scheme 'ftp'"),
        ("http://", "names no host"),
        ("http://:80", "names no host"),
        ("http://fd00::1:8000", "Port could not be cast"),
        ("http://::1", "Port could not be cast|stands in brackets"),
        ("http://[::1", "Invalid IPv6 URL"),
        ("http://[zz]:1", "zz"),
        ("http://a:x", "Port could not be cast"),
        ("http://a:70000", "out of range"),
        ("http://a:0", "has port 0"),
        ("http://a:8000@3", "contains '@' (a user or a rank)"),
        ("http://user:secret@a", "contains '@'"),
        ("http://a/?x=1", "has a query or fragment"),
        ("http://a/#3", "has a query or fragment"),
        ("http://a b", "visible ASCII"),
        ("http://ä", "visible ASCII"),
        ("http://a\r\nX: y", "visible ASCII"),
        ("", "visible ASCII"),
        ("unix://relative.sock", "needs an absolute socket path"),
        ("unix:///a%00b", "needs an absolute socket path"),
    ],
)
def test_a_url_that_cannot_be_used_says_why_and_what_is_accepted(url: str, message: str) -> None:
    with pytest.raises(EndpointError) as caught:
        Endpoint.parse(url)
    assert any(part in str(caught.value) for part in message.split("|")), caught.value
    assert "accepted: http://host:port, https://host:port, http://[ipv6]:port, unix:///" in str(caught.value)


@pytest.mark.parametrize(
    ("host", "joined"),
    [
        ("a", "a:1"),
        ("10.0.0.1", "10.0.0.1:1"),
        ("::1", "[::1]:1"),
        ("[::1]", "[::1]:1"),
        ("fe80::1%eth0", "[fe80::1%eth0]:1"),
    ],
)
def test_an_ipv6_address_is_bracketed_exactly_once(host: str, joined: str) -> None:
    assert join_host_port(host, 1) == joined
    assert join_host_port(join_host_port(host, 1).removesuffix(":1"), 1) == joined
    assert http_origin(host, 1) == f"http://{joined}"


def test_two_spellings_of_an_ipv6_address_are_one_worker() -> None:
    assert Endpoint.parse("http://[0:0:0:0:0:0:0:1]:80").url == Endpoint.parse("http://[::1]").url


def test_no_other_file_builds_a_url() -> None:
    built = re.compile(r"""https?://(\{|%)|["']https?://["']\s*[+%]""")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in PRODUCT
        for path in sorted((ROOT / folder).glob("**/*.py" if "src" not in folder else "*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if built.search(line) and path.name != "endpoint.py"
    ]
    assert found == []


async def test_a_request_lands_on_a_worker_at_an_ipv6_address() -> None:
    async with Engine(host="::1") as engine, gateway(engine) as server:
        answer = await ask(server.url, CHAT, {"model": "m"})
        assert (answer.status, answer.header("x-kvroute-worker")) == (200, f"http://[::1]:{engine.port}")
        assert engine.received[0].header("host") == f"[::1]:{engine.port}"


async def test_the_gateway_itself_listens_on_an_ipv6_address() -> None:
    async with (
        Engine() as engine,
        gateway(engine, host="::1", admin={"enabled": True, "host": "::1"}) as server,
    ):
        assert server.url.startswith("http://[::1]:")
        assert (await ask(server.url, CHAT, {"model": "m"})).status == 200
        assert server.admin_url is not None
        assert (await ask(server.admin_url, "/livez", method="GET")).status == 200


async def test_a_worker_behind_a_unix_socket(tmp_path: Path) -> None:
    async with Engine(unix_path=str(tmp_path / "engine.sock")) as engine, gateway(engine) as server:
        answer = await ask(server.url, CHAT + "?x=1", {"model": "m"})
        assert (answer.status, answer.header("x-kvroute-worker")) == (200, engine.url)
        assert (engine.received[0].target, engine.received[0].header("host")) == (CHAT + "?x=1", "localhost")


async def test_a_base_path_goes_before_every_target() -> None:
    async def models(_request: Received, wire: Wire) -> None:
        await wire.answer(200, b'{"data": [{"id": "m"}]}')

    async with Engine() as engine:
        async with gateway(ready=False, workers=[f"{engine.url}/base"]) as server:
            (member,) = server.registry.members.values()
            await until(lambda: len(engine.received) >= 2)
            assert member.state == "starting"  # {"ok":true} is no list of models
            engine.script = models
            await until(lambda: member.state == "ready")
            await ask(server.url, CHAT, {"model": "m"})
        targets = {request.target for request in engine.received}
        assert {"/base/health", "/base/v1/models", f"/base{CHAT}"} <= targets
