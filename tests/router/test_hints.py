"""What engines are told beside a request: the bytes that reach them, and what is counted when not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from msgspec.structs import replace

from kvroute.config_groups import WorkerConfig
from kvroute.loadtests.mock_engine import MockFleet, MockOptions
from kvroute.policies.costs.links import LINKS
from kvroute.policies.retention import Keep, Retention
from kvroute.router.dispatch import NamedPolicy
from kvroute.router.hints.closing import SessionCloser
from kvroute.router.hints.fields import HintOptions, fields_for
from kvroute.router.hints.hints import MAX_BODY_BYTES, Hints
from kvroute.router.hints.pulling import first_byte_limit_s, kv_source
from kvroute.router.metrics import Counter
from kvroute.router.server import GatewayServer
from kvroute.types import Candidate, Decision, EngineKind, Fleet, Prediction, Pull, RequestView, Worker
from tests.kit import CHAT, HANG_S, Answer, Engine, Received, Wire, answer_ok, ask, gateway, until
from tests.router.edge import EVENTS, Lasting, edge, stream

from .probed import member_of

SMALL = HintOptions(cpu_tier_ratio=1.0)
LONG = "one off " * 4096
"""Far above 4096 tokens, however they are estimated."""

Decide = Callable[[RequestView, Fleet], Decision]


class Scripted:
    """A policy that a test writes."""

    needs_prefix = True
    needs_seconds = True

    def __init__(self, decide: Decide) -> None:
        self._decide = decide

    def decide(self, request: RequestView, fleet: Fleet) -> Decision:
        return self._decide(request, fleet)


def first(_request: RequestView, fleet: Fleet) -> Decision:
    return Decision.whole(min(fleet.workers, key=lambda worker: worker.url), "first")


def give(server: GatewayServer, options: HintOptions, decide: Decide = first) -> Hints:
    """Switch a running gateway's hints on, and let `decide` choose."""
    dispatcher = server._gateway._services.dispatcher
    dispatcher._policy = NamedPolicy("scripted", Scripted(decide))
    dispatcher.needs_prefix = dispatcher._needs_seconds = True
    dispatcher._peer_link = LINKS["roce-100g"]
    hints = Hints(options, server.registry, server.metrics)
    server._gateway._services = replace(server._gateway._services, hints=hints)
    return hints


@contextlib.asynccontextmanager
async def hinting(
    engine: EngineKind, options: HintOptions, decide: Decide = first
) -> AsyncIterator[tuple[GatewayServer, Engine, Hints]]:
    """A gateway with hints before one engine of a kind."""
    async with (
        Engine() as worker,
        edge(worker, workers=[WorkerConfig(url=worker.url, engine=engine)]) as server,
    ):
        hints = give(server, options, decide)
        yield server, worker, hints
        await hints.closer.stop()


def body(prompt: str = LONG, **fields: Any) -> bytes:
    """Written as no serialiser writes it: what arrives is not made anew."""
    rest = "".join(f' , "{name}":{json.dumps(value)}' for name, value in fields.items())
    return (
        f'{{ "model" :"m",  "messages":[{{"role":"user","content":{json.dumps(prompt)}}}]{rest} }}'.encode()
    )


def counted(hints: Hints) -> dict[tuple[str, ...], float]:
    return dict(hints.set.values)


# --- vLLM and LMCache ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offloading", "hint"), [("native", "max_offload_tokens"), ("lmcache", "lmcache.max_offload_tokens")]
)
async def test_a_one_off_is_kept_out_of_a_small_tier(offloading: Any, hint: str) -> None:
    options = replace(SMALL, offloading=offloading)
    async with hinting(EngineKind.VLLM, options) as (server, worker, hints):
        sent = body()
        await ask(server.url, CHAT, sent)
        got = worker.received[0]
        assert got.body == b'{"kv_transfer_params":{"%b":0},' % hint.encode() + sent[1:]
        assert got.header("content-length") == str(len(got.body))
        assert counted(hints) == {("vllm", hint, "set"): 1}


