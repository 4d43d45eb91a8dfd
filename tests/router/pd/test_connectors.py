"""What each leg says, byte for byte where an engine reads it so."""

from __future__ import annotations

import random
import uuid
from typing import Any

import pytest

from kvroute.config_pd import PdConfig
from kvroute.router.pd.connector import CannotHandOver, Connector, Pair
from kvroute.router.pd.connectors.decode_first import DecodeFirstConnector
from kvroute.router.pd.connectors.fields import CLIENT_FIELDS
from kvroute.router.pd.connectors.nixl import ASK, NixlConnector
from kvroute.router.pd.connectors.sglang import MAX_ROOM, SGLangConnector
from kvroute.router.pd.connectors.shared_storage import SharedStorageConnector
from kvroute.router.pd.registry import connector_names, make_connector
from tests.router.pd.pairs import member, pair

CONFIG = PdConfig()
HANDOFF = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2]],
    "remote_engine_id": "e",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "something_new": {"kept": True},
}
ROOM_FIELDS = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


# --- NIXL ------------------------------------------------------------------------------------------


async def test_nixl_asks_prefill_to_keep_and_gives_decode_its_answer_verbatim() -> None:
    nixl, legs = NixlConnector(CONFIG), pair(prefill_rank=1, decode_rank=0)
    assert await nixl.prepare(legs) is None
    prefill = nixl.prefill_leg(legs)
    assert prefill.fields == {
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
    }
    assert prefill.headers == ((b"X-data-parallel-rank", b"1"),)
    decode = nixl.decode_leg(legs, nixl.handoff({"id": "x", "kv_transfer_params": HANDOFF}))
    assert decode.fields == {"kv_transfer_params": HANDOFF}
    assert decode.headers == ((b"X-data-parallel-rank", b"0"),)


@pytest.mark.parametrize(
    ("params", "fault"),
    [
        (None, "no kv_transfer_params"),
        ("text", "no kv_transfer_params"),
        ([HANDOFF], "no kv_transfer_params"),
        (ASK, "no kv_transfer_params with do_remote_prefill"),
        ({"do_remote_prefill": True}, "have no remote_engine_id, remote_block_ids, remote_host, remote_port"),
        (HANDOFF | {"do_remote_prefill": "true"}, "no kv_transfer_params with do_remote_prefill"),
        (HANDOFF | {"remote_block_ids": []}, "have no remote_block_ids"),
        (HANDOFF | {"remote_port": None}, "have no remote_port"),
    ],
)
def test_nixl_refuses_an_answer_that_decode_could_not_use(params: Any, fault: str) -> None:
    with pytest.raises(CannotHandOver, match=fault):
        NixlConnector(CONFIG).handoff({"id": "x", "kv_transfer_params": params})


def test_nixl_is_released_by_a_request_that_decode_refuses() -> None:
    assert NixlConnector(CONFIG).release(pair(), HANDOFF) == (
        "/v1/completions",
        {"model": "kvroute-release", "prompt": "x", "max_tokens": 1, "kv_transfer_params": HANDOFF},
    )


# --- SGLang ----------------------------------------------------------------------------------------


