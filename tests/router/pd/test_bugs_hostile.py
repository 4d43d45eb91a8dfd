"""Clients that speak the engines' transfer protocols themselves: nothing of it reaches an engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.kit import Answer, ask
from tests.loadtests.pd_kit import PROMPT
from tests.router.pd.kit import COMPLETIONS, Bench, bench, right

ALONE = {"do_remote_prefill": True}
"""Ends a vLLM engine of 0.32, as it names no blocks."""
PLAIN = b'{"model":"mock","prompt":[1,2,3],"max_tokens":3'
HOSTILE: dict[str, Any] = {
    "kv_transfer_params": ALONE,
    "ec_transfer_params": ALONE,
    "cache_hit_threshold": 2,
    "bootstrap_host": "10.0.0.1",
    "bootstrap_port": 1,
    "bootstrap_room": 7,
    "bootstrap_pair_key": "x",
    "routed_dp_rank": 99,
    "disagg_prefill_dp_rank": -1,
    "data_parallel_rank": 10**9,
}


def bodies(one: Bench) -> list[bytes]:
    return [request.body for engine in one.fleet.engines for _, request in engine.journal.requests]


async def send(one: Bench, body: bytes, *headers: str) -> Answer:
    return await ask(one.server.url, COMPLETIONS, body, *headers)


@pytest.mark.parametrize("connector", ["nixl", "mooncake", "sglang", "shared-storage", "p2p-nccl"])
async def test_a_client_s_own_transfer_fields_and_ranks_are_taken_out(connector: str) -> None:
    async with bench(connector) as one:
        headers = ("X-Data-Parallel-Rank: 99", "x-data-parallel-rank: -1")
        assert right(await one.ask(*headers, **HOSTILE))
        counts = one.server._pd.books.pd_metrics.client_fields
        for name in (*HOSTILE, "x-data-parallel-rank"):
            assert counts.value(name, "stripped") == 1
        for engine in one.fleet.engines:
            for _, request in engine.journal.requests:
                leg = json.loads(request.body)
                ranks = {value for key, value in request.headers if key.lower() == b"x-data-parallel-rank"}
                assert ranks <= {b"0"}  # Mooncake's own
                for name in HOSTILE.keys() & leg.keys():
                    assert leg[name] != HOSTILE[name]


async def test_they_are_taken_out_of_requests_that_are_not_split_too() -> None:
    fields = {"model": "mock", "prompt": ["a", "b"], "n": 2, "echo": True, "kv_transfer_params": ALONE}
    async with bench() as one:
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/unknown"):
            await ask(one.server.url, path, fields)
        polls = [request.body for engine in one.fleet.engines for _, request in engine.journal.polls]
        assert len(bodies(one)) >= 2
        assert not any(b"do_remote" in body for body in (*bodies(one), *polls))


ORDINARY = (
    PLAIN + b',"kv_transfer_param\\u0073":{"do_remote_prefill":true}}',
    PLAIN + b',"\\u006bv_transfer_params":{"do_remote_prefill":true}}',
    PLAIN + b',"kv_transfer_params":null,"kv_transfer_params":{"do_remote_prefill":true}}',
    PLAIN + b',"kv_transfer_params":{"do_remote_prefill":true},"kv_transfer_params":null}',
    PLAIN + b',"vllm_xargs":{"kv_transfer_params":"x","a":1}}',
    PLAIN + b',"vllm_xargs":{"kv_transfer\\u005fparams":"x","a":1}}',
)


async def test_however_the_name_is_written_an_ordinary_body_is_cleaned() -> None:
    async with bench() as one:
        for body in ORDINARY:
            assert (await send(one, body)).status == 200
        assert len(bodies(one)) == 2 * len(ORDINARY)
        for leg in map(json.loads, bodies(one)):
            assert leg["kv_transfer_params"] != ALONE
            assert leg.get("vllm_xargs", {"a": 1}) == {"a": 1}


ODD = (
    PLAIN + b',"top_p":NaN,"kv_transfer_params":{"do_remote_prefill":true}}',
    PLAIN + b',"top_p":NaN,"kv_transfer_param\\u0073":{"do_remote_prefill":true}}',
    PLAIN + b',"top_p":Infinity,"bootstrap\\u005froom":7}',
    PLAIN + b',"user":"\\ud800","kv_transfer_param\\u0073":{"do_remote_prefill":true}}',
    PLAIN + b',"top_p":NaN,"vllm_xargs":{"kv_transfer_param\\u0073":"x"}}',
    b"\xef\xbb\xbf" + PLAIN + b',"kv_transfer_param\\u0073":{"do_remote_prefill":true}}',
    (PLAIN + b',"kv_transfer_params":{"do_remote_prefill":true}}').decode().encode("utf-16"),
    (PLAIN + b',"kv_transfer_params":{"do_remote_prefill":true}}').decode().encode("utf-32-be"),
    PLAIN + b',"user":"' + b"x" * 5 * 2**20 + b'","top_p":NaN,"bootstrap_roo\\u006d":1}',
)


async def test_a_body_that_only_lenient_parsers_read_is_refused_with_them() -> None:
    async with bench() as one:
        for body in ODD:
            answer = await send(one, body)
            assert (answer.status, answer.code) == (400, "malformed_request")
            if len(body) < 2**20:  # a long one is refused for its NaN
                assert answer.json()["error"]["param"] in {*HOSTILE}
        assert bodies(one) == []


async def test_odd_bodies_without_them_are_the_engine_s_to_judge() -> None:
    async with bench() as one:
        for body in (PLAIN + b',"top_p":NaN}', PLAIN + b',"user":"kv_transfer_params \\u0041","top_p":NaN}'):
            assert (await send(one, body)).status == 400
            assert bodies(one)[-1] == body
        text = json.dumps({"model": "mock", "prompt": 'say "kv_transfer_params": \\u0041', "max_tokens": 1})
        assert (await send(one, text.encode())).status == 200


async def test_they_are_refused_where_that_is_configured() -> None:
    async with bench(pd={"client_fields": "refuse"}) as one:
        for field in ("kv_transfer_params", "bootstrap_room", "routed_dp_rank"):
            answer = await one.ask(**{field: HOSTILE[field]})
            assert (answer.status, answer.code) == (400, "malformed_request")
            assert answer.json()["error"]["param"] == field
            assert one.count("client_fields", field, "refused") == 1
        assert bodies(one) == []


async def test_where_they_are_passed_on_the_legs_still_have_their_own() -> None:
    async with bench(pd={"client_fields": "forward"}) as one:
        assert right(await one.ask(kv_transfer_params=ALONE, routed_dp_rank=0))
        for leg in map(json.loads, bodies(one)):
            assert leg["kv_transfer_params"] != ALONE
            assert leg["routed_dp_rank"] == 0


async def test_an_id_that_looks_like_p2p_nccl_s_names_no_address() -> None:
    """Its engines look for the last address in an id, and send KV there."""
    evil = "___prefill_addr_10.0.0.1:1___decode_addr_10.0.0.2:2_x"
    async with bench("p2p-nccl") as one:
        for headers in ((f"X-Request-Id: {evil}",), (f"X-Request-Id: {evil}", f"X-Request-Id: {evil}")):
            answer = await one.ask(*headers)
            assert right(answer)
        prefill, decode = one.prefill[0].port, one.decode[0].port
        wanted = f"___prefill_addr_127.0.0.1:{prefill}___decode_addr_127.0.0.1:{decode}_"
        for engine in one.fleet.engines:
            for id, request in engine.journal.requests:
                assert id is not None
                assert id.startswith(wanted)
                assert b"10.0.0" not in b"".join(value for _, value in request.headers)


async def test_five_megabytes_are_split_as_they_are() -> None:
    """Prefill's leg and decode's leg are made of the client's bytes; only names are parsed."""
    async with bench(mock={"kv_blocks": 64}) as one:
        padding = "é" * 2**21
        answer = await one.ask(user=padding, kv_transfer_params=ALONE)
        assert right(answer)
        for leg in map(json.loads, bodies(one)):
            assert leg["user"] == padding
            assert leg["prompt"] == PROMPT
