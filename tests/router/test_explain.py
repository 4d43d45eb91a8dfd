"""Dry runs: who would get a request and why, with no effect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from kvroute.load import WorkerLoad
from kvroute.policies.costs.pace import DEFAULT_PRESET, Pace
from kvroute.policies.costs.speeds import PRESETS
from kvroute.policies.pricing import REQUEST_S
from kvroute.policies.registry import make_policy
from kvroute.router.explain import dry_run, show_workers
from kvroute.router.server import GatewayServer
from kvroute.types import Decision, Fleet, Hold, PrefixMatch, Priced, Rejection, RequestView, Worker
from tests.kit import CHAT, Answer, Client, Engine, ask, gateway, until

from .probed import Held, member_of

EXPLAIN = "/v1/route/explain"
PROMPT_TOKENS, MATCHED_TOKENS = 6000, 4096
SPEED = PRESETS[DEFAULT_PRESET]
SCALE = 0.3 / SPEED.prefill_s(PROMPT_TOKENS)
"""Makes the whole prompt a prefill of 300 ms."""


def loaded(queue_s: float) -> WorkerLoad:
    """A worker with so many seconds of prefill ahead."""
    load = WorkerLoad()
    load.charge(0.0, prefill_s=(queue_s - REQUEST_S) / SCALE)
    return load


def hot_and_cold() -> Fleet:
    """Hot holds most of the prompt behind a queue of 800 ms; cold has one of 10 ms and 300 ms to prefill."""
    workers = [Worker("hot~1", "http://hot:8000"), Worker("cold~2", "http://cold:8000")]
    matches = [PrefixMatch(*[MATCHED_TOKENS] * 4), PrefixMatch()]
    paces = [Pace(prefill_scale=SCALE) for _ in workers]
    return Fleet(0.0, workers, [loaded(0.8), loaded(0.01)], matches, paces=paces, output_tokens=100)


def test_a_hot_worker_behind_a_queue_loses_to_a_cold_one_and_the_answer_shows_it() -> None:
    fleet = hot_and_cold()
    request = RequestView("m", prompt_tokens=PROMPT_TOKENS)
    answer = dry_run("ttft", make_policy("ttft", {}), request, fleet)
    assert answer["chosen"]["prefill"] == answer["chosen"]["decode"] == "http://cold:8000"
    assert (answer["chosen"]["reason"], answer["chosen"]["matched_tokens"]) == ("moved", 0)
    cold, hot = answer["candidates"]
    assert answer["chosen"]["total_ms"] == cold["total_ms"] < hot["total_ms"]
    assert (cold["prefill"], cold["matched_tokens"]) == ("http://cold:8000", 0)
    assert cold["queue_wait_ms"] == pytest.approx(10, abs=0.01)
    assert 290 < cold["prefill_ms"] <= 300
    assert (hot["prefill"], hot["matched_tokens"]) == ("http://hot:8000", MATCHED_TOKENS)
    assert hot["queue_wait_ms"] == pytest.approx(800, abs=0.01)
    assert cold["ttft_ms"] < 310.1
    assert hot["ttft_ms"] > 800
    assert answer["why"] == (
        f"cold:8000: {cold['total_ms']:.0f} ms against hot:8000: {hot['total_ms']:.0f} ms;"
        " hot:8000 holds 4096 of 6000 tokens but has 800 ms of queue ahead"
    )


def test_without_the_queue_the_hot_one_is_chosen() -> None:
    fleet = hot_and_cold()
    idle = Fleet(0.0, fleet.workers, [WorkerLoad(), WorkerLoad()], fleet.matches, paces=fleet.paces)
    request = RequestView("m", prompt_tokens=PROMPT_TOKENS)
    answer = dry_run("ttft", make_policy("ttft", {}), request, idle)
    assert (answer["chosen"]["prefill"], answer["chosen"]["reason"]) == ("http://hot:8000", "cached")
    assert "hot:8000 holds 4096 of 6000 tokens, cold:8000 0; cold:8000 " in answer["why"]


def test_a_limit_that_is_broken_is_named() -> None:
    request = RequestView("m", prompt_tokens=PROMPT_TOKENS, ttft_limit_s=0.5)
    answer = dry_run("ttft", make_policy("ttft", {}), request, hot_and_cold())
    assert [candidate["infeasible"] for candidate in answer["candidates"]] == [None, "ttft"]
    strict = RequestView("m", prompt_tokens=PROMPT_TOKENS, ttft_limit_s=0.1)
    answer = dry_run("ttft", make_policy("ttft", {"admission": "slo"}), strict, hot_and_cold())
    assert answer["chosen"] is None
    assert answer["why"].startswith("rejected (ttft), to come back in 0.2 s: cold:8000: ")
    assert "no candidate keeps its limits (ttft)" in answer["why"]


def test_a_dry_run_takes_nobody_s_turn() -> None:
    policy = make_policy("ttft", {})
    request = RequestView("m", prompt_tokens=PROMPT_TOKENS)
    hot, cold = hot_and_cold().workers
    equal = Fleet(0.0, (hot, cold), (WorkerLoad(), WorkerLoad()))
    for expected in (hot, cold, hot):
        answers = [dry_run("ttft", policy, request, equal) for _ in range(3)]
        assert {answer["chosen"]["prefill"] for answer in answers} == {expected.url}
        assert answers[0]["why"].endswith("like the 1 other; equals go in turn")
        decision = policy.decide(request, equal)
        assert isinstance(decision, Decision)
        assert decision.candidate.prefill is expected


def test_a_policy_that_does_not_price_is_not_asked() -> None:
    answer = dry_run("round_robin", make_policy("round_robin", {}), RequestView("m"), hot_and_cold())
    assert (answer["chosen"], answer["candidates"]) == (None, [])
    assert answer["why"].startswith("policy round_robin does not price its candidates")


class Faulty:
    """A third party's policy that prices."""

    Options: ClassVar[type[Any]] = object
    needs_prefix: ClassVar[bool] = False

    def __init__(self, answer: Any, listed: Sequence[Priced] | None = None) -> None:
        self._answer, self._listed = answer, listed

    def price(self, _request: RequestView, _fleet: Fleet) -> Sequence[Priced]:
        if self._listed is None:
            raise RuntimeError("no idea")
        return self._listed

    def decide(self, _request: RequestView, _fleet: Fleet) -> Decision | Hold | Rejection:
        answer: Decision | Hold | Rejection = self._answer
        return answer