async def test_what_was_used_before_may_be_offloaded_and_the_rest_may_not() -> None:
    async with hinting(EngineKind.VLLM, SMALL) as (server, worker, hints):
        await ask(server.url, CHAT, body("short"))
        await ask(server.url, CHAT, body("shared " * 1000))
        await ask(server.url, CHAT, body("shared " * 1000 + LONG))
        assert [b"kv_transfer_params" in got.body for got in worker.received] == [False, False, True]
        limit = worker.received[2].json()["kv_transfer_params"]["max_offload_tokens"]
        assert 1000 < limit <= 7000 / 4  # byte keys: four bytes a token
        assert counted(hints) == {("vllm", "max_offload_tokens", "set"): 1}


async def test_the_clients_word_on_its_session_decides() -> None:
    async with hinting(EngineKind.VLLM, SMALL) as (server, worker, _):
        await ask(server.url, CHAT, body(), "x-kvroute-session-continues: true")
        await ask(server.url, CHAT, body("short"), "x-kvroute-session-continues: false")
        assert b"kv_transfer_params" not in worker.received[0].body
        assert worker.received[1].json()["kv_transfer_params"] == {"max_offload_tokens": 0}


async def test_what_is_not_worth_loading_is_not_loaded() -> None:
    def unloaded(request: RequestView, fleet: Fleet) -> Decision:
        return replace(first(request, fleet), loads=False)

    async with hinting(EngineKind.VLLM, HintOptions(), unloaded) as (server, worker, hints):
        sent = body("short")
        await ask(server.url, CHAT, sent)
        assert worker.received[0].body == b'{"kv_transfer_params":{"max_load_tokens":0},' + sent[1:]
        hints.options = HintOptions(offloading="lmcache")
        await ask(server.url, CHAT, sent)
        assert worker.received[1].body == sent
        assert counted(hints) == {
            ("vllm", "max_load_tokens", "set"): 1,
            ("vllm", "max_load_tokens", "no_field"): 1,
        }


@pytest.mark.parametrize(
    ("reason", "sent", "headers"),
    [
        ("client_set", body(kv_transfer_params={"do_remote_decode": True}), ()),
        ("client_set", body(kv_transfer_params=None), ()),
        ("digest", body(), ("Content-Digest: sha-256=:AAAA:",)),
        ("body", b"\xef\xbb\xbf" + body(), ()),
        ("body", body().decode().encode("utf-16"), ()),
        ("body", body(top_p=math.nan), ()),
        ("body_too_large", body("x" * MAX_BODY_BYTES), ()),
    ],
)
async def test_a_body_with_no_place_for_hints_is_left_alone(
    reason: str, sent: bytes, headers: tuple[str, ...]
) -> None:
    async with hinting(EngineKind.VLLM, SMALL) as (server, worker, hints):
        await ask(server.url, CHAT, sent, *headers)
        assert worker.received[0].body == sent
        assert counted(hints) == {("vllm", "max_offload_tokens", reason): 1}


@pytest.mark.parametrize(("ratio", "reason"), [(None, "cpu_tier_unknown"), (1.01, "cpu_tier_large")])
async def test_a_large_tier_takes_one_offs_as_well(ratio: float | None, reason: str) -> None:
    async with hinting(EngineKind.VLLM, HintOptions(cpu_tier_ratio=ratio)) as (server, worker, hints):
        sent = body()
        await ask(server.url, CHAT, sent)
        assert worker.received[0].body == sent
        assert counted(hints) == {("vllm", "max_offload_tokens", reason): 1}


async def test_only_routes_that_take_the_fields_get_them() -> None:
    async with hinting(EngineKind.VLLM, SMALL) as (server, worker, hints):
        sent = json.dumps({"model": "m", "input": LONG}).encode()
        await ask(server.url, "/v1/embeddings", sent)
        assert worker.received[0].body == sent
        assert counted(hints) == {("vllm", "max_offload_tokens", "route"): 1}


async def test_an_engine_of_no_known_kind_gets_nothing() -> None:
    async with hinting(EngineKind.OPENAI, SMALL) as (server, worker, hints):
        sent = body(session_id="s")
        await ask(server.url, CHAT, sent)
        assert worker.received[0].body == sent
        assert counted(hints) == {}


