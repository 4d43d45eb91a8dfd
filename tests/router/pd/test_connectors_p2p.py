"""P2pNccl: addresses from the configuration or from the engines, which register over real ZMQ."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from kvroute.config_pd import PdConfig
from kvroute.router.pd.connector import CannotHandOver, Pair
from kvroute.router.pd.connectors import registrations as module
from kvroute.router.pd.connectors.p2p_nccl import P2pNcclConnector
from kvroute.router.pd.connectors.registrations import MAX_MESSAGE_BYTES, Registrations
from tests.kit import ask, until
from tests.router.pd.kit import bench
from tests.router.pd.pairs import member, pair

P_HTTP, D_HTTP = "10.0.0.1:8000", "10.0.0.2:8000"
P_ZMQ, D_ZMQ = "10.0.0.1:21001", "10.0.0.2:22001"
TO_DECODE = re.compile(r"___decode_addr_(.*):(\d+)")
TO_PREFILL = re.compile(r"___prefill_addr_(.*):(\d+)___")
"""As vLLM 0.10 reads an id: its prefill engines by the first, its decode engines by the second."""


def news(kind: str, http: str, zmq_address: str) -> bytes:
    return msgspec.msgpack.encode({"type": kind, "http_address": http, "zmq_address": zmq_address})


def request_id(connector: P2pNcclConnector, legs: Pair) -> str:
    """Of both legs, which say nothing else."""
    prefill, decode = connector.prefill_leg(legs), connector.decode_leg(legs, None)
    assert prefill.fields == decode.fields == {}
    assert prefill.headers == decode.headers
    ((name, value),) = prefill.headers
    assert name == b"X-Request-Id"
    return value.decode()


def listed(**fields: Any) -> Pair:
    prefill = member(f"http://{P_HTTP}", p2p_address=P_ZMQ)
    return pair(prefill, member(f"http://{D_HTTP}", p2p_address=D_ZMQ), **fields)


async def test_the_id_says_where_both_engines_are() -> None:
    connector, legs = P2pNcclConnector(PdConfig()), listed()
    await connector.prepare(legs)
    id = request_id(connector, legs)
    assert re.fullmatch(f"___prefill_addr_{P_ZMQ}___decode_addr_{D_ZMQ}_[0-9a-f]{{32}}", id)
    read = TO_DECODE.search(id), TO_PREFILL.search(id)
    assert [f"{found[1]}:{found[2]}" for found in read if found] == [D_ZMQ, P_ZMQ]


async def test_a_clients_words_are_not_in_the_id() -> None:
    connector, legs = P2pNcclConnector(PdConfig()), listed(id="a___decode_addr_evil.example:1_b")
    await connector.prepare(legs)
    assert "evil" not in request_id(connector, legs)


async def test_a_worker_that_is_not_known_is_named() -> None:
    connector, decode = P2pNcclConnector(PdConfig()), member(f"http://{D_HTTP}", p2p_address=D_ZMQ)
    with pytest.raises(CannotHandOver, match=f"no p2p_address, and no P engine of {P_HTTP} has registered"):
        await connector.prepare(pair(member(f"http://{P_HTTP}"), decode))


async def test_a_registration_of_the_other_role_does_not_count() -> None:
    connector = P2pNcclConnector(PdConfig())
    connector.registrations.take(news("D", P_HTTP, P_ZMQ))
    connector.registrations.take(news("D", D_HTTP, D_ZMQ))
    with pytest.raises(CannotHandOver, match=f"no P engine of {P_HTTP}"):
        await connector.prepare(pair())


async def test_both_legs_agree_though_a_registration_ends_between_them() -> None:
    connector, legs = P2pNcclConnector(PdConfig()), pair()
    connector.registrations.take(news("P", P_HTTP, P_ZMQ))
    connector.registrations.take(news("D", D_HTTP, D_ZMQ))
    await connector.prepare(legs)
    before = request_id(connector, legs)
    connector.registrations.close()
    assert request_id(connector, legs) == before
    connector.forget(legs.decode)
    with pytest.raises(CannotHandOver, match="was replaced"):
        connector.decode_leg(legs, None)


# --- the registration server -----------------------------------------------------------------------


class Now:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_registration_lasts_five_seconds_from_the_last() -> None:
    now = Now()
    registered = Registrations(now)
    registered.take(news("P", P_HTTP, P_ZMQ))
    now.now_s += 3
    registered.take(news("P", P_HTTP, "10.0.0.1:21002"))
    now.now_s += 4.9
    assert registered.address("P", P_HTTP) == "10.0.0.1:21002"
    now.now_s += 0.2
    assert registered.address("P", P_HTTP) is None


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b"", "undecodable"),
        (b"\xc1", "undecodable"),
        (msgspec.msgpack.encode(["P", P_HTTP, P_ZMQ]), "undecodable"),
        (msgspec.msgpack.encode({"type": "P", "http_address": P_HTTP}), "undecodable"),
        (msgspec.msgpack.encode({"type": "P", "http_address": P_HTTP, "zmq_address": 1}), "undecodable"),
        (news("X", P_HTTP, P_ZMQ), "undecodable"),
        (news("P", P_HTTP, "no port"), "address"),
        (news("P", P_HTTP, "a:1\r\nX-Evil: b:1"), "address"),
        (news("P", "\r\n:1", P_ZMQ), "address"),
    ],
)
def test_what_is_no_registration_is_counted(message: bytes, reason: str) -> None:
    registered = Registrations(Now())
    registered.take(message)
    assert registered.refused.values == {(reason,): 1}
    assert registered.address("P", P_HTTP) is None


def test_there_is_an_end_to_the_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ENTRIES", 3)
    now = Now()
    registered = Registrations(now)
    for port in range(1, 5):
        registered.take(news("P", f"h:{port}", P_ZMQ))
    assert registered.refused.values == {("full",): 1}
    registered.take(news("P", "h:1", D_ZMQ))
    assert registered.address("P", "h:1") == D_ZMQ
    now.now_s += 10
    registered.take(news("P", "h:4", P_ZMQ))
    assert registered.address("P", "h:4") == P_ZMQ
    assert registered.refused.values == {("full",): 1}


@pytest.fixture
async def registered() -> AsyncIterator[Registrations]:
    one = Registrations()
    await one.start("127.0.0.1", 0)
    yield one
    one.close()
    one.close()
    assert one.port is None


async def test_engines_register_by_zmq(registered: Registrations) -> None:
    context = zmq.asyncio.Context()
    try:
        for kind, http, address in (("P", P_HTTP, P_ZMQ), ("D", D_HTTP, D_ZMQ)):
            dealer = context.socket(zmq.DEALER)
            dealer.setsockopt_string(zmq.IDENTITY, address)
            dealer.connect(f"tcp://127.0.0.1:{registered.port}")
            await dealer.send(b"\xc1")
            await dealer.send(news(kind, http, address))
        await until(lambda: registered.address("P", P_HTTP) is not None)
        await until(lambda: registered.address("D", D_HTTP) is not None)
        assert registered.address("P", P_HTTP) == P_ZMQ
        assert registered.address("D", D_HTTP) == D_ZMQ
        assert registered.refused.values == {("undecodable",): 2}
    finally:
        context.destroy(linger=0)


async def test_a_message_without_end_does_not_come_in(registered: Registrations) -> None:
    context = zmq.asyncio.Context()
    try:
        huge, good = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
        for dealer in (huge, good):
            dealer.connect(f"tcp://127.0.0.1:{registered.port}")
        await huge.send(b"x" * (MAX_MESSAGE_BYTES + 1))
        await good.send(news("P", P_HTTP, P_ZMQ))
        await until(lambda: registered.address("P", P_HTTP) is not None)
        assert not registered.refused.values
    finally:
        context.destroy(linger=0)


async def test_what_was_refused_is_among_the_gateway_s_metrics() -> None:
    async with bench("p2p-nccl") as one:
        connector = one.server._pd._any_connector()
        assert isinstance(connector, P2pNcclConnector)
        for message in (b"", news("P", P_HTTP, "no port"), b"x"):
            connector.registrations.take(message)
        metrics = (await ask(one.server.url, "/metrics", method="GET")).body
        for line in (b'total{reason="undecodable"} 2.0\n', b'total{reason="address"} 1.0\n'):
            assert b"kvroute_pd_registrations_refused_" + line in metrics


async def test_a_port_that_is_taken_is_named(registered: Registrations) -> None:
    with pytest.raises(OSError, match="Address already in use") as caught:
        await Registrations().start("127.0.0.1", registered.port or 0)
    assert f"pd.register_port {registered.port} on 127.0.0.1: " in str(caught.value)


async def test_the_connector_listens_where_it_is_told_and_not_without(registered: Registrations) -> None:
    taken = P2pNcclConnector(PdConfig(register_port=registered.port))
    with pytest.raises(OSError, match=r"pd\.register_port"):
        await taken.start("127.0.0.1")
    taken.close()
    silent = P2pNcclConnector(PdConfig())
    await silent.start("127.0.0.1")
    assert silent.registrations.port is None
    silent.close()
