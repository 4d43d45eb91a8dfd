"""The HTTP API: exact shapes, what counts for whom, and errors that name the field."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.conductor import mooncake
from kvroute.conductor.block_index import CPU, DISK, GPU
from kvroute.conductor.core import Conductor
from kvroute.conductor.index import Holder
from kvroute.conductor.keys import Namespace
from kvroute.conductor.mooncake import add_error_handlers, make_routes
from tests.conductor.still_feed import StillFeed, still_conductor, store

REGISTER: dict[str, Any] = {
    "endpoint": "tcp://1.1.1.1:5557",
    "replay_endpoint": "tcp://1.1.1.1:5558",
    "type": "vLLM",
    "modelname": "m",
    "lora_name": "",
    "tenant_id": "default",
    "instance_id": "p1",
    "block_size": 128,
    "dp_rank": 0,
    "additionalsalt": "w8a8",
}
PLAIN = {key: value for key, value in REGISTER.items() if key != "additionalsalt"}
IDS = list(range(1000, 1512))


class Api:
    """A client of the API over a conductor without sockets."""

    def __init__(self, conductor: Conductor, feed: StillFeed, client: httpx.AsyncClient) -> None:
        self.conductor, self.feed, self.client = conductor, feed, client

    async def post(self, path: str, body: Any) -> httpx.Response:
        return await self.client.post(path, content=body if isinstance(body, bytes) else json.dumps(body))

    async def register(self, port: int = 5557, **fields: Any) -> Holder:
        body = {**PLAIN, "endpoint": f"tcp://1.1.1.1:{port}", **fields}
        answer = await self.post("/register", body)
        assert answer.status_code == 200, answer.text
        key = f"{body['instance_id']}|{body['tenant_id']}|{body['dp_rank']}"
        return Holder(self.conductor.registrations[key].worker_id, body["dp_rank"])

    async def query(self, **fields: Any) -> Any:
        answer = await self.post("/query", {"model": "m", "token_ids": IDS, "block_size": 128, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()


@asynccontextmanager
async def opened() -> AsyncIterator[Api]:
    conductor, feed = still_conductor()
    app = FastAPI()
    app.include_router(make_routes(conductor))
    add_error_handlers(app)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://conductor") as client:
        yield Api(conductor, feed, client)
    await conductor.close()


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    async with opened() as api:
        yield api


async def test_the_documented_answers_to_the_byte(api: Api) -> None:
    answer = await api.post("/register", REGISTER)
    assert answer.status_code == 200
    assert answer.content == b'{"status":"registered successfully","instance_id":"p1"}'
    assert answer.headers["content-type"] == "application/json"
    answer = await api.post("/unregister", REGISTER)
    assert answer.content == b'{"status":"unregistered successfully","removed_instances":["p1|default|0"]}'

    one = await api.register(5557)
    other = await api.register(5559, dp_rank=1)
    store(api.conductor.index, one, GPU, IDS[:128])
    store(api.conductor.index, other, CPU, IDS[:256])
    answer = await api.post("/query", {"model": "m", "token_ids": IDS, "block_size": 128})
    assert answer.content == (
        b'{"default":{"p1":{"longest_matched":256,"GPU":128,"DP":{"0":128,"1":256},"CPU":256,"DISK":0}}}'
    )


async def test_a_service_follows_its_publisher(api: Api) -> None:
    holder = await api.register(block_size=32, dp_rank=3, lora_name="ad")
    (source,) = api.feed.workers[holder.worker_id]
    assert (source.endpoint, source.replay_endpoint, source.dp_rank, source.bind) == (
        "tcp://1.1.1.1:5557",
        "tcp://1.1.1.1:5558",
        3,
        False,
    )
    assert api.feed.namespaces[holder.worker_id] == Namespace(model="m", adapter="ad")
    assert api.conductor.index.block_tokens(holder) == 32
    await api.post("/unregister", {"instance_id": "p1", "dp_rank": 3})
    assert not api.feed.workers


async def test_tiers_are_counted_from_the_start_without_holes(api: Api) -> None:
    # Of three blocks: the first everywhere, the second in GPU and CPU, the third on disk alone.
    holder = await api.register(block_size=2)
    ids = [101, 15, 100, 55, 89, 63]
    index = api.conductor.index
    store(index, holder, GPU, ids, blocks=slice(2))
    store(index, holder, CPU, ids, blocks=slice(2))
    store(index, holder, DISK, ids, blocks=slice(0, 3, 2))
    assert await api.query(token_ids=ids, block_size=2) == {
        "default": {"p1": {"longest_matched": 6, "GPU": 4, "DP": {"0": 6}, "CPU": 4, "DISK": 2}}
    }


async def test_only_whole_blocks_count_and_nothing_is_zeros(api: Api) -> None:
    holder = await api.register()
    store(api.conductor.index, holder, GPU, IDS)
    zeros = {"longest_matched": 0, "GPU": 0, "DP": {"0": 0}, "CPU": 0, "DISK": 0}
    assert await api.query(token_ids=IDS[:127]) == {"default": {"p1": zeros}}
    assert await api.query(token_ids=[]) == {"default": {"p1": zeros}}
    assert (await api.query(token_ids=IDS[:300]))["default"]["p1"]["GPU"] == 256


async def test_a_query_sees_its_model_tenant_adapter_and_salt_only(api: Api) -> None:
    index = api.conductor.index
    base = await api.register(1, instance_id="base")
    tenant = await api.register(2, instance_id="tenant", tenant_id="t2")
    adapter = await api.register(3, instance_id="adapter", lora_name="ad")
    salted = await api.register(4, instance_id="salted", additionalsalt="w8a8")
    other = await api.register(5, instance_id="other", modelname="m2")
    for holder in (base, tenant, salted, other):
        store(index, holder, GPU, IDS[:128])
    store(index, base, GPU, IDS[:256], namespace=Namespace(model="m", adapter="ad"))
    store(index, adapter, GPU, IDS[:384], namespace=Namespace(model="m", adapter="ad"))
    store(index, base, GPU, IDS[:512], namespace=Namespace(model="m", cache_salt="w8a8"))

    async def longest(**fields: Any) -> dict[str, int]:
        (hits,) = (await api.query(**fields)).values()
        return {name: one["longest_matched"] for name, one in hits.items()}

    assert await longest() == {"base": 128}
    assert await longest(lora_name="") == {"base": 128}
    assert await longest(tenant_id="t2") == {"tenant": 128}
    assert await longest(lora_name="ad") == {"base": 256, "adapter": 384}
    assert await longest(lora_name="none") == {"base": 0}
    assert await longest(cache_salt="w8a8") == {"base": 512, "salted": 128}
    assert await longest(cache_salt="x") == {"base": 0}
    assert await longest(instance_id="base") == {"base": 128}
    assert await longest(model="m2") == {"other": 0}, "its blocks have the keys of another model"
    assert await api.query(model="m3") == {"default": {}}


@pytest.mark.parametrize(
    ("asked", "registered", "held", "counted"),
    [(64, 16, 80, 64), (16, 128, 256, 256), (48, 32, 64, 48), (128, 128, 128, 128), (1, 16, 48, 48)],
)
async def test_a_query_of_another_block_size(
    api: Api, asked: int, registered: int, held: int, counted: int
) -> None:
    holder = await api.register(block_size=registered)
    store(api.conductor.index, holder, GPU, IDS[:held])
    hits = (await api.query(block_size=asked))["default"]["p1"]
    assert (hits["longest_matched"], hits["GPU"], hits["DP"]) == (counted, counted, {"0": counted})


async def test_events_of_another_block_size_than_registered(api: Api) -> None:
    holder = await api.register(block_size=128)
    api.conductor.index.add_holder(holder, 16)
    store(api.conductor.index, holder, GPU, IDS[:128])
    assert (await api.query())["default"]["p1"]["GPU"] == 128


async def test_a_query_by_hash(api: Api) -> None:
    one = await api.register(1)
    other = await api.register(2, instance_id="p2")
    small = await api.register(3, instance_id="p3", block_size=64)
    index = api.conductor.index
    hashes = store(index, one, GPU, IDS, hash_seed=1)
    store(index, other, CPU, IDS[:256], hash_seed=1)
    store(index, small, GPU, IDS, hash_seed=1)
    body = {"model": "m", "seq_hashes": hashes[:3], "block_size": 128}
    answer = (await api.post("/query_by_hash", body)).json()
    assert answer == {
        "default": {
            "p1": {"longest_matched": 384, "GPU": 384, "DP": {"0": 384}, "CPU": 0, "DISK": 0},
            "p2": {"longest_matched": 256, "GPU": 0, "DP": {"0": 256}, "CPU": 256, "DISK": 0},
        }
    }
    assert api.conductor.counts.skipped == {"block_size": 1}
    older = {"model": "m", "block_hash": hashes[:3], "block_size": 128}
    assert (await api.post("/query_by_hash", older)).json() == answer
    unknown = {**body, "seq_hashes": [5, *hashes[:3]]}
    assert (await api.post("/query_by_hash", unknown)).json()["default"]["p1"]["longest_matched"] == 0
    none = {**body, "seq_hashes": []}
    assert (await api.post("/query_by_hash", none)).json()["default"]["p1"]["longest_matched"] == 0


async def test_a_store_counts_for_every_instance_of_its_group(api: Api) -> None:
    one = await api.register(1)
    await api.register(2, instance_id="p2")
    pool = await api.register(3, instance_id="pool", type="Mooncake")
    store(api.conductor.index, one, GPU, IDS[:128])
    store(api.conductor.index, pool, CPU, IDS[:384])
    assert (await api.query())["default"] == {
        "p1": {"longest_matched": 384, "GPU": 128, "DP": {"0": 128}, "CPU": 384, "DISK": 0},
        "p2": {"longest_matched": 384, "GPU": 0, "DP": {"0": 0}, "CPU": 384, "DISK": 0},
    }


async def test_services_and_the_global_view(api: Api) -> None:
    holder = await api.register(additionalsalt="w8a8")
    await api.register(5559, dp_rank=1, additionalsalt="w8a8")
    store(api.conductor.index, holder, GPU, IDS)
    services = (await api.client.get("/services")).json()
    assert services["count"] == 2
    assert services["services"][0] == {
        "Endpoint": "tcp://1.1.1.1:5557",
        "ReplayEndpoint": "tcp://1.1.1.1:5558",
        "Type": "vLLM",
        "ModelName": "m",
        "LoraName": "",
        "TenantID": "default",
        "InstanceID": "p1",
        "BlockSize": 128,
        "DPRank": 0,
        "AdditionalSalt": "w8a8",
        "Trust": "exact",
        "Reasons": [],
        "LastSeq": 7,
        "LagS": 0.25,
    }
    view = (await api.client.get("/global_view")).json()
    assert view["context_count"] == 1
    assert view["model_contexts"] == [
        {
            "model_name": "m",
            "lora_name": "",
            "block_size": 128,
            "additional_salt": "w8a8",
            "tenant_id": "default",
            "instances": {"p1": [0, 1]},
            "prefix_count": 4,
        }
    ]
    assert (view["blocks"], view["entries"], view["followed_engines"]) == (4, 4, 0)


async def test_a_lookup_lists_all_holders_with_tiers_and_freshness(api: Api) -> None:
    one = await api.register(1, block_size=16)
    other = await api.register(2, instance_id="p2", block_size=32, tenant_id="t2")
    index = api.conductor.index
    store(index, one, GPU, IDS[:64])
    store(index, one, CPU, IDS, blocks=slice(4, 8))
    hashes = store(index, other, DISK, IDS)
    body = {"model": "m", "token_ids": IDS}
    second = {
        "worker": one.worker_id,
        "instance_id": "p1",
        "tenant_id": "default",
        "dp_rank": 0,
        "block_tokens": 16,
        "tokens": {"GPU": 64, "CPU": 0, "DISK": 0, "GPU_CPU": 128},
        "longest": 128,
        "probable": 128,
        "last_seq": 7,
        "lag_s": 0.25,
        "trust": "exact",
        "reasons": [],
    }
    holders = (await api.post("/lookup", body)).json()["holders"]
    assert [(row["instance_id"], row["longest"]) for row in holders] == [("p2", 512), ("p1", 128)]
    assert holders[1] == second
    assert (await api.post("/lookup", {**body, "tenant_id": "default"})).json() == {"holders": [second]}
    by_key = {"model": "m", "keys": hashes[:2], "block_tokens": 32}
    assert [row["longest"] for row in (await api.post("/lookup", by_key)).json()["holders"]] == [64]


async def test_a_lookup_tells_salts_apart(api: Api) -> None:
    plain = await api.register(1)
    salted = await api.register(2, instance_id="p2", additionalsalt="s")
    index = api.conductor.index
    store(index, plain, GPU, IDS[:128])
    store(index, plain, GPU, IDS[:256], namespace=Namespace(model="m", cache_salt="s"))
    store(index, salted, GPU, IDS[:384])

    async def longest(**fields: Any) -> dict[str, int]:
        answer = await api.post("/lookup", {"model": "m", "token_ids": IDS, **fields})
        return {row["instance_id"]: row["longest"] for row in answer.json()["holders"]}

    assert await longest() == {"p1": 128}
    assert await longest(cache_salt="s") == {"p1": 256, "p2": 384}


async def test_registering_again(api: Api) -> None:
    first = await api.register()
    assert await api.register() == first, "the same again changes nothing"
    store(api.conductor.index, first, GPU, IDS)
    for conflict in ({"block_size": 64}, {"endpoint": "tcp://1.1.1.1:9"}, {"modelname": "m2"}):
        answer = await api.post("/register", {**PLAIN, **conflict})
        assert answer.status_code == 409
        assert answer.json() == {
            "error": "instance_id: p1|default|0 is registered with other fields; unregister it first"
        }
    answer = await api.post("/register", {**PLAIN, "dp_rank": 1})
    assert (answer.status_code, answer.json()["error"]) == (
        409,
        "endpoint: tcp://1.1.1.1:5557 is registered already, by p1|default|0",
    )
    assert (await api.post("/unregister", PLAIN)).status_code == 200
    again = await api.register()
    assert again != first
    assert (await api.query())["default"]["p1"]["longest_matched"] == 0


async def test_a_full_house(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvroute.conductor.core.MAX_SERVICES", 1)
    await api.register()
    answer = await api.post("/register", {**PLAIN, "instance_id": "p2", "endpoint": "tcp://1.1.1.1:9"})
    assert (answer.status_code, answer.json()["error"]) == (
        503,
        "1 services are registered, which is the limit",
    )


def _without(body: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key != name}


QUERY: dict[str, Any] = {"model": "m", "token_ids": [1, 2, 3], "block_size": 16}
HASHES: dict[str, Any] = {"model": "m", "seq_hashes": [1, 2], "block_size": 16}
LOOKUP: dict[str, Any] = {"model": "m", "token_ids": [1]}
BAD: list[tuple[str, Any, str]] = [
    ("/query", b"", "body: Invalid JSON"),
    ("/query", b"{", "body: Invalid JSON"),
    ("/query", b"\xff\xfe", "body: Invalid JSON"),
    ("/query", b"[]", "body: Input should be an object"),
    ("/query", b'"x"', "body: Input should be an object"),
    ("/register", b"null", "body: Input should be an object"),
    ("/register", [], "body: Input should be"),
    *(("/register", _without(PLAIN, name), f"{name}: Field required") for name in
      ("endpoint", "type", "modelname", "instance_id", "block_size", "dp_rank")),
    ("/register", {**PLAIN, "endpoint": "http://a:1"}, "endpoint: 'http://a:1' cannot be used; accepted: tcp://"),
    ("/register", {**PLAIN, "endpoint": "tcp://a:0"}, "endpoint: 'tcp://a:0' cannot be used"),
    ("/register", {**PLAIN, "endpoint": "tcp://a:65536"}, "endpoint: 'tcp://a:65536' cannot be used"),
    ("/register", {**PLAIN, "endpoint": "inproc://a"}, "endpoint: 'inproc://a' cannot be used"),
    ("/register", {**PLAIN, "endpoint": ""}, "endpoint: is empty"),
    ("/register", {**PLAIN, "endpoint": "tcp://" + "a" * 600 + ":1"}, "endpoint: String should have at most"),
    ("/register", {**PLAIN, "replay_endpoint": "x"}, "replay_endpoint: 'x' cannot be used"),
    ("/register", {**PLAIN, "type": "TGI"}, "type: Input should be 'vLLM', 'SGLang' or 'Mooncake'"),
    ("/register", {**PLAIN, "block_size": 0}, "block_size: Input should be greater than or equal to 1"),
    ("/register", {**PLAIN, "block_size": "128"}, "block_size: Input should be a valid integer"),
    ("/register", {**PLAIN, "block_size": True}, "block_size: Input should be a valid integer"),
    ("/register", {**PLAIN, "block_size": 1.5}, "block_size: Input should be a valid integer"),
    ("/register", {**PLAIN, "dp_rank": -1}, "dp_rank: Input should be greater than or equal to 0"),
    ("/register", {**PLAIN, "dp_rank": 1024}, "dp_rank: Input should be less than 1024"),
    ("/register", {**PLAIN, "instance_id": ""}, "instance_id: String should have at least 1 character"),
    ("/register", {**PLAIN, "instance_id": "a|b"}, "instance_id: String should match"),
    ("/register", {**PLAIN, "instance_id": "a" * 257}, "instance_id: String should have at most 256"),
    ("/register", {**PLAIN, "cache_group": 1}, "cache_group: Input should be 0"),
    ("/register", {**PLAIN, "loraname": "x"}, "loraname: is no field; accepted: endpoint, replay_endpoint,"),
    ("/unregister", {}, "instance_id: Field required"),
    ("/unregister", {"instance_id": 5}, "instance_id: Input should be a valid string"),
    *(("/query", _without(QUERY, name), f"{name}: Field required") for name in QUERY),
    ("/query", {**QUERY, "token_ids": [1, "2"]}, "token_ids.1: Input should be a valid integer"),
    ("/query", {**QUERY, "token_ids": [1, 2, -1]}, "token_ids.2: must be from 0 to 4294967295, got -1"),
    ("/query", {**QUERY, "token_ids": [2**32]}, "token_ids.0: must be from 0 to 4294967295, got 4294967296"),
    ("/query", {**QUERY, "token_ids": [10**400]}, "token_ids.0: "),
    ("/query", {**QUERY, "token_ids": "abc"}, "token_ids: Input should be a valid array"),
    ("/query", {**QUERY, "block_size": 2**16 + 1}, "block_size: Input should be less than or equal to 65536"),
    ("/query", {**QUERY, "lora_id": 3}, "lora_id: Input should be less than or equal to -1"),
    ("/query", {**QUERY, "cache_salt": 3}, "cache_salt: Input should be a valid string"),
    ("/query_by_hash", _without(HASHES, "seq_hashes"), "body: exactly one of seq_hashes and block_hash"),
    ("/query_by_hash", {**HASHES, "block_hash": [1]}, "body: exactly one of seq_hashes and block_hash"),
    ("/query_by_hash", {**HASHES, "seq_hashes": [2**64]}, "seq_hashes.0: Input should be less than"),
    ("/query_by_hash", {**HASHES, "seq_hashes": [-1]}, "seq_hashes.0: Input should be greater than"),
    ("/lookup", {"model": "m"}, "body: exactly one of token_ids and keys"),
    ("/lookup", {"model": "m", "keys": [1]}, "body: block_tokens must be given with keys"),
    ("/lookup", {**LOOKUP, "block_tokens": 1}, "body: block_tokens must be given with keys, and only"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "error"), BAD)
async def test_a_bad_body_is_named(api: Api, path: str, body: Any, error: str) -> None:
    answer = await api.post(path, body)
    assert answer.status_code == 400
    assert list(answer.json()) == ["error"]
    assert answer.json()["error"].startswith(error)
    assert not api.conductor.registrations


async def test_what_is_not_there(api: Api) -> None:
    await api.register()
    answer = await api.post("/unregister", {**PLAIN, "dp_rank": 5})
    assert (answer.status_code, answer.json()) == (404, {"error": "service not found: p1|default|5"})
    for path, body in (("/query", QUERY), ("/query_by_hash", HASHES)):
        answer = await api.post(path, {**body, "instance_id": "p9"})
        assert (answer.status_code, answer.json()) == (
            404,
            {"error": "instance_id: p9 is not registered for default"},
        )
    answer = await api.client.get("/nowhere")
    assert (answer.status_code, answer.json()) == (404, {"error": "no such path: /nowhere"})


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/register", "POST"),
        ("PUT", "/query", "POST"),
        ("DELETE", "/unregister", "POST"),
        ("POST", "/services", "GET"),
        ("POST", "/global_view", "GET"),
    ],
)
async def test_a_wrong_method_is_told_the_right_one(api: Api, method: str, path: str, allowed: str) -> None:
    answer = await api.client.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    assert answer.json() == {"error": f"method {method} is not allowed; accepted: {allowed}"}


async def test_a_body_too_large_is_refused_before_it_is_whole(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake.QueryBody, "most_bytes", 1000)
    sent = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1
            yield b"x" * 100

    answer = await api.client.post("/query", content=chunks())
    assert (answer.status_code, answer.json()) == (413, {"error": "body: at most 1000 bytes are accepted"})
    assert sent < 20


async def test_a_body_that_does_not_come_is_given_up(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "BODY_WITHIN_S", 0.01)

    async def never() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    answer = await api.client.post("/query", content=never())
    assert (answer.status_code, answer.json()) == (400, {"error": "body: not complete within 0.01 s"})


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = sorted(
    {*REGISTER, *QUERY, *HASHES, *LOOKUP, "keys", "block_hash", "lora_id", "cache_salt", "block_tokens"}
)
PATHS = ["/register", "/unregister", "/query", "/query_by_hash", "/lookup"]
VALID: dict[str, dict[str, Any]] = {
    "/register": PLAIN,
    "/unregister": PLAIN,
    "/query": QUERY,
    "/query_by_hash": HASHES,
    "/lookup": LOOKUP,
}


@settings(max_examples=25)
@given(
    path=st.sampled_from(PATHS),
    changes=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3),
    raw=st.none() | st.binary(max_size=64) | VALUES,
)
def test_no_body_makes_it_fail(runner: asyncio.Runner, path: str, changes: dict[str, Any], raw: Any) -> None:
    async def send() -> None:
        async with opened() as api:
            await api.register(instance_id="known")
            body = {**VALID[path], **changes} if raw is None else raw
            data = body if isinstance(body, bytes) else json.dumps(body).encode("utf-8", "surrogatepass")
            answer = await api.post(path, data)
            assert answer.status_code in {200, 400, 404, 409}
            if answer.status_code != 200:
                assert list(answer.json()) == ["error"]
            assert len(api.conductor.registrations) <= 2
            api.conductor.index.check_integrity()

    runner.run(send())


async def test_a_registration_is_small(api: Api) -> None:
    answer = await api.client.post("/register", content=b" " * (64 * 2**10 + 1))
    assert (answer.status_code, answer.json()) == (413, {"error": "body: at most 65536 bytes are accepted"})


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{" + b",".join(b'"f%d":1' % n for n in range(200_000)) + b"}", "body: too many fields"),
        (
            b'{"model":"m","block_size":16,"token_ids":[' + b"null," * 500_000 + b"1]}",
            "token_ids.0: Input should be a valid integer",
        ),
    ],
)
async def test_a_body_of_faults_costs_no_more_than_its_first(api: Api, body: bytes, said: str) -> None:
    tracemalloc.start()
    try:
        answer = await api.client.post("/query", content=body)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert answer.status_code == 400
    assert answer.json()["error"].startswith(said)
    assert most_bytes < 10 * len(body)