async def test_a_retry_is_no_second_use_and_speaks_the_next_engines_language() -> None:
    async def refuse(_request: Received, wire: Wire) -> None:
        await wire.answer(503, b"{}")

    async with Engine(refuse) as one, Engine() as two:
        kinds = [
            WorkerConfig(url=one.url, engine=EngineKind.SGLANG),
            WorkerConfig(url=two.url, engine=EngineKind.VLLM),
        ]
        async with edge(one, two, workers=kinds) as server:

            def one_first(_request: RequestView, fleet: Fleet) -> Decision:
                workers = sorted(fleet.workers, key=lambda worker: worker.url != one.url)
                return Decision.whole(workers[0], "order")

            give(server, replace(SMALL, sglang="priority"), one_first)
            sent = body()
            assert (await ask(server.url, CHAT, sent)).status == 200
            assert one.received[0].body == b'{"priority":0,' + sent[1:]
            assert two.received[0].body == b'{"kv_transfer_params":{"max_offload_tokens":0},' + sent[1:]


def test_a_split_request_keeps_its_legs_parameters() -> None:
    decision = Decision(Candidate(Worker("p", "http://p:1"), Worker("d", "http://d:1")), "split")
    kept = Retention(Keep.LOW, 0, False, "one_off")
    fields = fields_for(EngineKind.VLLM, RequestView(), kept, decision, None, SMALL)
    assert fields.spliced() == {}
    assert fields.passed_over == [("max_offload_tokens", "split")]


# --- SGLang ----------------------------------------------------------------------------------------


async def test_a_session_is_named_and_closed_everywhere_at_its_end() -> None:
    turn = 0

    def in_turn(_request: RequestView, fleet: Fleet) -> Decision:
        nonlocal turn
        turn += 1
        return Decision.whole(sorted(fleet.workers, key=lambda worker: worker.url)[turn % 2], "turn")

    async with Engine() as one, Engine() as two:
        kinds = [WorkerConfig(url=each.url, engine=EngineKind.SGLANG) for each in (one, two)]
        async with edge(one, two, workers=kinds) as server:
            hints = give(server, HintOptions(), in_turn)
            sent, named = body("hello"), 'x-session-id: a"\xe9'
            await ask(server.url, CHAT, sent, named)
            await ask(server.url, CHAT, sent, named)
            for engine in (one, two):
                assert engine.received[0].body == '{"session_id":"a\\"é",'.encode() + sent[1:]
            await ask(server.url, CHAT, sent, named, "x-kvroute-session-continues: false")
            await until(lambda: hints.closes.value("closed") == 2)
            last = [got for engine in (one, two) for got in engine.received if got.target == CHAT]
            assert sum(got.body == sent for got in last) == 1  # what ends it is not held in its name
            for engine in (one, two):
                closing = [got for got in engine.received if got.target == "/close_session"]
                assert [(got.method, got.body) for got in closing] == [
                    ("POST", '{"session_id":"a\\"é"}'.encode())
                ]
                assert closing[0].header("content-length") == str(len(closing[0].body))
            assert counted(hints) == {
                ("sglang", "session_id", "set"): 2,
                ("sglang", "session_id", "ends"): 1,
            }


async def test_a_session_that_the_engine_will_not_close_holds_nothing_up() -> None:
    async def refuse_closing(request: Received, wire: Wire) -> None:
        await wire.answer(404 if request.target == "/close_session" else 200, b"{}")

    async with hinting(EngineKind.SGLANG, HintOptions()) as (server, worker, hints):
        worker.script = refuse_closing
        for session in ("a", "b"):
            await ask(server.url, CHAT, body("hi", session=1), f"x-session-id: {session}")
        end = "x-kvroute-session-continues: false"
        assert (await ask(server.url, CHAT, body("hi"), "x-session-id: a", end)).status == 200
        await until(lambda: hints.closes.value("refused") == 1)
        worker.script = Lasting()
        hints.closer._timeout_s = 0.05
        hints.session_ended("b")
        for session in ("c", "d"):
            hints.closer.close(member_of(server, worker), session)
        await until(lambda: hints.closes.value("dropped") == 2)  # not asked again and again
        assert hints.closes.value("timeout") == 1


