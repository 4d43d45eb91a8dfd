"""The gateway's own routes: the admin API, the model list, the bounds of /metrics, the decision log."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import httpx
import pytest
from pydantic import SecretStr

from kvroute.router.control import EXPLAIN_PATH, PUBLIC_PATHS, make_app, make_public_app
from kvroute.router.decision_log import DecisionLog
from kvroute.router.explain import Explainer
from kvroute.router.server import GatewayServer
from kvroute.router.workers import State
from kvroute.types import Decision, Outcome, Worker
from tests.kit import CHAT, Answer, Client, Engine, Received, Wire, ask, gateway, until

from .probed import Held, Probed, member_of

ADMIN = "/admin/workers"
ON = {"enabled": True}


async def admin(
    server: GatewayServer, path: str = "", body: Any = None, method: str = "GET", *headers: str
) -> Answer:
    assert server.admin_url is not None
    return await ask(server.admin_url, ADMIN + path, body, *headers, method=method)


# --- workers ---------------------------------------------------------------------------------------


async def test_listed_as_they_are() -> None:
    held = Held()
    metrics = 'vllm:num_requests_running{engine="0"} 2\nvllm:kv_cache_usage_perc{engine="0"} 0.5\n'
    async with Engine(script=held, metrics=metrics) as engine, gateway(engine, admin=ON) as server:
        member = member_of(server, engine)
        await until(lambda: member.load.reported_running == 2)
        client = await Client.connect(server.url)
        await client.send(CHAT, {"model": "m", "prompt": "x" * 400})
        await until(lambda: held.count == 1)
        assert (await admin(server)).json() == {
            "workers": [
                {
                    "id": member.worker.id,
                    "url": engine.url,
                    "state": "ready",
                    "breaker": "closed",
                    "engine": "vllm",
                    "role": "both",
                    "takes_whole": True,
                    "place": {"host": "", "rack": "", "zone": ""},
                    "salted": False,
                    "transfer": None,
                    "models": ["m"],
                    "block_size_tokens": None,
                    "data_parallel_size": 1,
                    "last_error": None,
                    "requests": 1,
                    "pending_prefill_tokens": member.load.pending_prefill_tokens,
                    "reported_running": 2,
                    "reported_waiting": None,
                    "kv_usage_ratio": 0.5,
                    "kv_event_sources": {},
                }
            ]
        }
        held.release()
        await client.receive()
        client.close()


async def test_added_at_run_time_it_becomes_ready_and_serves() -> None:
    async with Engine() as engine, gateway(admin=ON) as server:
        assert (await ask(server.url, CHAT, {"model": "m"})).status == 503
        added = await admin(server, body={"url": engine.url + "/"}, method="POST")
        assert (added.status, added.json()["state"], added.json()["url"]) == (201, "starting", engine.url)
        await until(lambda: member_of(server, engine).state is State.READY)
        assert (await ask(server.url, CHAT, {"model": "m"})).status == 200
        again = await admin(server, body={"url": engine.url}, method="POST")
        assert (again.status, again.code) == (409, "already_exists")
        assert again.json()["error"]["param"] == "url"
        assert added.json()["id"] in again.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "url", "url: Field required"),
        ({"url": 3}, "url", "url: Input should be a valid string"),
        ({"url": "ftp://a"}, "url", "has scheme 'ftp'; accepted: http://host:port"),
        ({"url": "http://a:8000@3"}, "url", "contains '@'"),
        ({"url": "http://a", "keys": 1}, "keys", "keys: "),
        ({"url": "http://a", "engine": "tgi"}, "engine", "'vllm', 'sglang' or 'openai'"),
        ([1], None, "body: "),
        (b"{", None, "body: JSON decode error"),
        (b"", None, "body: "),
    ],
)
async def test_a_body_that_is_wrong_names_the_field(body: Any, param: str | None, message: str) -> None:
    async with gateway(admin=ON) as server:
        answer = await admin(server, body=body, method="POST")
        error = answer.json()["error"]
        assert (answer.status, answer.code, error["param"]) == (400, "malformed_request", param)
        assert message in error["message"]
        assert not server.registry.members


async def test_drained_it_gets_nothing_more_but_finishes_what_it_has() -> None:
    held = Held()
    async with Engine(script=held) as engine, Engine() as other, gateway(engine, other, admin=ON) as server:
        client = await Client.connect(server.url)
        while held.count == 0:
            await client.send(CHAT, {"model": "m"})
            await until(lambda: held.count == 1 or other.received)
            if held.count == 0:
                await client.receive()
        member = member_of(server, engine)
        drained = await admin(server, f"/{quote(member.worker.id, safe='')}/drain", method="POST")
        assert (drained.status, drained.json()["state"], drained.json()["requests"]) == (202, "draining", 1)
        for _ in range(4):
            assert (await ask(server.url, CHAT, {"model": "m"})).header("x-kvroute-worker") == other.url
        held.release()
        assert (await client.receive()).status == 200
        client.close()
        await until(lambda: member.load.requests == 0)
        assert member.state is State.DRAINING, "drained is not removed"


async def test_an_id_with_a_path_is_addressed_url_encoded_or_plain(tmp_path: Path) -> None:
    socket_path = tmp_path / "an engine.sock"
    async with Engine(unix_path=str(socket_path)) as engine, gateway(admin=ON) as server:
        for encoded in (True, False):
            for url in (f"unix://{quote(str(socket_path))}", "http://127.0.0.1:9/base/v2"):
                added = await admin(server, body={"url": url}, method="POST")
                assert added.status == 201
                worker_id = added.json()["id"]
                assert "/" in worker_id
                path = "/" + quote(worker_id, safe="" if encoded else "/:~%")
                drained = await admin(server, path + "/drain", method="POST")
                if not encoded and "%" in worker_id:
                    assert drained.status == 404  # its own %20 has to be encoded once more
                    path = "/" + quote(worker_id, safe="")
                    drained = await admin(server, path + "/drain", method="POST")
                assert (drained.status, drained.json()["state"]) == (202, "draining")
                assert (await admin(server, path, method="DELETE")).status == 202
                assert not server.registry.members
        assert not engine.received


async def test_an_unknown_id_lists_the_known_ones() -> None:
    async with Engine() as engine, gateway(engine, admin=ON) as server:
        worker_id = member_of(server, engine).worker.id
        for path, method in (
            ("/a:1%235", "DELETE"),
            ("/a:1%235/drain", "POST"),
            (f"/{quote(engine.url, '')}", "DELETE"),
        ):
            answer = await admin(server, path, method=method)
            assert (answer.status, answer.code) == (404, "not_found")
            assert answer.json()["error"]["message"].endswith(f"known: {worker_id}")
        assert list(server.registry.members) == [worker_id]


async def test_a_token_guards_workers_and_nothing_else() -> None:
    async with gateway(admin={"enabled": True, "host": "0.0.0.0", "token": "t0p"}) as server:
        for headers in (
            [],
            ["Authorization: Bearer t0"],
            ["Authorization: t0p"],
            ["Authorization: Bearer \xe9"],
        ):
            for method, path in (("GET", ""), ("POST", ""), ("DELETE", "/x"), ("POST", "/x/drain")):
                answer = await admin(server, path, {"url": "http://a"}, method, *headers)
                assert (answer.status, answer.code) == (401, "invalid_api_key")
                assert answer.json()["error"]["type"] == "authentication_error"
                assert "t0p" not in answer.body.decode()
        assert not server.registry.members
        assert (await admin(server, "", None, "GET", "Authorization: Bearer t0p")).json() == {"workers": []}
        assert server.admin_url is not None
        assert (await ask(server.admin_url, "/livez", method="GET")).status == 200


async def test_the_admin_api_is_not_on_the_data_port() -> None:
    async with Engine() as engine, gateway(engine) as server:
        answer = await ask(server.url, ADMIN, method="GET")
        assert answer.json() == {"ok": True}
        assert engine.received[0].target == ADMIN


async def test_the_admin_port_can_be_switched_off() -> None:
    async with gateway(admin={"enabled": False}) as server:
        assert server.admin_url is None
        assert (await ask(server.url, "/livez", method="GET")).status == 200


# --- models ----------------------------------------------------------------------------------------


async def test_the_model_list_merges_cards_and_drops_no_field() -> None:
    first = {
        "id": "m",
        "object": "model",
        "owned_by": "vllm",
        "max_model_len": None,
        "permission": [{"id": "p", "allow_fine_tuning": False}],
    }
    second = {"id": "m", "object": "model", "max_model_len": 4096, "root": "/weights/m"}
    adapter = {"id": "lora-1", "object": "model", "parent": "m"}
    async with Probed(cards=[first]) as a, Probed(cards=[second, adapter]) as b, gateway(a, b) as server:
        answer = await ask(server.url, "/v1/models", method="GET")
        assert answer.json() == {
            "object": "list",
            "data": [{**first, "max_model_len": 4096, "root": "/weights/m"}, adapter],
        }
        server.registry.drain(member_of(server, b))
        assert (await ask(server.url, "/v1/models", method="GET")).json()["data"] == [first]


async def test_an_unknown_model_is_told_the_known_ones() -> None:
    async with Engine(models=("m", "n")) as engine, gateway(engine) as server:
        answer = await ask(server.url, CHAT, {"model": "nope"})
        assert answer.status == 404
        assert answer.json() == {
            "error": {
                "message": "The model `nope` does not exist. Known models: m, n",
                "type": "invalid_request_error",
                "param": "model",
                "code": "model_not_found",
            }
        }
        assert not engine.received


# --- bounds of /metrics ----------------------------------------------------------------------------


async def series(server: GatewayServer) -> set[str]:
    """Names and labels, without values."""
    text = (await ask(server.url, "/metrics", method="GET")).body.decode()
    return {line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")}


async def test_clients_cannot_make_series() -> None:
    async with Engine() as engine, gateway(engine, policy_budget_s=1e6) as server:

        async def send(number: int) -> None:
            client = await Client.connect(server.url)
            await client.ask(CHAT, {"model": f"made-up-{number}"})
            await client.ask(
                f"/v1/made-up-{number}", {"model": f"made-up-{number}"}, f"x-session-id: made-up-{number}"
            )
            await client.ask(f"/made-up-{number}", method="GET")
            await client.ask(
                CHAT, {"model": "m", "user": f"made-up-{number}"}, f"x-request-id: made-up-{number}"
            )
            await client.ask(CHAT, {"model": "m"}, method=f"MADEUP{number}" if number % 2 else "PUT")
            client.close()

        await send(0)
        await send(1)
        before = await series(server)
        for number in range(2, 100):
            await send(number)
        assert await series(server) == before
        assert not any("made-up" in name.lower() for name in before)


async def test_workers_that_left_leave_no_series() -> None:
    removed = asyncio.Event()

    async def die(_request: Received, wire: Wire) -> None:
        await wire.start_stream()
        await wire.chunk(b"data: {}\n\n")
        await removed.wait()
        removed.clear()
        wire.reset()

    async with Engine() as stable, gateway(stable, admin=ON) as server:
        await ask(server.url, CHAT, {"model": "m"})
        for _ in range(20):
            async with Engine(models=("doomed",), script=die) as engine:
                added = await admin(server, body={"url": engine.url}, method="POST")
                await until(lambda engine=engine: member_of(server, engine).state is State.READY)  # type: ignore[misc]
                member = member_of(server, engine)
                client = await Client.connect(server.url)
                await client.send(CHAT, {"model": "doomed", "stream": True})
                await client.head()
                await admin(server, f"/{added.json()['id']}", method="DELETE")
                assert member.state is State.DRAINING
                removed.set()
                while await client.chunk():
                    pass
                client.close()
                await until(lambda member=member: member.state is State.GONE)  # type: ignore[misc]
        named = {url for name in await series(server) for url in re.findall(r'worker="([^"]*)"', name)}
        assert named == {stable.url}


# --- the decision log ------------------------------------------------------------------------------


async def test_the_last_decisions_are_shown_to_who_has_the_token() -> None:
    decision_log = DecisionLog(1.0, "ttft", lambda: 0.0)
    worker = Worker("a~1", "http://a:1")
    for number in range(3):
        decision_log.decided(f"r{number}", [], Decision.whole(worker, "cold"))
        decision_log.ended(f"r{number}", Outcome(worker, 200))
    async with gateway() as server:
        app = make_app(
            server.registry,
            server.metrics,
            draining=lambda: False,
            explainer=cast(Explainer, None),
            admin_token=SecretStr("t0p"),
            decision_log=decision_log,
        )
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://admin") as http:
            assert (await http.get("/admin/decisions")).status_code == 401
            http.headers["authorization"] = "Bearer t0p"
            found = (await http.get("/admin/decisions", params={"limit": 2})).json()
            assert [entry["request_id"] for entry in found["decisions"]] == ["r2", "r1"]
            assert (found["ratio"], found["pending"], found["dropped"]) == (1.0, 0, 0)
            assert len((await http.get("/admin/decisions")).json()["decisions"]) == 3
            for limit in ("0", "-1", "x"):
                refused = await http.get("/admin/decisions", params={"limit": limit})
                error = refused.json()["error"]
                assert (refused.status_code, error["param"]) == (400, "limit")


async def test_the_data_port_s_app_has_no_operators_routes() -> None:
    async with gateway() as server:
        app = make_public_app(
            server.registry, server.metrics, draining=lambda: False, explainer=cast(Explainer, None)
        )
        assert app.openapi()["paths"].keys() == {path.decode() for path in PUBLIC_PATHS | {EXPLAIN_PATH}}
