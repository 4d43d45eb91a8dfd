"""Faults that users of such routers have reported, each by what is right."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from kvroute.loadtests.mock_engine import MockEngine
from tests.kit import HANG_S, Client, Engine, Received, Wire, ask, until
from tests.loadtests.pd_kit import PROMPT, pd
from tests.router.pd.kit import (
    COMPLETIONS,
    NEVER_MARKED,
    Bench,
    bench,
    prefilled,
    right,
    right_text,
    said,
    scripted,
)

ALL = ["nixl", "mooncake", "sglang", "shared-storage", "p2p-nccl"]
CONCURRENT = ["mooncake", "sglang"]
SHORT = {"prefill_timeout_s": 0.3, "decode_timeout_s": 0.3}
NO_RETRY = {"attempts": 1}


def legs(engines: list[MockEngine]) -> list[Any]:
    """The JSON bodies of requests that came to them."""
    return [json.loads(request.body) for engine in engines for _, request in engine.journal.requests]


def meeting(leg: Any) -> Any:
    """What joins two legs of one request."""
    return leg["bootstrap_room"] if "bootstrap_room" in leg else leg["kv_transfer_params"]["transfer_id"]


def aborted(engines: list[MockEngine]) -> int:
    return sum(engine.journal.totals["aborted"] for engine in engines)


@pytest.mark.parametrize("connector", CONCURRENT)
async def test_a_client_that_leaves_before_the_first_token_ends_both_legs(connector: str) -> None:
    async with bench(connector) as one:
        one.prefill[0].faults.set({"hang": True})
        client = await one.begin(stream=True)
        await until(lambda: bool(one.prefill[0].live) and bool(one.decode[0].live))
        client.abort()
        await until(lambda: aborted(one.prefill) == aborted(one.decode) == 1)


async def test_each_chunk_of_the_decode_worker_is_passed_on_as_it_comes() -> None:
    got = asyncio.Event()

    async def decode(_request: Received, wire: Wire) -> None:
        await wire.start_stream()
        for number in range(4):
            got.clear()
            await wire.chunk(b'data: {"choices":[{"text":"%d"}]}\n\n' % number)
            async with asyncio.timeout(HANG_S):
                await got.wait()
        await wire.chunk(b"data: [DONE]\n\n")
        await wire.chunk(b"")

    usage = {"usage": {"prompt_tokens_details": {"cached_tokens": 0}}}
    async with Engine(prefilled(**usage)) as p, Engine(decode) as d, scripted([p], [d]) as server:
        client = await Client.connect(server.url)
        await client.send(COMPLETIONS, {"model": "m", "prompt": "x", "stream": True})
        assert (await client.head())[0] == 200
        for number in range(4):
            assert await client.chunk() == b'data: {"choices":[{"text":"%d"}]}\n\n' % number
            got.set()
        assert await client.chunk() == b"data: [DONE]\n\n"
        assert await client.chunk() == b""
        client.close()


@pytest.mark.parametrize("connector", ALL)
async def test_streams_and_plain_answers_are_whole_and_right_and_decode_follows_prefill(
    connector: str,
) -> None:
    async with bench(connector, 2, 2) as one:
        for stream in (True, False):
            answer = await one.ask(stream=stream)
            assert right(answer)
            assert answer.body.endswith(b"data: [DONE]\n\n") == stream
        assert one.count("requests", "split", "turn") == 2
        assert sum(engine.journal.totals["finished"] for engine in one.prefill) == 2
        if connector in ("nixl", *CONCURRENT):
            assert one.released() == {"pulled": 2}


@pytest.mark.parametrize("connector", CONCURRENT)
async def test_what_joins_two_legs_is_new_in_each_attempt_and_equal_on_both(connector: str) -> None:
    async with bench(connector, 2, 2) as one:
        for engine in one.prefill:
            engine.faults.set({"status": 500, "times": 1})
        one.prefill[0].faults = one.prefill[1].faults
        assert right(await one.ask())
        prefill = [meeting(leg) for leg in legs(one.prefill)]
        decode = [meeting(leg) for leg in legs(one.decode)]
        assert len(set(prefill)) == len(prefill) == 2
        assert set(decode) <= set(prefill)


@pytest.mark.parametrize("connector", CONCURRENT)
async def test_requests_at_a_time_never_meet_each_other(connector: str) -> None:
    async with bench(connector, 2, 2) as one:
        texts = await asyncio.gather(*[one.ask("X-Request-Id: same", prompt=[n, *PROMPT]) for n in range(8)])
        assert [said(each) for each in texts] == [right_text([n, *PROMPT]) for n in range(8)]
        assert len({meeting(leg) for leg in legs(one.prefill)}) == 8


async def test_prefill_s_cached_tokens_are_the_answer_s() -> None:
    async with bench() as one:
        for cached in (0, 80):
            for stream in (False, True):
                usage = {"stream_options": {"include_usage": True}} if stream else {}
                prompt = [int(stream), *PROMPT]
                answer = await one.ask(prompt=prompt, stream=stream, **usage)
                assert b'"cached_tokens":%d}' % cached in answer.body
                await one.idle()


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded", "prefix_affinity", "ttft"])
async def test_a_prompt_is_text_or_token_ids_or_a_list_of_either(policy: str) -> None:
    async with bench(policy=policy) as one:
        for prompt in ("one two", [1, 2, 3], ["one two"], [[1, 2, 3]], ["one", "two"], [[1], [2, 3]]):
            answer = await one.ask(prompt=prompt)
            assert answer.status == 200
            several = isinstance(prompt, list) and not isinstance(prompt[0], int) and len(prompt) > 1
            assert len(answer.json()["choices"]) == (2 if several else 1)


async def test_a_prompt_s_log_probabilities_come_from_who_computes_all() -> None:
    async with bench() as one:
        for asked in ({"prompt_logprobs": 1}, {"prompt_logprobs": 0}, {"echo": True, "logprobs": 1}):
            assert (await one.ask(**asked)).status == 200
        assert one.prefill[0].journal.totals["received"] == 0
        assert not any("kv_transfer_params" in leg for leg in legs(one.decode))


async def test_a_prefill_leg_has_no_lower_limit_and_no_stream() -> None:
    """The mock engine refuses one that has more tokens to make than it may, or stream options alone."""
    asked = {"min_tokens": 5, "max_completion_tokens": 6, "stream_options": {"include_usage": True}}
    async with bench() as one:
        assert right(await one.ask(stream=True, **asked))
        assert one.prefill[0].journal.totals["rejected"] == 0
        (leg,) = legs(one.decode)
        assert {name: leg[name] for name in asked} == asked


@pytest.mark.parametrize("connector", CONCURRENT)
@pytest.mark.parametrize("fault", [{"status": 500}, {"hang": True}, None])
async def test_a_prefill_that_fails_ends_the_wait_of_decode(
    connector: str, fault: dict[str, Any] | None
) -> None:
    async with bench(connector, pd=SHORT, retry=NO_RETRY, health=NEVER_MARKED) as one:
        one.decode[0].faults.set({"hang": True})
        if fault is None:
            await one.prefill[0].stop()
        else:
            one.prefill[0].faults.set(fault)
        answer = await one.ask(stream=True)
        assert answer.status in (502, 504)
        assert answer.code in ("bad_upstream_response", "prefill_timeout", "connect_refused")
        await until(lambda: aborted(one.decode) == one.decode[0].journal.totals["received"])
        assert one.server.metrics.e2e.of("mock") is not None
        assert (
            one.count("failures", "prefill", answer.code) + one.count("failures", "prefill", "status_500")
            == 1
        )
        if fault is None:
            await one.prefill[0].start()


async def test_a_prompt_shorter_than_a_block_is_split_too() -> None:
    async with bench() as one:
        answer = await one.ask(prompt=[1, 2, 3, 4, 5])
        assert said(answer) == right_text([1, 2, 3, 4, 5])
        assert one.prefill[0].journal.totals["finished"] == 1
        assert one.released() == {"pulled": 1}


async def test_where_the_only_decode_worker_is_away_its_kv_is_let_go_once_it_is_back() -> None:
    async with bench(health=NEVER_MARKED) as one:
        await one.decode[0].stop()
        answer = await one.ask()
        assert (answer.status, answer.code) == (502, "connect_refused")
        assert one.stranded() > 0
        await one.decode[0].start()
        await one.idle()
        assert one.released() == {"released": 1}


@pytest.mark.parametrize("connector", ["nixl", "mooncake"])
async def test_what_decode_rejects_is_the_client_s_answer_and_nothing_is_kept(connector: str) -> None:
    async with bench(connector) as one:
        one.decode[0].faults.set({"status": 400})
        answer = await one.ask()
        assert answer.status == 400
        assert answer.json()["error"]["message"] == "The mock engine was told to fail."
        await one.idle()
        assert "pulled" not in one.released()


@pytest.mark.parametrize("connector", ALL)
async def test_what_both_workers_reject_is_the_client_s_answer(connector: str) -> None:
    async with bench(connector) as one:
        answer = await one.ask(prompt=[7] * 2000)
        assert answer.status == 400
        assert "maximum context length" in answer.json()["error"]["message"]
        assert one.prefill[0].journal.totals["received"] == 1
        assert one.decode[0].journal.totals["received"] == (0 if connector == "p2p-nccl" else 1)


async def test_pushed_kv_has_no_age() -> None:
    """Mooncake's prefill worker knows whether it is still there; what is pulled may be another's by then."""
    async with bench("mooncake", pd={"kv_lease_s": 0.1}) as one:
        one.decode[0].faults.set({"ttft": 0.2})
        assert right(await one.ask())
        assert one.count("expired", "answer") == 0


async def test_prefill_has_its_own_limit_and_every_request_one_for_all() -> None:
    async with bench("p2p-nccl", pd=SHORT) as one:
        one.prefill[0].faults.set({"hang": True})
        answer = await one.ask()
        assert (answer.status, answer.code) == (504, "prefill_timeout")
    async with bench(timeouts={"total_s": 0.3}) as one:
        one.prefill[0].faults.set({"hang": True})
        answer = await one.ask()
        assert (answer.status, answer.code) == (504, "total_timeout")


async def test_an_error_of_either_leg_reaches_the_client_before_any_limit() -> None:
    async with bench("p2p-nccl", retry=NO_RETRY) as one:
        one.prefill[0].faults.set({"error_body": True})
        answer = await one.ask()
        assert (answer.status, answer.code) == (502, "bad_upstream_response")
    async with bench("p2p-nccl", pd=SHORT) as one:
        one.decode[0].faults.set({"hang": True})
        answer = await one.ask(stream=True)
        assert (answer.status, answer.code) == (504, "decode_timeout")


async def test_an_answer_that_breaks_off_before_anything_was_sent_is_begun_again_whole() -> None:
    """The prefill leg of the second attempt has all that the first had."""
    async with bench("p2p-nccl", 2, 2) as one:
        one.decode[0].faults.set({"die_at": 1, "times": 1})
        one.decode[1].faults = one.decode[0].faults
        assert right(await one.ask())
        first, second = legs(one.prefill)
        assert first == second


async def test_a_worker_that_left_between_choice_and_leg_ends_no_request() -> None:
    async with bench(prefill=2, decode=2) as one:
        for engine in one.prefill:
            engine.faults.set({"ttft": 0.1})
        client = await one.begin()
        await until(lambda: any(engine.live for engine in one.prefill))
        members = list(one.server.registry.members.values())
        gone = [member for member in members if member.requests]
        assert len(gone) == 2
        for member in gone:
            one.server.registry.remove(member)
        assert right(await client.receive())
        client.close()
        await until(lambda: not set(gone) & set(one.server.registry.members.values()))


async def test_wrong_text_is_seen_by_these_tests() -> None:
    """What they all rely on."""
    async with bench(clean=False) as one:
        answer = await _forward_foreign(one)
        assert answer.status == 200
        assert not right(answer)
        assert sum(pd(engine)["wrong_text"] for engine in one.decode) == 1


async def _forward_foreign(one: Bench) -> Any:
    """A decode leg by hand, for KV that its prefill worker never had."""
    engine = one.prefill[0]
    own = {
        "do_remote_prefill": True,
        "remote_block_ids": [[1]],
        "remote_engine_id": engine.pd.engine_id,
        "remote_request_id": "unknown",
        "remote_host": "127.0.0.1",
        "remote_port": engine.port,
    }
    fields = {"model": "mock", "prompt": PROMPT, "max_tokens": 6, "kv_transfer_params": own}
    return await ask(one.decode[0].url, COMPLETIONS, fields)
