from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from kvroute.loadtests.mock_engine import MockFleet, MockOptions
from kvroute.loadtests.replay.answer import Request, predicted_ttft_s
from kvroute.loadtests.replay.bodies import Bodies, Form
from kvroute.loadtests.replay.gaps import Gaps
from kvroute.loadtests.replay.outcome import Counted, Lag, from_sending, notes, row
from kvroute.loadtests.replay.player import Played, Player
from kvroute.loadtests.replay.rounds import Named, Replay, named, rows
from kvroute.loadtests.replay.running import Access, Due, Run, check_jobs, run_in_loop
from kvroute.loadtests.replay.saving import save_trace
from kvroute.loadtests.replay.stream import MAX_EVENT_BYTES, TokenStream
from kvroute.loadtests.replay.target import ReplayError, Target
from kvroute.loadtests.results.measured import Limits, Measured
from kvroute.loadtests.simulator.sources import GeneratedSource
from kvroute.loadtests.traces.arrivals import arrivals
from kvroute.loadtests.traces.rows import Row, Trace
from kvroute.loadtests.traces.workloads import generate
from tests.kit import Engine, Received, Wire

from .virtual_time import run_virtually

CLOCKS = (
    *(f"kvroute.loadtests.replay.{name}" for name in ("player", "target", "running")),
    *(f"kvroute.router.{name}" for name in ("pool", "sweeper", "upstream")),
)
TOKEN = b'data: {"choices":[{"index":0,"text":" one","finish_reason":null}]}\n\n'
LAST = b'data: {"choices":[{"index":0,"text":" two","finish_reason":"length"}]}\n\n'
USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2,'
    b'"prompt_tokens_details":{"cached_tokens":4}}}\n\n'
)
DONE = b"data: [DONE]\n\n"


def chat(delta: dict[str, Any], finish: str | None = None) -> bytes:
    return b"data: " + orjson.dumps({"choices": [{"delta": delta, "finish_reason": finish}]}) + b"\n\n"


def request(due_s: float, output_tokens: int = 2) -> Request:
    return Request(due_s, "/v1/completions", b'{"prompt":"x"}', b"", 8, output_tokens)


# --- streams -----------------------------------------------------------------------------------------


def fed(*pieces: tuple[bytes, float]) -> TokenStream:
    stream = TokenStream(Gaps())
    for data, now_s in pieces:
        stream.feed(data, now_s)
    return stream


def test_events_with_tokens_are_told_from_those_around_them() -> None:
    stream = fed(
        (chat({"role": "assistant", "content": ""}), 1.0),
        (chat({"content": "a"}), 2.0),
        (chat({"content": ""}), 3.0),
        (chat({"reasoning_content": "b"}), 4.5),
        (chat({}, "length"), 9.0),
        (USAGE + DONE, 9.5),
    )
    assert (stream.events, stream.first_s, stream.last_s, stream.longest_gap_s) == (3, 2.0, 4.5, 1.5)
    assert stream.finished
    assert stream.done


def test_a_role_that_comes_with_text_is_a_token() -> None:
    assert fed((chat({"role": "assistant", "content": "a"}), 1.0)).events == 1


def test_events_are_the_same_wherever_reads_cut_them() -> None:
    body = TOKEN.replace(b"\n", b"\r\n") + TOKEN + LAST + USAGE + DONE
    for size in range(1, len(body)):
        stream = fed(*[(body[at : at + size], 1.0) for at in range(0, len(body), size)])
        assert (stream.events, stream.finished, stream.done) == (3, True, True), size


def test_a_body_without_events_is_given_up() -> None:
    stream = fed((b"x" * MAX_EVENT_BYTES, 1.0), (b"yy", 2.0), (TOKEN, 3.0))
    assert stream.endless
    assert stream.events == 0


