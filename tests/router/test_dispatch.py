"""Choice and charge through the gateway: policies, what stands in for them, limits."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from kvroute.config import ConfigError
from kvroute.config_groups import WorkerConfig
from kvroute.router.server import GatewayServer
from kvroute.router.workers import State
from tests.kit import CHAT, Client, Engine, Received, Wire, ask, fast_config, gateway, until

from .probed import Held, member_of

BODY = {"model": "m", "prompt": "x" * 4000}

POLICIES = """
import time
from dataclasses import dataclass
from kvroute.types import Candidate, Decision, Rejection, Worker

@dataclass(frozen=True)
class Options:
    what: str = "last"

class Acme:
    Options = Options
    needs_prefix = False

    def __init__(self, options):
        self.what = options.what

    def decide(self, request, fleet):
        if self.what == "last":
            return Decision.whole(max(fleet.workers, key=lambda w: w.url), "acme")
        if self.what == "raise":
            raise RuntimeError("no idea")
        if self.what == "stranger":
            return Decision.whole(Worker("x", "http://x:1"), "acme")
        if self.what == "none":
            return None
        if self.what == "hollow":
            return Decision(None, "acme")
        if self.what == "no reason":
            return Decision.whole(fleet.workers[0], ["acme"])
        if self.what == "no number":
            return Decision.whole(fleet.workers[0], "acme", None)
        if self.what == "reject":
            return Rejection("not now", retry_after_s=7)
        if self.what == "talk":
            self.turn = getattr(self, "turn", -1) + 1
            return Decision.whole(fleet.workers[0], f"turn{self.turn}" if self.turn else "a\\r\\nb: 0")
        if self.what == "slow":
            time.sleep(0.02)
        return Decision.whole(fleet.workers[0], "slow")
"""


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third party's distribution on the path, with an entry point of its own."""
    (tmp_path / "acme_policies.py").write_text(POLICIES)
    info = tmp_path / "acme_policies-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-policies\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kvroute.policies]\nacme = acme_policies:Acme\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "acme_policies", raising=False)


def acting(what: str) -> dict[str, Any]:
    return {"name": "acme", "options": {"what": what}}


@pytest.mark.usefixtures("acme")
async def test_a_third_party_policy_decides() -> None:
    async with Engine() as a, Engine() as b, gateway(a, b, policy=acting("last")) as server:
        for _ in range(4):
            answer = await ask(server.url, CHAT, BODY)
            assert answer.header("x-kvroute-worker") == max(a.url, b.url)
            assert answer.header("x-kvroute-decision") == "acme; reason=acme; matched_tokens=0"
        assert server.metrics.decisions.values == {("acme", "acme"): 4}


@pytest.mark.usefixtures("acme")
@pytest.mark.parametrize(
    ("what", "counted"),
    [
        ("raise", "error"),
        ("stranger", "bad_choice"),
        ("none", "bad_choice"),
        ("hollow", "bad_choice"),
        ("no reason", "bad_choice"),
        ("no number", "bad_choice"),
    ],
)
async def test_a_policy_that_fails_is_replaced_by_least_loaded_and_counted(what: str, counted: str) -> None:
    held = Held()
    async with (
        Engine(script=held) as a,
        Engine(script=held) as b,
        gateway(a, b, policy=acting(what)) as server,
    ):
        requests = [asyncio.create_task(ask(server.url, CHAT, BODY)) for _ in range(6)]
        await until(lambda: held.count == 6)
        assert [m.load.requests for m in server.registry.members.values()] == [3, 3]
        held.release()
        answers = await asyncio.gather(*requests)
        assert {answer.status for answer in answers} == {200}
        assert answers[0].header("x-kvroute-decision") == "acme; reason=fallback; matched_tokens=0"
        assert server.metrics.fallbacks.values == {("acme", counted): 6}


