"""Workers over TLS, and keys that belong to workers."""

from __future__ import annotations

import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvroute.config import ConfigError
from kvroute.config_groups import WorkerConfig
from kvroute.router.server import GatewayServer
from kvroute.router.workers import State
from tests.kit import CHAT, Engine, ask, fast_config, gateway, until

from .probed import Probed, member_of

BODY = {"model": "m"}


@dataclass(frozen=True)
class Certificate:
    """Signed by itself, so it is its own CA file."""

    certificate: Path
    key: Path

    @classmethod
    def make(cls, folder: Path, name: str) -> Certificate:
        made = cls(folder / f"{name}.pem", folder / f"{name}.key")
        options = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
        options += " -subj /CN=kvroute-test -addext subjectAltName=IP:127.0.0.1"
        subprocess.run(
            ["openssl", *options.split(), "-keyout", str(made.key), "-out", str(made.certificate)],
            check=True,
            capture_output=True,
        )
        return made

    def into(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.load_cert_chain(self.certificate, self.key)
        return context

    def context(self) -> ssl.SSLContext:
        return self.into(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def trusted(folder: Path) -> Certificate:
    return Certificate.make(folder, "trusted")


@pytest.fixture(scope="module")
def strange(folder: Path) -> Certificate:
    return Certificate.make(folder, "strange")


async def test_a_worker_whose_certificate_the_ca_file_vouches_for(trusted: Certificate) -> None:
    async with (
        Engine(ssl=trusted.context()) as engine,
        gateway(engine, upstream_ca_file=trusted.certificate) as server,
    ):
        answer = await ask(server.url, CHAT, BODY)
        assert (answer.status, answer.header("x-kvroute-worker")) == (200, f"https://127.0.0.1:{engine.port}")


async def test_a_certificate_that_turns_bad_is_a_502(trusted: Certificate, strange: Certificate) -> None:
    context = trusted.context()
    async with (
        Engine(ssl=context) as engine,
        gateway(
            engine,
            upstream_ca_file=trusted.certificate,
            health={"interval_s": 60, "metrics_interval_s": 60},
            timeouts={"upstream_keep_alive_s": 0.01},
        ) as server,
    ):
        strange.into(context)
        (member,) = server.registry.members.values()
        await until(lambda: member.pool.open_connections == 0)
        answer = await ask(server.url, CHAT, BODY)
        assert (answer.status, answer.code) == (502, "connect_failed")
        assert answer.json()["error"]["type"] == "upstream_error"
        assert "certificate verify failed" in answer.json()["error"]["message"]
        assert engine.received == []


async def test_plain_http_to_a_tls_port_and_the_reverse_never_get_ready(trusted: Certificate) -> None:
    async with Engine(ssl=trusted.context()) as tls, Engine() as plain:
        workers = [f"http://127.0.0.1:{tls.port}", f"https://127.0.0.1:{plain.port}"]
        limits = {"timeout_s": 0.2}  # neither end says anything
        async with gateway(
            ready=False, workers=workers, upstream_ca_file=trusted.certificate, health=limits
        ) as server:
            first, second = server.registry.members.values()
            await until(lambda: first.bad_probes >= 3 and second.bad_probes >= 3)
            assert (first.state, second.state) == (State.STARTING, State.STARTING)
            assert (await ask(server.url, CHAT, BODY)).status == 503


async def test_a_stranger_is_not_told_the_workers_key(strange: Certificate) -> None:
    async with Probed(ssl=strange.context()) as engine, gateway() as server:
        member = server.registry.add(WorkerConfig(url=engine.url, api_key="k3y"))  # type: ignore[arg-type]
        await until(lambda: member.bad_probes >= 3)
        assert member.state is State.STARTING
        assert engine.seen == []
        assert engine.received == []


@pytest.mark.parametrize("text", [None, "", "not a certificate"])
def test_a_ca_file_that_is_none_stops_the_start(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "ca.pem"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=f"^upstream_ca_file: {file}: "):
        GatewayServer(fast_config(upstream_ca_file=file))


async def test_a_workers_key_replaces_the_clients_and_goes_with_every_probe() -> None:
    async with Probed() as engine, Probed() as other:
        workers = [{"url": engine.url, "api_key": "k3y"}, other.url]
        async with gateway(engine, other, workers=workers) as server:
            for _ in range(2):
                answer = await ask(server.url, CHAT, BODY, "Authorization: Bearer mine")
                assert answer.status == 200
                assert "k3y" not in answer.raw.decode()
            assert engine.received[0].header("authorization") == "Bearer k3y"
            assert [name.lower() for name, _ in engine.received[0].headers].count(b"authorization") == 1
            assert other.received[0].header("authorization") == "Bearer mine"
            await until(lambda: bool(engine.targets("/metrics")) and bool(other.targets("/metrics")))
            assert {probe.header("authorization") for probe in engine.seen} == {"Bearer k3y"}
            assert {probe.header("authorization") for probe in other.seen} == {None}


async def test_the_gateways_own_key_is_not_passed_on() -> None:
    async with Engine() as engine, gateway(engine, api_key="g4te") as server:
        for headers in ([], ["Authorization: Bearer no"], ["Authorization: g4te"]):
            for path, method in ((CHAT, "POST"), ("/v1/models", "GET"), ("/any", "GET")):
                refused = await ask(server.url, path, BODY, *headers, method=method)
                assert (refused.status, refused.code) == (401, "invalid_api_key")
                assert refused.header("www-authenticate") == "Bearer"
        assert engine.received == []
        assert (await ask(server.url, CHAT, BODY, "Authorization: Bearer g4te")).status == 200
        assert engine.received[0].header("authorization") is None
        assert (await ask(server.url, "/readyz", method="GET")).status == 200
        member = member_of(server, engine)
        assert member.state is State.READY