def test_gaps_are_counted_to_half_a_percent() -> None:
    gaps, other = Gaps(), Gaps()
    for gap_s in (0.0, 0.0123, 0.0123):
        gaps.add(gap_s)
    other.add(2000.0)
    gaps.merge(other)
    (none_s, some_s, long_s), counts = gaps.table()
    assert counts == [1, 2, 1]
    assert none_s == 0.0
    assert some_s == pytest.approx(0.0123, rel=0.005)
    assert long_s > 990


def test_a_decision_foretells_the_first_token() -> None:
    said = b"ttft; reason=cheapest; total_ms=90.0; queue_ms=10.5; prefill_ms=20.0; cache_ms=5.0"
    assert predicted_ttft_s(said) == pytest.approx(0.0305)
    assert predicted_ttft_s(b"round_robin; reason=turn; matched_tokens=0") is None
    assert predicted_ttft_s(b"") is None
    assert predicted_ttft_s(b"theirs; queue_ms=1.2.3; total_ms=4") == pytest.approx(0.0012), (
        "no request is lost"
    )


# --- requests ----------------------------------------------------------------------------------------


def one_arrival(**fields: Any) -> Any:
    trace = Trace("t", 4, (Row(0.5, 6, 3, (7, 8), "s1"),))
    return arrivals(trace, 4, **fields)[0]


def made(form: Form, salt: int = 0) -> tuple[Request, Any]:
    due = Due(Trace("t", 4, (Row(0.5, 6, 3, (7, 8), "s1"),)), salt=salt)
    asked = Bodies(form, "m", due.prompts).request(one_arrival())
    return asked, json.loads(asked.body)


def test_a_request_of_ids_has_all_that_fixes_its_length() -> None:
    asked, body = made(Form())
    assert (asked.due_s, asked.path, asked.fields) == (0.5, "/v1/completions", b"x-session-id: s1\r\n")
    assert (asked.prompt_tokens, asked.output_tokens) == (6, 3)
    assert len(body.pop("prompt")) == 6
    assert body == {
        "model": "m",
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 3,
        "min_tokens": 3,
    }


@pytest.mark.parametrize(
    ("name", "sent"),
    [("user-7/a:b", b"user-7/a:b"), ("a\r\nx: 1", b"a%0D%0Ax:%201"), ("50%", b"50%25"), ("é", b"%C3%A9")],
)
def test_a_sessions_name_stays_one_header(name: str, sent: bytes) -> None:
    (arrival,) = arrivals(Trace("t", 4, (Row(0.5, 6, 3, (7, 8), name),)), 4)
    bodies = Bodies(Form(), "m", Due(Trace("t", 4, ())).prompts)
    assert bodies.request(arrival).fields == b"x-session-id: %b\r\n" % sent


def test_text_goes_as_a_prompt_or_as_a_chat() -> None:
    _, body = made(Form("completions", "text"))
    asked, chatted = made(Form("chat", "text"))
    assert asked.path == "/v1/chat/completions"
    assert chatted["messages"] == [{"role": "user", "content": body["prompt"]}]
    assert len(body["prompt"].split()) == 6


def test_another_salt_makes_other_prompts() -> None:
    assert made(Form(), 1)[1]["prompt"] != made(Form(), 2)[1]["prompt"]