@pytest.mark.parametrize(("answer", "listed"), [(None, None), (None, []), ("nonsense", [])])
def test_a_policy_that_fails_fails_alone(answer: Any, listed: list[Priced] | None) -> None:
    found = dry_run("acme", Faulty(answer, listed), RequestView(), hot_and_cold())
    assert (found["chosen"], found["candidates"]) == (None, [])
    assert found["why"].startswith("policy acme failed: ")


def test_workers_are_shown_with_their_books_and_their_pace() -> None:
    fleet = hot_and_cold()
    loads = fleet.loads
    loads[0].charge(0.0, prompt_tokens=1000, uncached_tokens=900, output_tokens=100)
    fleet.paces[0].overhead_s = 0.002
    hot, cold = show_workers(fleet, [{"trust": "exact"}, {"trust": "load_only"}])
    assert (hot["id"], hot["url"], hot["role"]) == ("hot~1", "http://hot:8000", "both")
    assert (hot["requests"], hot["prefilling"], hot["pending_prefill_tokens"]) == (2, 2, 900)
    assert (hot["kv_tokens"], hot["context_tokens"]) == (1100, 0)
    assert hot["pending_ms"] == pytest.approx(798, abs=0.01)
    assert hot["pace"] == {
        "preset": DEFAULT_PRESET,
        "prefill_scale": round(SCALE, 4),
        "decode_scale": 1.0,
        "overhead_ms": 2.0,
        "match_reliability": 1.0,
    }
    assert hot["match"]["confirmed_tokens"] == MATCHED_TOKENS
    assert (cold["index"], cold["match"]["tokens"]) == ({"trust": "load_only"}, 0)
    bare = Fleet(0.0, fleet.workers, loads)
    hot, cold = show_workers(bare, [{}, {}])
    assert (hot["pace"], hot["match"]["tokens"]) == (None, 0)


# --- over HTTP -------------------------------------------------------------------------------------


async def explain(server: GatewayServer, body: Any, *headers: str, query: str = "") -> Answer:
    return await ask(server.url, EXPLAIN + query, body, *headers)


async def test_a_dry_run_charges_nothing_and_tells_and_counts_nothing() -> None:
    held = Held()
    async with (
        Engine(script=held) as a,
        Engine(script=held) as b,
        gateway(a, b, policy="ttft") as server,
    ):
        client = await Client.connect(server.url)
        await client.send(CHAT, {"model": "m", "messages": [{"role": "user", "content": "x" * 40_000}]})
        await until(lambda: held.count == 1)
        metrics = server.metrics
        counted = [repr(each.values) for each in (metrics.decisions, metrics.prompts, metrics.no_keys)]
        books = [repr(member.load) for member in server.registry.members.values()]
        body = {"model": "m", "prompt": "y" * 4000, "max_tokens": 50, "priority": 3}
        for _ in range(2):
            answer = await explain(
                server, body, "x-slo-ttft-ms: 250", "x-kvroute-tenant: t", "content-type: text/plain"
            )
            assert answer.status == 200
            found = answer.json()
            assert (found["path"], found["policy"]) == ("/v1/completions", "ttft")
            assert (found["model"], found["tenant"], found["priority"]) == ("m", "t", 3)
            assert (found["prompt_tokens"], found["max_output_tokens"]) == (1000, 50)
            assert found["limits"] == {"ttft_ms": 250.0, "itl_ms": None, "e2e_ms": None}
            assert (found["keys"], found["why_not_tokens"]) == ("bytes", "no_tokenizer")
            assert 0 < found["expected_output_tokens"] <= 50
            assert {worker["url"] for worker in found["workers"]} == {a.url, b.url}
            assert sorted(worker["requests"] for worker in found["workers"]) == [0, 1]
            assert [candidate["matched_tokens"] for candidate in found["candidates"]] == [0, 0]
            assert found["chosen"]["prefill"] == found["candidates"][0]["prefill"]
        assert [
            repr(each.values) for each in (metrics.decisions, metrics.prompts, metrics.no_keys)
        ] == counted
        assert [repr(member.load) for member in server.registry.members.values()] == books
        assert len(a.received) + len(b.received) == 1
        held.release()
        await client.receive()
        client.close()