def meetings(legs: Pair) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of both legs."""
    sglang = SGLangConnector(CONFIG)
    prefill, decode = sglang.prefill_leg(legs), sglang.decode_leg(legs, None)
    assert prefill.headers == decode.headers == ()
    return dict(prefill.fields), dict(decode.fields)


def test_sglang_meets_in_one_room_at_the_prefill_workers_host() -> None:
    prefill, decode = meetings(pair())
    assert prefill == decode
    room = prefill.pop("bootstrap_room")
    assert type(room) is int
    assert 0 <= room <= MAX_ROOM
    assert prefill == {"bootstrap_host": "10.0.0.1", "bootstrap_port": 8998}


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("http://[2001:db8::1]:8000", "[2001:db8::1]"),
        ("http://node-7.example:8000", "node-7.example"),
        ("https://10.0.0.9:443/prefix", "10.0.0.9"),
    ],
)
def test_sglang_writes_the_host_as_in_a_url_and_takes_the_workers_own_port(url: str, host: str) -> None:
    fields, _ = meetings(pair(member(url, bootstrap_port=9001)))
    assert (fields["bootstrap_host"], fields["bootstrap_port"]) == (host, 9001)


def test_sglang_gives_each_prompt_of_a_list_a_room_of_its_own() -> None:
    prefill, decode = meetings(pair(prompts=3))
    assert prefill == decode
    assert prefill["bootstrap_host"] == ["10.0.0.1"] * 3
    assert prefill["bootstrap_port"] == [8998] * 3
    assert len(set(prefill["bootstrap_room"])) == 3
    assert meetings(pair(prompts=1))[0]["bootstrap_host"] == ["10.0.0.1"]


def test_sglang_tells_each_leg_its_rank_and_decode_that_of_prefill() -> None:
    prefill, decode = meetings(pair(member("http://p:1", 4), prefill_rank=3, decode_rank=1))
    assert (prefill["routed_dp_rank"], decode["routed_dp_rank"]) == (3, 1)
    assert decode["disagg_prefill_dp_rank"] == 3
    assert "disagg_prefill_dp_rank" not in prefill
    assert prefill["bootstrap_room"] == decode["bootstrap_room"]


def test_sglang_finds_the_prefill_rank_in_the_room_too() -> None:
    rng = random.Random(seed := random.randrange(2**32))
    for _ in range(200):
        size = rng.choice([1, 2, 3, 7, 8, 64])
        rank, prompts = rng.randrange(size), rng.choice([None, 2])
        legs = pair(member("http://p:1", size), prefill_rank=rank, prompts=prompts)
        rooms = meetings(legs)[0]["bootstrap_room"]
        for room in rooms if prompts else [rooms]:
            assert room % size == rank, f"{seed=}"
            assert 0 <= room <= MAX_ROOM, f"{seed=}"


def test_a_room_near_the_upper_end_stays_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvroute.router.pd.connectors.sglang.number_of", lambda _id, _index: MAX_ROOM)
    room = meetings(pair(member("http://p:1", 5), prefill_rank=4))[0]["bootstrap_room"]
    assert MAX_ROOM - 5 < room <= MAX_ROOM
    assert room % 5 == 4


# --- a shared store --------------------------------------------------------------------------------


async def test_a_shared_store_needs_nothing_said() -> None:
    store, legs = SharedStorageConnector(CONFIG), pair()
    assert await store.prepare(legs) is None
    assert store.handoff({"choices": []}) is None
    for leg in (store.prefill_leg(legs), store.decode_leg(legs, None)):
        assert (leg.fields, leg.headers) == ({}, ())
    assert store.release(legs, None) is None
    ranked = pair(prefill_rank=2, decode_rank=1)
    assert store.prefill_leg(ranked).headers == ((b"X-data-parallel-rank", b"2"),)
    assert store.decode_leg(ranked, None).headers == ((b"X-data-parallel-rank", b"1"),)


def test_decode_first_asks_with_the_threshold_and_then_without() -> None:
    connector, legs = DecodeFirstConnector(PdConfig(cache_threshold=0.6)), pair(decode_rank=1, prefill_rank=2)
    first = connector.first_leg(b"/v1/chat/completions", legs)
    assert first is not None
    assert (first.fields, first.headers) == (
        {"cache_hit_threshold": 0.6},
        ((b"X-data-parallel-rank", b"1"),),
    )
    prefill, decode = connector.prefill_leg(legs), connector.decode_leg(legs, None)
    assert prefill.fields == decode.fields == {"cache_hit_threshold": 0}
    assert (prefill.headers, decode.headers) == (
        ((b"X-data-parallel-rank", b"2"),),
        ((b"X-data-parallel-rank", b"1"),),
    )


@pytest.mark.parametrize(
    ("path", "prompts"), [(b"/v1/messages", None), (b"/v1/responses", None), (b"/v1/completions", 2)]
)
def test_decode_first_does_not_ask_where_it_could_not_read_the_answer(
    path: bytes, prompts: int | None
) -> None:
    assert DecodeFirstConnector(CONFIG).first_leg(path, pair(prompts=prompts)) is None


def chunk(delta: dict[str, Any] | None = None, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {
        "choices": [
            {"index": 0, "finish_reason": finish, **({} if delta is None else {"delta": delta})} | more
        ]
    }


@pytest.mark.parametrize(
    ("event", "declined"),
    [
        (chunk(finish="cache_threshold"), True),
        (chunk({"content": ""}, "cache_threshold"), True),
        ({"choices": [chunk()["choices"][0], chunk(finish="cache_threshold")["choices"][0]]}, True),
        (chunk({"role": "assistant", "content": ""}), None),
        (chunk(text=""), None),
        ({"choices": []}, None),
        (chunk({"role": "assistant", "content": "A"}), False),
        (chunk({"reasoning_content": "hm"}), False),
        (chunk({"tool_calls": [{"index": 0}]}), False),
        (chunk(text="A"), False),
        (chunk(text="", finish="stop"), False),
        (chunk(message={"content": None}, finish="length"), False),
        ({"error": {"message": "no"}}, False),
        ({"choices": "odd"}, False),
        ({"choices": ["odd"]}, None),
    ],
)
def test_decode_first_sees_in_an_answer_whether_it_is_one(
    event: dict[str, Any], declined: bool | None
) -> None:
    assert DecodeFirstConnector(CONFIG).declined(event) is declined


# --- all of them -----------------------------------------------------------------------------------


def ids_of(connector: Connector, legs: Pair) -> set[str]:
    """What joins the two legs, by name and value: none of it may come twice."""
    found = set()
    for leg in (connector.prefill_leg(legs), connector.decode_leg(legs, None)):
        rooms = leg.fields.get("bootstrap_room", [])
        found |= {f"room {room}" for room in (rooms if isinstance(rooms, list) else [rooms])}
        found |= {f"id {value!r}" for name, value in leg.headers if name == b"X-Request-Id"}
    return found


@pytest.mark.parametrize("name", ["sglang", "p2p-nccl"])
async def test_two_attempts_share_nothing_and_two_legs_of_one_share_all(name: str) -> None:
    connector = make_connector(name, CONFIG)
    prefill = member("http://p:1", p2p_address="p:21001")
    decode = member("http://d:1", p2p_address="d:22001")
    seen: set[str] = set()
    for attempt in range(300):
        prompts = 3 if attempt % 2 and connector.takes_lists else None
        legs = pair(prefill, decode, prompts=prompts)
        await connector.prepare(legs)
        found = ids_of(connector, legs)
        assert len(found) == (prompts or 1 if name == "sglang" else 1)
        assert found == ids_of(connector, legs)
        assert seen.isdisjoint(found)
        seen |= found


@pytest.mark.parametrize("name", connector_names())
def test_what_a_connector_reads_is_never_a_clients(name: str) -> None:
    assert make_connector(name, CONFIG).client_fields <= CLIENT_FIELDS


@pytest.mark.parametrize("name", ["nixl", "sglang", "shared-storage", "decode-first"])
def test_a_field_that_a_leg_adds_is_one_that_clients_cannot_send(name: str) -> None:
    connector, legs = make_connector(name, CONFIG), pair(prefill_rank=0, decode_rank=0)
    for leg in (connector.prefill_leg(legs), connector.decode_leg(legs, HANDOFF)):
        assert leg.fields.keys() <= connector.client_fields


@pytest.mark.parametrize(
    ("name", "concurrent", "whole", "lists", "short"),
    [
        ("nixl", False, True, False, True),
        ("mooncake", True, True, False, True),
        ("p2p-nccl", False, False, True, True),
        ("sglang", True, False, True, False),
        ("shared-storage", False, True, True, True),
        ("decode-first", False, True, True, True),
    ],
)
def test_how_each_goes_about_it(name: str, concurrent: bool, whole: bool, lists: bool, short: bool) -> None:
    one = make_connector(name, CONFIG)
    assert (one.is_concurrent, one.decode_takes_whole) == (concurrent, whole)
    assert (one.takes_lists, one.shortens_prefill) == (lists, short)


def test_ids_of_any_length_and_script_make_rooms() -> None:
    rooms = {
        meetings(pair(id=id))[0]["bootstrap_room"] for id in ("", "é" * 500, str(uuid.uuid4()), "a", "b")
    }
    assert len(rooms) == 5