@pytest.mark.usefixtures("acme")
async def test_a_policy_over_its_budget_is_counted_and_in_the_end_set_aside() -> None:
    async with (
        Engine() as a,
        Engine() as b,
        gateway(a, b, policy=acting("slow"), policy_budget_s=0.005) as server,
    ):
        reasons = [(await ask(server.url, CHAT, BODY)).header("x-kvroute-decision") or "" for _ in range(8)]
        assert [reason.split("; ")[1] for reason in reasons] == ["reason=slow"] * 5 + ["reason=fallback"] * 3
        assert server.metrics.overruns.values == {("acme",): 5}
        assert server.metrics.fallbacks.values == {("acme", "paused"): 3}


@pytest.mark.usefixtures("acme")
async def test_a_rejection_tells_when_to_come_back() -> None:
    async with Engine() as engine, gateway(engine, policy=acting("reject")) as server:
        answer = await ask(server.url, CHAT, BODY)
        assert (answer.status, answer.code, answer.header("retry-after")) == (429, "rejected", "7")
        assert "not now" in answer.json()["error"]["message"]
        assert not engine.received


@pytest.mark.usefixtures("acme")
async def test_a_shadow_policy_is_counted_and_has_no_effect() -> None:
    async with Engine() as a, Engine() as b, gateway(a, b, shadow_policy=acting("last")) as server:
        used = [(await ask(server.url, CHAT, BODY)).header("x-kvroute-worker") for _ in range(10)]
        assert {used.count(a.url), used.count(b.url)} == {5}
        assert server.metrics.shadow.values == {("acme", "same"): 5, ("acme", "other"): 5}
        assert server.metrics.decisions.values == {("round_robin", "turn"): 10}


@pytest.mark.usefixtures("acme")
@pytest.mark.parametrize(
    ("what", "counted"),
    [("raise", "error"), ("reject", "rejected"), ("none", "other"), ("stranger", "other")],
)
async def test_a_shadow_policy_that_fails_harms_nobody(what: str, counted: str) -> None:
    async with Engine() as engine, gateway(engine, shadow_policy=acting(what)) as server:
        for _ in range(3):
            assert (await ask(server.url, CHAT, BODY)).status == 200
        assert server.metrics.shadow.values == {("acme", counted): 3}