async def test_round_robin_s_turn_stays() -> None:
    async with Engine() as a, Engine() as b, gateway(a, b) as server:
        workers = []
        for _ in range(4):
            found = (await explain(server, {"model": "m", "prompt": "x"})).json()
            assert (found["chosen"], len(found["workers"])) == (None, 2)
            workers.append((await ask(server.url, CHAT, {"model": "m"})).header("x-kvroute-worker"))
        assert workers[:2] == workers[2:]
        assert len(set(workers)) == 2


@pytest.mark.parametrize("given", [(), ("Authorization: Bearer x",)])
async def test_the_data_port_asks_for_its_key_and_the_admin_port_for_its_token(
    given: tuple[str, ...],
) -> None:
    admin = {"enabled": True, "token": "t0p"}
    body = {"model": "m", "prompt": "x"}
    async with Engine() as engine, gateway(engine, api_key="front", admin=admin) as server:
        assert server.admin_url is not None
        for url in (server.url, server.admin_url):
            refused = await ask(url, EXPLAIN, body, *given)
            assert (refused.status, refused.code) == (401, "invalid_api_key")
        assert (await ask(server.admin_url, EXPLAIN, body, "Authorization: Bearer t0p")).status == 200
        assert (await ask(server.admin_url, EXPLAIN, body, "Authorization: Bearer front")).status == 401
        assert (await ask(server.url, EXPLAIN, body, "Authorization: Bearer front")).status == 200
        assert (await ask(server.url, EXPLAIN, body, "Authorization: Bearer t0p")).status == 401
        assert not engine.received


async def test_requests_of_every_kind_are_answered_or_refused_as_the_request_would_be() -> None:
    limits = {"body_bytes": 400_000}
    async with Engine() as engine, gateway(engine, policy="ttft", limits=limits) as server:
        long = {"model": "m", "messages": [{"role": "user", "content": "x" * 300_000}]}
        found = (await explain(server, long)).json()
        assert (found["path"], found["prompt_tokens"] > 75_000) == (CHAT, True)
        for body, query, headers, status, message in (
            (
                {"model": "m"},
                "?path=/nope",
                (),
                400,
                "'/nope' carries no prompt; accepted: /generate, /v1/ch",
            ),
            (b"{", "", (), 400, "the body is not valid JSON"),
            ({"model": "m"}, "", ("x-slo-itl-ms: 0",), 400, "header x-slo-itl-ms is '0'"),
            ({"model": "other"}, "", (), 404, "The model `other` does not exist"),
            ({"model": "m", "prompt": "x" * 400_000}, "", (), 413, "limits.body_bytes"),
        ):
            answer = await explain(server, body, *headers, query=query)
            assert (answer.status, message in answer.body.decode()) == (status, True), answer.body
        odd = await explain(server, b'{"model": "m", "prompt": "x", "user": "\\ud800"}')
        assert odd.json()["session"] == "\ud800"
        assert (await ask(server.url, EXPLAIN, method="GET")).status == 405
        member = member_of(server, engine)
        server.registry.drain(member)
        assert (await explain(server, {"model": "m"})).status == 503
        assert not engine.received


async def test_dry_runs_count_among_the_requests_in_flight() -> None:
    held = Held()
    async with Engine(script=held) as engine, gateway(engine, limits={"requests": 1}) as server:
        client = await Client.connect(server.url)
        await client.send(CHAT, {"model": "m"})
        await until(lambda: held.count == 1)
        answer = await explain(server, {"model": "m", "prompt": "x"})
        assert (answer.status, answer.code) == (429, "overloaded")
        assert (await ask(server.url, "/v1/models", method="GET")).status == 200
        held.release()
        assert (await client.receive()).status == 200
        client.close()
        assert (await explain(server, {"model": "m", "prompt": "x"})).status == 200