@pytest.mark.parametrize(
    ("form", "said"),
    [(("rest", "ids"), "--api"), (("chat", "bytes"), "--prompts"), (("chat", "ids"), "--prompts text")],
)
def test_forms_that_do_not_exist(form: tuple[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Form(*form)


# --- playing -----------------------------------------------------------------------------------------


async def stream_ok(_received: Received, wire: Wire) -> None:
    await wire.start_stream("x-kvroute-worker: http://w1")
    await wire.chunk(TOKEN)
    await asyncio.sleep(0.25)
    await wire.chunk(LAST + USAGE + DONE)
    await wire.chunk(b"")


class Defective:
    """A target that raises what nobody foresaw."""

    async def ask(self, request: Request, epoch_s: float, gaps: Gaps) -> Measured:
        if request.due_s:
            raise KeyError("a defect")
        return Measured(0.0, 1, request.output_tokens, first_s=0.1, end_s=0.1)


async def test_a_defect_of_the_client_counts_as_a_failure_and_is_told() -> None:
    told: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
    asked = [Request(at_s, "/v1/completions", b"", b"", 7, 1) for at_s in (0.0, 0.001)]
    target: Any = Defective()
    played = await Player(target, 10).play(asked, loop.time())
    assert sorted((one.arrival_s, one.failure) for one in played.requests) == [
        (0.0, None),
        (0.001, "client_error"),
    ]
    assert [repr(error) for error in told] == ["KeyError('a defect')"]


async def play(
    engine: Engine, requests: list[Request], limit: int = 100, timeout_s: float = 60.0, stop_s: float = 0.0
) -> tuple[Played, Player]:
    loop = asyncio.get_running_loop()
    target = Target(engine.url, timeout_s)
    player = Player(target, limit)
    if stop_s:
        loop.call_later(stop_s, player.stop)
    try:
        return await player.play(requests, loop.time()), player
    finally:
        target.close()


def played(
    monkeypatch: pytest.MonkeyPatch, script: Any, requests: list[Request], **options: Any
) -> tuple[Played, Engine]:
    async def main() -> tuple[Played, Engine]:
        async with Engine(script) as engine:
            result, _ = await play(engine, requests, **options)
            return result, engine

    return run_virtually(main(), monkeypatch, *CLOCKS, "tests.kit.time")


def test_what_an_answer_is_measured_as(monkeypatch: pytest.MonkeyPatch) -> None:
    result, _ = played(monkeypatch, stream_ok, [request(0.5)])
    (one,) = result.requests
    assert one.arrival_s == 0.5
    assert one.sent_s == pytest.approx(0.5, abs=1e-3)
    assert one.first_s == pytest.approx(0.5, abs=1e-3)
    assert one.end_s == pytest.approx(0.75, abs=1e-3)
    assert one.longest_gap_s == pytest.approx(0.25, abs=1e-3)
    assert (one.prompt_tokens, one.output_tokens, one.cached_tokens) == (9, 2, 4)
    assert (one.worker, one.failure) == ("http://w1", None)
    assert sum(result.gaps.table()[1]) == 1
    assert result.other_length == 0


def test_requests_go_out_when_due_whatever_the_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that answers nobody for 10 s: closed loops would send once in that time."""

    async def late(received: Received, wire: Wire) -> None:
        await asyncio.sleep(max(0.0, 1010.0 - asyncio.get_running_loop().time()))
        await stream_ok(received, wire)

    due = [0.5 * number for number in range(20)]
    result, engine = played(monkeypatch, late, [request(due_s) for due_s in due])
    made = sorted(result.requests, key=lambda one: one.arrival_s)
    assert [one.sent_s for one in made] == [pytest.approx(due_s, abs=2e-3) for due_s in due]
    assert [one.ttft_s for one in made] == [pytest.approx(10 - due_s, abs=0.02) for due_s in due]
    assert result.most_in_flight == 20
    assert engine.connections == 20


def test_connections_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    result, engine = played(monkeypatch, stream_ok, [request(float(number)) for number in range(5)])
    assert [one.failure for one in result.requests] == [None] * 5
    assert engine.connections == 1


def test_what_is_over_the_limit_is_not_sent_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    result, engine = played(monkeypatch, stream_ok, [request(0.0), request(0.0), request(0.1)], limit=2)
    assert [one.failure for one in result.requests] == ["in_flight_limit", None, None]
    assert result.requests[0].sent_s is None
    assert result.requests[0].ttft_s == float("inf")
    assert len(engine.received) == 2
    assert any("--max-in-flight was reached" in note for note in notes("x", [result], 0))


def test_failures_have_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def script(_received: Received, wire: Wire) -> None:
        number = len(engine_seen)
        engine_seen.append(number)
        if number == 0:
            await wire.answer(429, b'{"error":{"message":"later"}}')
        elif number == 1:
            await wire.answer(500, b"oh")
        elif number == 2:
            await wire.start_stream()
            await wire.chunk(TOKEN)
            await wire.chunk(b"")
        elif number == 3:
            await wire.start_stream()
            await wire.chunk(TOKEN + b'data: {"error": {"message": "boom"}}\n\n')
            await wire.chunk(b"")
        elif number == 4:
            await wire.answer(200, b'{"choices":[]}')
        elif number == 5:
            await wire.start_stream()
            await wire.chunk(TOKEN)
            wire.reset()
        elif number == 6:
            wire.reset()
        else:
            await asyncio.sleep(1000)

    engine_seen: list[int] = []
    result, _ = played(monkeypatch, script, [request(float(number), 7) for number in range(8)], timeout_s=5.0)
    seen = [one.failure for one in result.requests]
    assert seen[:5] == ["http_429", "http_500", "cut_short", "stream_error", "no_token"]
    assert seen[5] == "upstream_died"
    assert seen[-1] == "timeout"
    assert [one.rejected for one in result.requests] == [True] + [False] * 7
    assert {one.output_tokens for one in result.requests} == {7}
    assert all(one.e2e_s == float("inf") for one in result.requests)


def test_an_answer_of_another_length_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    result, _ = played(monkeypatch, stream_ok, [request(0.0, 5)])
    assert result.other_length == 1
    assert result.requests[0].output_tokens == 2
    assert any("length" in note for note in notes("x", [result], 0))


def test_a_stop_keeps_what_was_measured_and_cuts_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    async def script(received: Received, wire: Wire) -> None:
        if len(scripted) == 1:
            await asyncio.sleep(100)
        scripted.append(1)
        await stream_ok(received, wire)

    scripted: list[int] = []
    result, engine = played(monkeypatch, script, [request(float(n)) for n in range(9)], stop_s=2.5)
    assert [one.failure for one in result.requests] == [None]
    assert result.cut == 2
    assert len(engine.received) == 3


async def test_a_target_that_is_none_says_so() -> None:
    async with Engine(models=()) as empty, Engine(models=("m",)) as other:

        async def refuse(_received: Received, wire: Wire) -> None:
            await wire.answer(404, b'{"error":"no such model"}')

        other.script = refuse
        gone = Target("http://127.0.0.1:1", 5)
        with pytest.raises(ReplayError, match=r"127.0.0.1:1: nobody listens"):
            await gone.model()
        with pytest.raises(ReplayError, match=r"no models.*--model"):
            await Target(empty.url, 5).model()
        target = Target(other.url, 5)
        assert await target.model() == "m"
        with pytest.raises(ReplayError, match=r"404 .*no such model.*--model, --api"):
            await target.check("/v1/completions", b"{}")
        target.close()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"url": "ftp://x"}, "--url"),
        ({"api_key": "\n"}, "--api-key"),
        ({"headers": ("a b: c",)}, "--header"),
        ({"headers": ("Content-Length: 3",)}, "--header: Content-Length is set"),
    ],
)
async def test_access_that_cannot_be(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ReplayError, match=said):
        Access(**{"url": "http://127.0.0.1:1", **given}).target()


def test_a_whole_replay_against_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes are where the trace says: the engine's cached tokens are those of an endless cache."""
    trace = generate("mixed", 300, 4.0, 2)
    due = Due(trace, scale=0.25, limit=40, salt=5)

    async def main() -> tuple[Played, bool]:
        options = MockOptions(speed=math.inf, kv_blocks=50_000, block_size_tokens=16)
        async with MockFleet(options) as fleet:
            run = Run(Access(fleet.urls[0]), Form(), "mock", due, warm_up=4)
            return await run_in_loop(run, asyncio.get_running_loop().time())

    result, stopped = run_virtually(main(), monkeypatch, *CLOCKS)
    assert not stopped
    assert [one.failure for one in result.requests] == [None] * 40
    cached = {one.arrival_s: one.cached_tokens for one in result.requests}
    seen: set[int] = set()
    for arrival in arrivals(trace, 16, scale=0.25)[:40]:
        keys = arrival.keys.keys
        known = next((at for at, key in enumerate(keys) if key not in seen), len(keys))
        limit = (arrival.view.prompt_tokens - 1) // 16
        assert cached[arrival.arrival_s] == 16 * min(known, limit)
        seen.update(keys)


# --- several targets and rounds ----------------------------------------------------------------------


def replay(**fields: Any) -> Replay:
    given: dict[str, Any] = {"targets": [], "source": GeneratedSource("chat", 50, 4.0), **fields}
    return Replay(**given)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"speed": 0.0}, "--speed must be positive, got 0"),
        ({"speed": 1e-300}, "--speed or --rate: the last request is due after .* s; 30 days is most"),
        ({"speed": -1.0}, "--speed"),
        ({"scale": 0.0}, "--scale"),
        ({"limit": 0}, "--limit"),
        ({"rounds": 0}, "--rounds"),
        ({"warm_up": 1.0}, "--warm-up"),
        ({"jobs": 0}, "--jobs"),
        ({"max_in_flight": 0}, "--max-in-flight"),
        ({"process": "tides"}, "--arrivals"),
        ({"targets": [Named("a", Access("x")), Named("a", Access("y"))]}, "--url: two of one name"),
    ],
)
def test_replays_that_cannot_be(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replay(**fields)


def test_rounds_have_other_requests_and_runs_other_prompts() -> None:
    asked = replay(targets=[Named("a", Access("x")), Named("b", Access("y"))], rounds=2, salt=100)
    dues = [asked.due(number, target) for number in range(2) for target in range(2)]
    assert [due.salt for due in dues] == [100, 101, 102, 103]
    assert [due.seed for due in dues] == [1, 1, 2, 2]
    assert list(dues[0].arrivals()) == list(dues[1].arrivals()) != list(dues[2].arrivals())


def test_targets_have_names() -> None:
    assert named("a=http://h:1/?x=2", None) == Named("a", Access("http://h:1/?x=2"))
    assert named("http://h:1", None).name == "h:1"
    assert named("http://h:1", "mine").name == "mine"


def run_of(ttfts_s: list[float], lag_s: float) -> Played:
    result = Played()
    for number, ttft_s in enumerate(ttfts_s):
        due_s = float(number)
        result.requests.append(
            Measured(
                due_s,
                100,
                11,
                "w",
                sent_s=due_s + lag_s,
                first_s=due_s + ttft_s,
                end_s=due_s + ttft_s + 0.1,
                gpu_tokens=25,
            )
        )
        for _ in range(10):
            result.gaps.add(0.01)
    return result


def test_a_row_has_the_rounds_means_and_the_lag_beside_them() -> None:
    about = {"speed": 2.0, "trace": "t", "warm_up": 0.1, "setting": {"url": "x"}}
    slow, fast = run_of([9.0, *[0.3] * 9], 0.001), run_of([9.0, *[0.1] * 9], 0.1)
    failed = Measured(10.0, 100, 11, failure="http_500", sent_s=10.0)
    fast.requests.append(failed)
    one, _ = row("r", [slow, fast], Limits(0.2, 0.02), about, 1)
    assert (one.policy, one.source, one.workers, one.seeds) == ("r", "live", 1, 2)
    assert one.ttft_ms.mean == pytest.approx(200.0)
    assert one.goodput == pytest.approx((0 + 0.9) / 2)
    assert one.token_hit_rate == pytest.approx(0.25)
    assert one.itl_ms.p50 == pytest.approx(10.0, rel=0.01)
    assert one.failed == pytest.approx(0.05)
    assert one.setting["failures"] == {"http_500": 1}
    assert one.setting["lag_ms"]["max"] == pytest.approx(100.0)
    assert [each["ttft_ms.p50"] for each in one.setting["rounds"]] == [
        pytest.approx(300.0),
        pytest.approx(100.0),
    ]
    said = notes("r", [slow, fast], 1)
    assert "p99 100.0" in said[0]
    assert said[1].endswith("mean/p50/p99: TTFT 149.5/299.0/inf ms, E2E 249.5/399.0/inf ms")
    assert "too slow for its own schedule" in said[2]
    assert said[3] == "r: failed: http_500 1"
    assert not any("warning" in note for note in notes("r", [slow], 1))


@pytest.mark.parametrize(("answered", "is_paired"), [(10, True), (9, False)])
def test_a_round_that_was_stopped_is_paired_with_nothing(answered: int, is_paired: bool) -> None:
    targets = [Named(name, Access(f"http://{name}")) for name in "ab"]
    asked = Replay(targets, GeneratedSource("chat", 10))
    whole, other = run_of([0.1] * 10, 0.0), run_of([0.2] * answered, 0.0)
    first, second = rows(asked, [[whole], [other]])
    assert first.paired is None
    assert (second.paired is not None) == is_paired


def test_latencies_from_sending_are_without_the_lag() -> None:
    """Of those that count: the first, of 9 s, is of the warm-up. One that was never sent is a failure."""
    about = {"speed": 2.0, "trace": "t", "warm_up": 0.1, "setting": {"url": "x"}}
    late = run_of([9.0, *[0.3] * 9], 0.25)
    one, _ = row("r", [late], Limits(0.2, 0.02), about, 1)
    assert one.ttft_ms.p50 == pytest.approx(300)
    assert one.setting["from_sending_ms"] == {
        "ttft": {"mean": 50.0, "p50": 50.0, "p99": 50.0},
        "e2e": {"mean": 150.0, "p50": 150.0, "p99": 150.0},
    }
    late.requests.append(Measured(11.0, 100, 11, failure="in_flight_limit"))
    assert from_sending([late], 1)["ttft"] == Counted(50.0, 50.0, None)


def test_lag_of_nothing() -> None:
    assert Lag.of([]) == Lag(0.0, 0.0, 0.0, 0.0)


def test_parts_of_a_run_are_all_of_it() -> None:
    due = Due(generate("chat", 30, 4.0, 1), limit=10)

    def bodies(part: int, parts: int) -> Iterator[tuple[float, bytes, bool]]:
        run = Run(Access("x"), Form(), "m", due, warm_up=3, part=part, parts=parts)
        return ((asked.due_s, asked.body, asked.counts) for asked in run.requests())

    whole = list(bodies(0, 1))
    assert sorted([*bodies(0, 2), *bodies(1, 2)]) == sorted(whole)
    assert [counts for _, _, counts in whole] == [False] * 3 + [True] * 7


def test_more_files_than_the_machine_has() -> None:
    with pytest.raises(ReplayError, match="--max-in-flight must be from 2 to"):
        check_jobs(10**9, 2)


@pytest.mark.parametrize("format", ["mooncake", "sglang", "vllm"])
def test_a_trace_for_others(format: str, tmp_path: Any) -> None:
    due = Due(generate("chat", 30, 4.0, 1), speed=2, limit=5)
    path = tmp_path / "t.jsonl"
    assert save_trace(due, path, format) == 5
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lengths = [arrival.output_tokens for arrival in due.arrivals()]
    assert [line["output_tokens" if format == "vllm" else "output_length"] for line in lines] == lengths


def test_a_format_that_nobody_reads(tmp_path: Any) -> None:
    with pytest.raises(ReplayError, match="--write-format: unknown 'csv'; known: mooncake"):
        save_trace(Due(generate("chat", 5, 4.0, 1)), tmp_path / "t", "csv")
