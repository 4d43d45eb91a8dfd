"""Who serves which rank, asked of a real bootstrap server, and the two legs made of it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvroute.config_pd import PdConfig
from kvroute.router.pd.connector import CannotHandOver
from kvroute.router.pd.connectors.bootstrap import MAX_ANSWER_BYTES, bootstrap_url
from kvroute.router.pd.connectors.mooncake import MooncakeConnector
from kvroute.router.pd.connectors.sglang import SGLangConnector
from kvroute.router.pd.detecting import Transfer
from kvroute.router.workers import Member
from kvroute.types import Role
from tests.router.pd.bootstrap_server import BootstrapServer, bootstrap_server
from tests.router.pd.pairs import member, pair

WORKERS = {"0": {"0": "tcp://127.0.0.1:7000"}}
TWO = {
    "0": {"engine_id": "e0", "worker_addr": WORKERS},
    "1": {"engine_id": "e1", "worker_addr": WORKERS, "something_new": 1},
}
ONE = {"0": TWO["0"]}


@pytest.fixture
async def server() -> AsyncIterator[BootstrapServer]:
    async with bootstrap_server(TWO) as one:
        yield one


def prefill_at(server: BootstrapServer) -> Member:
    return member("http://127.0.0.1:1", bootstrap_port=server.port)


def connector(**config: Any) -> MooncakeConnector:
    return MooncakeConnector(PdConfig(**config))


async def test_both_legs_name_one_transfer_at_the_rank_where_prefill_is(server: BootstrapServer) -> None:
    mooncake, legs = connector(), pair(prefill_at(server), prefill_rank=1, decode_rank=2)
    handoff = await mooncake.prepare(legs)
    prefill, decode = mooncake.prefill_leg(legs), mooncake.decode_leg(legs, handoff)
    transfer_id = handoff["transfer_id"]
    assert re.fullmatch("xfer-[0-9a-f]{32}", transfer_id)
    assert prefill.fields == {
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": transfer_id,
        },
        "ignore_eos": True,
        "stop": None,
        "stop_token_ids": None,
    }
    assert decode.fields == {
        "kv_transfer_params": {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": f"http://127.0.0.1:{server.port}",
            "remote_engine_id": "e1",
            "transfer_id": transfer_id,
        }
    }
    assert prefill.headers == ((b"X-data-parallel-rank", b"1"),)
    assert decode.headers == ((b"X-data-parallel-rank", b"2"),)
    assert server.seen == [b"GET /query HTTP/1.1"]


async def test_without_a_chosen_rank_prefill_goes_where_decode_asks(server: BootstrapServer) -> None:
    mooncake, prefill = connector(), prefill_at(server)
    seen = set()
    for _ in range(64):
        legs = pair(prefill)
        handoff = await mooncake.prepare(legs)
        ((name, rank),) = mooncake.prefill_leg(legs).headers
        assert name == b"X-data-parallel-rank"
        assert handoff["remote_engine_id"] == f"e{int(rank)}"
        seen.add(rank)
    assert seen == {b"0", b"1"}  # one in 2^63 runs has them all at one rank
    assert len(server.seen) == 1


async def test_many_at_a_time_ask_once(server: BootstrapServer) -> None:
    mooncake, prefill = connector(), prefill_at(server)
    server.go.clear()
    waiting = [asyncio.ensure_future(mooncake.prepare(pair(prefill, prefill_rank=0))) for _ in range(20)]
    await server.asked.wait()
    server.go.set()
    found = await asyncio.gather(*waiting)
    assert {handoff["remote_engine_id"] for handoff in found} == {"e0"}
    assert len({handoff["transfer_id"] for handoff in found}) == 20
    assert len(server.seen) == 1


async def test_one_that_leaves_does_not_take_the_answer_from_the_others(server: BootstrapServer) -> None:
    mooncake, prefill = connector(), prefill_at(server)
    server.go.clear()
    first = asyncio.ensure_future(mooncake.prepare(pair(prefill)))
    second = asyncio.ensure_future(mooncake.prepare(pair(prefill)))
    await server.asked.wait()
    first.cancel()
    server.go.set()
    assert (await second)["remote_engine_id"] in ("e0", "e1")
    assert len(server.seen) == 1


async def test_a_forgotten_worker_is_asked_again(server: BootstrapServer) -> None:
    mooncake, prefill = connector(), prefill_at(server)
    legs = pair(prefill, prefill_rank=0)
    await mooncake.prepare(legs)
    mooncake.forget(prefill)
    with pytest.raises(CannotHandOver, match="was replaced before its request was sent"):
        mooncake.prefill_leg(legs)
    server.answer = {"0": {"engine_id": "new", "worker_addr": WORKERS}}
    assert (await mooncake.prepare(legs))["remote_engine_id"] == "new"
    assert len(server.seen) == 2


async def test_an_answer_that_comes_after_its_worker_was_forgotten_is_not_kept(
    server: BootstrapServer,
) -> None:
    mooncake, prefill = connector(), prefill_at(server)
    server.go.clear()
    asking = asyncio.ensure_future(mooncake.prepare(pair(prefill)))
    await server.asked.wait()
    mooncake.forget(prefill)
    server.go.set()
    with pytest.raises(CannotHandOver, match="was replaced while"):
        await asking
    server.answer = {"0": {"engine_id": "new", "worker_addr": WORKERS}}
    assert (await mooncake.prepare(pair(prefill)))["remote_engine_id"] == "new"


@pytest.mark.parametrize(
    ("answer", "status", "fault"),
    [
        ({}, 200, "no rank has registered"),
        ({"0": {"engine_id": "", "worker_addr": WORKERS}}, 200, "no rank has registered"),
        ({"0": {"worker_addr": WORKERS}}, 200, "engine_id"),
        ({"0": {"engine_id": 7}}, 200, "engine_id"),
        ({"first": {"engine_id": "e"}}, 200, "int"),
        ([], 200, "Expected `object`"),
        (b"<html>", 200, "malformed"),
        (TWO, 503, "status 503"),
        (b"[" + b" " * MAX_ANSWER_BYTES + b"]", 200, "more than 1048576 bytes"),
    ],
)
async def test_a_broken_answer_is_named_and_not_kept(
    server: BootstrapServer, answer: Any, status: int, fault: str
) -> None:
    mooncake, prefill = connector(), prefill_at(server)
    server.answer, server.status = answer, status
    with pytest.raises(
        CannotHandOver, match=f"http://127.0.0.1:{server.port}/query has no engine ids: .*{fault}"
    ):
        await mooncake.prepare(pair(prefill))
    server.answer, server.status = ONE, 200
    assert (await mooncake.prepare(pair(prefill)))["remote_engine_id"] == "e0"


async def test_a_rank_that_is_not_there_is_named_beside_those_that_are(server: BootstrapServer) -> None:
    with pytest.raises(CannotHandOver, match="has no rank 5; registered: 0, 1"):
        await connector().prepare(pair(prefill_at(server), prefill_rank=5))


async def test_a_bootstrap_server_that_says_nothing_is_given_up(server: BootstrapServer) -> None:
    server.go.clear()
    with pytest.raises(CannotHandOver, match="did not answer"):
        await connector(prepare_timeout_s=0.05).prepare(pair(prefill_at(server)))


async def test_nobody_at_the_bootstrap_port() -> None:
    async with bootstrap_server(ONE) as server:
        prefill = prefill_at(server)
    with pytest.raises(CannotHandOver, match="did not answer: ConnectError"):
        await connector().prepare(pair(prefill))


@pytest.mark.parametrize(
    ("answer", "end"),
    [
        ({"choices": [{"finish_reason": "stop"}]}, "stop"),
        ({"choices": [{"finish_reason": None}]}, "None"),
        ({"choices": []}, "None"),
        ({"choices": ["odd"]}, "None"),
        ({"stop_reason": "end_turn"}, "end_turn"),
        ({"status": "completed"}, "completed"),
        ({}, "None"),
    ],
)
def test_a_prefill_that_ended_by_itself_keeps_nothing(answer: dict[str, Any], end: str) -> None:
    with pytest.raises(CannotHandOver, match=f"ended by '?{end}'? and not by its limit"):
        connector().handoff(answer)


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": [{"finish_reason": "length", "stop_reason": None}]},
        {"stop_reason": "max_tokens"},
        {"status": "incomplete"},
    ],
)
def test_a_prefill_that_was_cut_short_is_as_it_should_be(answer: dict[str, Any]) -> None:
    assert connector().handoff(answer) is None


async def test_what_nobody_fetches_is_asked_for_by_a_request_that_decode_refuses(
    server: BootstrapServer,
) -> None:
    mooncake, legs = connector(), pair(prefill_at(server))
    handoff = await mooncake.prepare(legs)
    released = mooncake.release(legs, handoff)
    assert released is not None
    path, body = released
    assert path == "/v1/completions"
    assert body["kv_transfer_params"] == handoff
    assert body["kv_transfer_params"]["do_remote_prefill"] is True
    assert body["prompt"]


@pytest.mark.parametrize(
    ("url", "port", "bootstrap"),
    [
        ("http://10.0.0.1:8000", None, "http://10.0.0.1:8998"),
        ("https://10.0.0.1:8000", 9001, "http://10.0.0.1:9001"),
        ("http://[2001:db8::1]:8000", None, "http://[2001:db8::1]:8998"),
    ],
)
def test_the_bootstrap_server_is_at_the_workers_host(url: str, port: int | None, bootstrap: str) -> None:
    assert bootstrap_url(member(url, bootstrap_port=port), PdConfig()) == bootstrap


@pytest.mark.parametrize(
    ("configured", "told", "port"), [(9001, 9002, 9001), (None, 9002, 9002), (None, None, 8998)]
)
def test_the_port_is_the_workers_then_the_engines_then_the_fleets(
    configured: int | None, told: int | None, port: int
) -> None:
    prefill = member("http://10.0.0.1:8000", bootstrap_port=configured)
    prefill.transfer = Transfer("MooncakeConnector", "mooncake", Role.PREFILL, told)
    assert bootstrap_url(prefill, PdConfig()) == f"http://10.0.0.1:{port}"
    room = SGLangConnector(PdConfig()).prefill_leg(pair(prefill)).fields
    assert room["bootstrap_port"] == port