async def test_closing_is_bounded_and_forgets_workers_that_left() -> None:
    async with Engine(Lasting()) as worker, gateway(worker) as server:
        member = member_of(server, worker)
        counter = Counter("closes", "", ("result",))
        closer = SessionCloser(counter, timeout_s=60, capacity=2)
        for session in "abcd":
            closer.close(member, session)
        assert (len(closer), counter.value("dropped")) == (2, 2)
        await until(lambda: len(worker.received) == 1)
        await closer.stop()
        assert len(closer) == 0
        await closer.stop()
        hints = Hints(HintOptions(), server.registry, server.metrics)
        hints.sessions.used("s", "nobody", 0.0)
        hints.session_ended("s")
        assert hints.closes.value("gone") == 1


@pytest.mark.parametrize(
    ("reason", "sent", "headers"),
    [
        ("no_session", body("hi"), ()),
        ("client_set", body("hi", session_id="mine"), ()),
        ("client_set", body("hi", session_params={"id": "mine"}), ("x-session-id: s",)),
        ("odd_session", body("hi"), (f"x-session-id: {'s' * 257}",)),
        ("odd_session", body("hi"), ("x-session-id: a\tb",)),
        ("one_off", body(), ("x-session-id: s",)),
    ],
)
async def test_sessions_that_are_not_named(reason: str, sent: bytes, headers: tuple[str, ...]) -> None:
    async with hinting(EngineKind.SGLANG, HintOptions()) as (server, worker, hints):
        await ask(server.url, CHAT, sent, *headers)
        assert worker.received[0].body == sent
        assert counted(hints) == {("sglang", "session_id", reason): 1}
        assert len(hints.sessions) == 0


async def test_sglangs_own_api_takes_the_fields_too() -> None:
    async with hinting(EngineKind.SGLANG, HintOptions()) as (server, worker, _):
        await ask(server.url, "/generate", b'{"text":"hi"}', "x-session-id: s")
        assert worker.received[0].body == b'{"session_id":"s","text":"hi"}'


async def test_priority_is_one_bit_and_never_the_clients() -> None:
    async with hinting(EngineKind.SGLANG, HintOptions(sglang="priority")) as (server, worker, hints):
        bodies = [body(), body("hi"), body("hi", priority=7)]
        for sent in bodies:
            await ask(server.url, CHAT, sent)
        assert [got.body for got in worker.received] == [
            b'{"priority":0,' + bodies[0][1:],
            b'{"priority":1,' + bodies[1][1:],
            bodies[2],
        ]
        assert counted(hints) == {("sglang", "priority", "set"): 2, ("sglang", "priority", "client_set"): 1}


# --- pulls -----------------------------------------------------------------------------------------

PEER = HintOptions(pull_floor_s=0.1, pull_max_s=5.0, p2p_port=5710)


def pulling(target: Engine, expected_s: float = 0.01) -> Decide:
    """Go to `target`, and pull from the other."""

    def decide(_request: RequestView, fleet: Fleet) -> Decision:
        by_url = {worker.url: worker for worker in fleet.workers}
        there = by_url.pop(target.url)
        return replace(Decision.whole(there, "pull"), pull=Pull(next(iter(by_url.values())), 1, expected_s))

    return decide


@contextlib.asynccontextmanager
async def pair(
    script: Any, options: HintOptions = PEER
) -> AsyncIterator[tuple[GatewayServer, Engine, Engine, Hints]]:
    """A worker that pulls from a second one."""
    async with Engine(script) as target, Engine() as peer:
        workers = [WorkerConfig(url=each.url, engine=EngineKind.VLLM) for each in (target, peer)]
        async with edge(target, peer, workers=workers, breaker={"failures": 1}) as server:
            yield server, target, peer, give(server, options, pulling(target))


async def streamed(server: GatewayServer, **fields: Any) -> Answer:
    return await ask(server.url, CHAT, body("hello", stream=True, **fields))