@pytest.mark.usefixtures("acme")
async def test_a_slow_shadow_policy_is_set_aside() -> None:
    shadow = acting("slow")
    async with Engine() as engine, gateway(engine, shadow_policy=shadow, policy_budget_s=0.005) as server:
        for _ in range(20):
            assert (await ask(server.url, CHAT, BODY)).status == 200
        assert server.metrics.overruns.value("acme") == 5
        assert server.metrics.shadow.values == {("acme", "same"): 5, ("acme", "paused"): 15}


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("ronud_robin", "policy: unknown policy 'ronud_robin'; known: "),
        (
            {"name": "random", "options": {"sede": 1}},
            "policy: policy 'random' has no option 'sede'; accepted: ",
        ),
        ({"name": "random", "options": {"seed": "x"}}, "policy: policy 'random', option 'seed': "),
    ],
)
def test_a_policy_that_cannot_be_made_stops_the_start(policy: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GatewayServer(fast_config(policy=policy))
    assert str(caught.value).startswith(message)
    with pytest.raises(ConfigError) as caught:
        GatewayServer(fast_config(shadow_policy=policy))
    assert str(caught.value).startswith("shadow_" + message)


async def test_a_burst_sees_its_own_shadow() -> None:
    held = Held()
    async with (
        Engine(script=held) as a,
        Engine(script=held) as b,
        Engine(script=held) as c,
        Engine(script=held) as d,
        gateway(a, b, c, d, policy="least_loaded") as server,
    ):
        requests = [asyncio.create_task(ask(server.url, CHAT, BODY)) for _ in range(64)]
        await until(lambda: held.count == 64)
        assert [m.load.requests for m in server.registry.members.values()] == [16] * 4
        held.release()
        await asyncio.gather(*requests)


async def test_a_full_worker_leaves_its_share_to_others_and_a_full_fleet_refuses() -> None:
    held = Held()
    async with (
        Engine(script=held) as a,
        Engine(script=held) as b,
        gateway(a, b, limits={"requests_per_worker": 2}) as server,
    ):
        requests = [asyncio.create_task(ask(server.url, CHAT, BODY)) for _ in range(4)]
        await until(lambda: held.count == 4)
        assert (len(a.received), len(b.received)) == (2, 2)
        refused = await ask(server.url, CHAT, BODY)
        assert (refused.status, refused.code, refused.header("retry-after")) == (429, "overloaded", "1")
        assert "limits.requests_per_worker" in refused.json()["error"]["message"]
        held.release()
        assert {answer.status for answer in await asyncio.gather(*requests)} == {200}
        assert (await ask(server.url, CHAT, BODY)).status == 200


async def test_a_load_guard_stands_before_every_route() -> None:
    held = Held()
    async with (
        Engine(script=held) as a,
        Engine(script=held) as b,
        gateway(a, b, policy="least_loaded") as server,
    ):
        paths = [CHAT, "/generate", "/any/other/path", "/v1/embeddings", "/tokenize", "/x", "/y", "/z"]
        requests = [asyncio.create_task(ask(server.url, path, BODY)) for path in paths]
        await until(lambda: held.count == 8)
        assert (len(a.received), len(b.received)) == (4, 4)
        held.release()
        await asyncio.gather(*requests)


async def test_client_errors_do_not_take_a_worker_out_and_server_errors_do() -> None:
    answers: list[int] = []

    async def answer(_request: Received, wire: Wire) -> None:
        status = answers.pop(0) if answers else 200
        await wire.answer(status, b'{"error":{"message":"as told"}}')

    async with (
        Engine(script=answer) as engine,
        Engine() as other,
        gateway(engine, other, retry={"attempts": 1}, breaker={"failures": 5, "open_s": 30}) as server,
    ):
        breaker = member_of(server, engine).breaker
        answers += [400] * 20
        seen = [(await ask(server.url, CHAT, BODY)).status for _ in range(40)]
        assert (seen.count(400), seen.count(200)) == (20, 20)
        assert breaker.open_until_s is None
        answers += [500, 400] * 5
        seen = []
        while breaker.open_until_s is None:
            seen.append((await ask(server.url, CHAT, BODY)).status)
        assert (seen.count(500), seen.count(400)) == (5, 4)
        for _ in range(6):
            assert (await ask(server.url, CHAT, BODY)).header("x-kvroute-worker") == other.url


async def test_a_worker_that_joins_takes_its_share_of_sessions_and_moves_no_other() -> None:
    async with Engine() as a, Engine() as b, Engine() as c, Engine() as d, Engine() as new:
        async with gateway(a, b, c, d, policy="session") as server:
            client = await Client.connect(server.url)

            async def homes() -> list[str | None]:
                return [
                    (await client.ask(CHAT, {"model": "m"}, f"x-session-id: s{n}")).header("x-kvroute-worker")
                    for n in range(400)
                ]

            before = await homes()
            server.registry.add(WorkerConfig(url=new.url))
            await until(lambda: member_of(server, new).state is State.READY)
            after = await homes()
            client.close()
        moved = [home for was, home in zip(before, after, strict=True) if was != home]
        assert set(moved) == {new.url}
        assert 40 < len(moved) < 120


@pytest.mark.parametrize(
    "name",
    ["round_robin", "least_loaded", "prefix_affinity", "session"],  # those that draw lots cannot
)
async def test_a_policy_that_shadows_itself_always_agrees(name: str) -> None:
    async with (
        Engine() as a,
        Engine() as b,
        Engine() as c,
        gateway(a, b, c, policy=name, shadow_policy=name) as server,
    ):
        for turn in range(20):
            assert (await ask(server.url, CHAT, {"model": "m", "prompt": f"{turn % 7}" * 4000})).status == 200
        assert server.metrics.shadow.values == {(name, "same"): 20}


@pytest.mark.usefixtures("acme")
async def test_reasons_of_a_policy_are_few_and_plain() -> None:
    async with Engine() as engine, gateway(engine, policy=acting("talk")) as server:
        answers = [await ask(server.url, CHAT, BODY) for _ in range(40)]
        assert "reason=other; " in (answers[0].header("x-kvroute-decision") or "")  # CR LF is not plain
        reasons = {labels[1] for labels in server.metrics.decisions.values}
        assert len(reasons) == 33
        assert "other" in reasons