async def test_a_pull_names_the_peer_and_a_transfer_of_its_own() -> None:
    async with pair(stream(*EVENTS)) as (server, target, peer, hints):
        hints.options = replace(PEER, p2p={peer.url: "10.0.0.7:5711"})
        ids = set()
        for _ in range(2):
            assert (await streamed(server)).body == b"".join(EVENTS)
            source = target.received[-1].json()["kv_transfer_params"]["remote_kv_source"]
            ids.add(source.pop("kv_request_id"))
            assert source == {"remote_host": "10.0.0.7", "remote_port": 5711}
            assert target.received[-1].body.endswith(body("hello", stream=True)[1:])
        assert len(ids) == 2
        assert server.metrics.ttft_error.of().count == 0  # no worker is thought slow for a pull
        assert dict(hints.pulls.values) == {("pulled",): 2}
        assert counted(hints) == {("vllm", "remote_kv_source", "set"): 2}


class Withholding:
    """Answers nothing to a request that pulls; any other at once. `left` is set when the gateway leaves."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def __call__(self, request: Received, wire: Wire) -> None:
        if b"remote_kv_source" in request.body:
            await wire.eof(2 * HANG_S)
            self.left.set()
        else:
            await stream(*EVENTS)(request, wire)


async def test_a_late_pull_is_cut_and_the_same_worker_asked_without_it() -> None:
    script = Withholding()
    async with pair(script) as (server, target, peer, hints):
        answer = await streamed(server)
        assert (answer.status, answer.body) == (200, b"".join(EVENTS))
        await asyncio.wait_for(script.left.wait(), HANG_S)
        assert [b"remote_kv_source" in got.body for got in target.received] == [True, False]
        assert target.received[1].body == body("hello", stream=True)
        assert target.received[1].header("x-request-id") == target.received[0].header("x-request-id")
        assert not peer.received
        assert dict(hints.pulls.values) == {("late",): 1}
        assert not server.metrics.upstream_errors.values
        assert not server.metrics.retries.values


async def test_other_hints_stay_when_a_pull_is_given_up() -> None:
    async with pair(Withholding(), replace(PEER, cpu_tier_ratio=1.0)) as (server, target, _peer, hints):
        await ask(server.url, CHAT, body(stream=True))
        assert target.received[0].json()["kv_transfer_params"].keys() == {
            "max_offload_tokens",
            "remote_kv_source",
        }
        assert target.received[1].json()["kv_transfer_params"] == {"max_offload_tokens": 0}
        assert hints.pulls.value("late") == 1


@pytest.mark.parametrize("status", [400, 422, 500])
async def test_a_refused_pull_is_done_without(status: int) -> None:
    async def refuse(request: Received, wire: Wire) -> None:
        if b"remote_kv_source" in request.body:
            await wire.answer(status, b'{"error":"no"}')
        else:
            await stream(*EVENTS)(request, wire)

    async with pair(refuse) as (server, target, peer, hints):
        answer = await streamed(server)
        assert (answer.status, answer.body) == (200, b"".join(EVENTS))
        assert (len(target.received), len(peer.received)) == (2, 0)
        assert dict(hints.pulls.values) == {("refused",): 1}
        assert not server.metrics.upstream_errors.values


async def test_what_has_nothing_to_do_with_the_pull_takes_the_usual_path() -> None:
    async def overloaded(_request: Received, wire: Wire) -> None:
        await wire.answer(503, b"{}")

    async with pair(overloaded) as (server, target, peer, _hints):
        peer.script = stream(*EVENTS)

        def then_peer(request: RequestView, fleet: Fleet) -> Decision:
            return pulling(target)(request, fleet) if len(fleet.workers) == 2 else first(request, fleet)

        give(server, PEER, then_peer)
        assert (await streamed(server)).status == 200
        assert (len(target.received), len(peer.received)) == (1, 1)
        assert dict(server.metrics.retries.values) == {("status_503",): 1}


async def test_a_pull_that_cannot_be_watched_or_has_no_source_is_none() -> None:
    async with pair(answer_ok) as (server, target, _peer, hints):
        sent = body("hello")
        await ask(server.url, CHAT, sent)  # not streamed, of any length
        assert target.received[-1].body == sent
        await ask(server.url, CHAT, body("hello", max_tokens=1))
        assert b"remote_kv_source" in target.received[-1].body
        hints.options = replace(PEER, p2p_port=None)
        await streamed(server)
        await streamed(server, kv_transfer_params={})
        hints.options = PEER
        await streamed(server, kv_transfer_params={})
        assert dict(hints.pulls.values) == {
            ("unguarded",): 1,
            ("pulled",): 1,
            ("no_source",): 2,
            ("not_set",): 1,
        }
        assert hints.set.value("vllm", "remote_kv_source", "client_set") == 1
        give(server, PEER)
        await streamed(server)
        await until(lambda: server.metrics.ttft_error.of().count == 1)


def test_the_peer_as_its_engine_knows_it() -> None:
    def source(worker: Worker, options: HintOptions) -> tuple[str, int] | None:
        made = kv_source(Pull(worker, 64, 0.1), options)
        return None if made is None else (made["remote_host"], made["remote_port"])

    near = Worker("w", "http://10.0.0.1:8000")
    assert source(near, PEER) == ("10.0.0.1", 5710)
    assert source(near, HintOptions()) is None
    assert source(near, HintOptions(p2p={near.url: "kv:1"})) == ("kv", 1)
    assert source(near, HintOptions(p2p={near.url: "[fd00::1]:1"})) == ("fd00::1", 1)
    assert source(Worker("w", "http://[::1]:8000"), PEER) == ("::1", 5710)
    assert source(Worker("w", "unix:///run/w.sock"), PEER) is None
    assert source(Worker("w", near.url, data_parallel_size=2), PEER) is None


@pytest.mark.parametrize(
    ("ttft_s", "stream", "max_output_tokens", "limit_s"),
    [
        (0.5, True, None, 0.6 * 3 + 1),
        (0.5, False, 100, (0.6 + 2) * 3 + 1),
        (0.5, False, None, None),
        (8.0, True, None, 15.0),
        (13.8, True, None, 15.0),
        (14.0, True, None, None),
        (0.5, False, 10_000, None),
    ],
)
def test_the_limit_of_a_pull(
    ttft_s: float, stream: bool, max_output_tokens: int | None, limit_s: float | None
) -> None:
    view = RequestView(stream=stream, max_output_tokens=max_output_tokens)
    prediction = Prediction(ttft_s, 0.02, 0.0, 0.0)
    pull = Pull(Worker("w", "http://w:1"), 64, 0.1)
    found_s = first_byte_limit_s(pull, prediction, view, HintOptions())
    assert found_s == (None if limit_s is None else pytest.approx(limit_s))


async def test_mock_engines_pull_from_each_other() -> None:
    options = MockOptions(engines=2, speed=math.inf, kv_blocks=400, cpu_blocks=400)
    async with MockFleet(options) as fleet:
        target, peer = fleet.engines
        p2p = {each.url: f"127.0.0.1:{each.port}" for each in fleet.engines}
        sent = json.dumps({"model": "mock", "prompt": "a b c d " * 200, "max_tokens": 1}).encode()
        assert (await ask(peer.url, "/v1/completions", sent)).status == 200
        async with gateway(workers=list(p2p), ready=False) as server:
            await until(
                lambda: sum(m.worker.engine is EngineKind.VLLM for m in server.registry.members.values()) == 2
            )

            def decide(request: RequestView, fleet: Fleet) -> Decision:
                by_url = {worker.url: worker for worker in fleet.workers}
                pull = Pull(by_url[peer.url], 1000, 0.01)
                return replace(Decision.whole(by_url[target.url], "pull"), pull=pull)

            hints = give(server, HintOptions(p2p=p2p, pull_floor_s=1.0), decide)
            answer = await ask(server.url, "/v1/completions", sent)
            usage = answer.json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 17
            target.faults.pull_delay = 30.0
            target.scheduler.clear()
            answer = await ask(server.url, "/v1/completions", sent)
            assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert dict(hints.pulls.values) == {("pulled",): 1, ("late",): 1}
            outcomes = [entry.outcome for entry in target.journal.entries.values()]
            assert outcomes[-1] == "finished"
            target.scheduler.check_integrity()
