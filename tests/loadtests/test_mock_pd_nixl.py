"""The mock engine's NIXL side: what is kept, until when, and every way to get wrong text."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from kvroute.loadtests.mock_engine import MockFleet, MockOptions
from kvroute.policies.costs.speeds import PRESETS
from tests.kit import until
from tests.loadtests.pd_kit import BLOCK, PREFILL, PROMPT, Legs, check, options, pd, right_text, text
from tests.loadtests.virtual_time import run_virtually


@pytest.fixture
async def fleet() -> AsyncIterator[MockFleet]:
    async with MockFleet(options("nixl")) as fleet:
        yield fleet
        check(fleet)


@pytest.fixture
async def legs(fleet: MockFleet) -> AsyncIterator[Legs]:
    async with Legs(fleet) as legs:
        yield legs


def freed(fleet: MockFleet, engine: int = 0) -> dict[str, int]:
    """How holds ended, and that no block is kept."""
    section = pd(fleet.engines[engine])
    assert section["held"]["blocks"] == section["stranded_blocks"] == 0
    assert not fleet.engines[engine].scheduler.held
    return {why: count for why, count in section["released_by"].items() if count}


def wrongs(fleet: MockFleet, engine: int = 1) -> list[str]:
    return [item["why"] for item in pd(fleet.engines[engine])["wrong_text_ids"]]


async def test_prefill_keeps_its_blocks_until_decode_has_pulled_them(fleet: MockFleet, legs: Legs) -> None:
    p, d = fleet.engines
    params = await legs.prefill()
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2, 3, 4, 5, 6]],
        "remote_engine_id": p.pd.engine_id,
        "remote_request_id": params["remote_request_id"],
        "remote_host": "127.0.0.1",
        "remote_port": p.port,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": len(PROMPT),
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
    }
    assert pd(p)["held"]["ids"] == [params["remote_request_id"]]
    assert (pd(p)["held"]["blocks"], pd(p)["stranded_blocks"]) == (6, 6)
    assert not p.scheduler.clear(), "kept blocks are referenced"
    answer = await legs.post(1, kv_transfer_params=params)
    assert text(answer) == right_text()
    assert answer.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": len(PROMPT)}
    assert freed(fleet) == {"pulled": 1}
    assert p.scheduler.cache.used_ratio == 0
    assert d.scheduler.totals.prefill_tokens == 0
    assert pd(d)["received_tokens"] == len(PROMPT)
    metrics = (await legs.client.get(d.url + "/metrics")).text
    assert 'vllm:external_prefix_cache_hits_total{engine="0",model_name="mock"} 83.0' in metrics


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_every_route_hands_over(fleet: MockFleet, legs: Legs, path: str) -> None:
    message = [{"role": "user", "content": "word " * 30}]
    length = "max_output_tokens" if "responses" in path else "max_tokens"
    body: dict[str, Any] = {"messages": message, "input": message}
    leg = await legs.post(0, path=path, kv_transfer_params=PREFILL, **body, **{length: 1})
    params = leg.json()["kv_transfer_params"]
    answer = await legs.post(1, path=path, kv_transfer_params=params, **body)
    assert answer.status_code == 200
    assert freed(fleet) == {"pulled": 1}
    assert fleet.engines[1].scheduler.totals.prefill_tokens == 0


async def test_the_right_text_is_that_of_a_cold_single_engine() -> None:
    async with MockFleet(MockOptions(speed=math.inf)) as fleet, Legs(fleet) as legs:
        assert text(await legs.post(0)) == right_text()


async def test_a_streamed_decode_says_the_same(fleet: MockFleet, legs: Legs) -> None:
    params = await legs.prefill()
    answer = await legs.post(1, stream=True, kv_transfer_params=params)
    words = [part.split('"')[0] for part in answer.text.split('"text":"')[1:]]
    assert "".join(words) == right_text()


def test_a_lease_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with MockFleet(options("nixl", kv_lease_s=30.0)) as fleet, Legs(fleet) as legs:
            params = await legs.prefill()
            await asyncio.sleep(29)
            assert pd(fleet.engines[0])["held"]["ages_s"] == [pytest.approx(29, abs=0.1)]
            await asyncio.sleep(1.1)
            assert freed(fleet) == {"expired": 1}
            assert pd(fleet.engines[0])["expired_total"] == 1
            late = await legs.post(1, kv_transfer_params=params)
            assert text(late) != right_text()
            assert wrongs(fleet) == ["expired"]
            for url, count in zip(fleet.urls, ("1.0", "0.0"), strict=True):
                metrics = (await legs.client.get(url + "/metrics")).text
                name = 'vllm:nixl_num_kv_expired_reqs_total{engine="0",model_name="mock"} '
                assert name + count in metrics

    run_virtually(main(), monkeypatch)


def test_a_lease_that_ends_during_the_pull_is_wrong_text_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with MockFleet(options("nixl", kv_lease_s=5.0)) as fleet, Legs(fleet) as legs:
            params = await legs.prefill()
            late = await legs.post(1, "handoff_delay=6", kv_transfer_params=params)
            assert text(late) != right_text()
            assert wrongs(fleet) == ["expired"]

    run_virtually(main(), monkeypatch)


async def test_wrong_kv_stays_in_the_cache_of_the_decode_engine(fleet: MockFleet, legs: Legs) -> None:
    params = await legs.prefill()
    right = right_text()
    assert text(await legs.post(1, kv_transfer_params=params)) == right
    fleet.engines[1].scheduler.clear()
    assert text(await legs.post(1, kv_transfer_params=params)) != right
    assert text(await legs.post(1)) != right  # a plain request, over the blocks it finds
    assert wrongs(fleet) == ["pulled", "poisoned"]
    again = await legs.prefill()
    assert text(await legs.post(1, kv_transfer_params=again)) != right, "pulled right, behind wrong blocks"
    await legs.client.post(fleet.urls[1] + "/reset_prefix_cache")
    assert text(await legs.post(1)) == right


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"remote_request_id": "cmpl-nobody-0-0"}, "unknown"),
        ({"remote_block_ids": [[7, 8, 9]]}, "foreign"),
    ],
)
async def test_unknown_and_foreign_ids_are_wrong_text(
    fleet: MockFleet, legs: Legs, change: dict[str, Any], why: str
) -> None:
    params = await legs.prefill()
    assert text(await legs.post(1, kv_transfer_params=params | change)) != right_text()
    assert wrongs(fleet) == [why]
    assert pd(fleet.engines[1])["unknown"] == (why == "unknown")


async def test_the_kv_of_another_prompt_is_wrong_text(fleet: MockFleet, legs: Legs) -> None:
    params = await legs.prefill(prompt=PROMPT[::-1])
    assert text(await legs.post(1, kv_transfer_params=params)) != right_text()
    assert wrongs(fleet) == ["foreign"]
    assert freed(fleet) == {"pulled": 1}


async def test_a_list_of_prompts_shares_one_handoff_and_strands_the_rest(
    fleet: MockFleet, legs: Legs
) -> None:
    prompts = [PROMPT, PROMPT[::-1]]
    params = await legs.prefill(prompt=prompts)
    answer = await legs.post(1, prompt=prompts, kv_transfer_params=params)
    texts = [choice["text"] for choice in answer.json()["choices"]]
    assert texts[0] == right_text()
    assert texts[1] != right_text(PROMPT[::-1])
    assert pd(fleet.engines[0])["stranded_blocks"] == 6


async def test_params_without_blocks_end_the_process(fleet: MockFleet, legs: Legs) -> None:
    d = fleet.engines[1]
    other = legs.begin(1, "ttft=60")
    await until(lambda: len(d.live) == 1)
    with pytest.raises(httpx.TransportError):
        await legs.post(1, kv_transfer_params={"do_remote_prefill": True})
    with pytest.raises(httpx.TransportError):
        await other
    with pytest.raises(httpx.ConnectError):
        await legs.post(1)
    assert pd(d)["deaths"] == 1
    assert d.journal.totals == {"received": 2, "fatal": 1, "broken": 1}
    await until(lambda: d.incarnation == 1 and not d.restarting)
    assert text(await legs.post(1)) == right_text()


async def test_params_without_an_address_wait_for_ever(fleet: MockFleet, legs: Legs) -> None:
    params = await legs.prefill()
    del params["remote_host"]
    task = legs.begin(1, kv_transfer_params=params)
    await until(lambda: bool(fleet.engines[1].scheduler.receiving))
    await legs.leave(task)
    await until(lambda: not fleet.engines[1].live)
    assert freed(fleet) == {"released": 1}


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_prefill_engine_that_restarted_is_noticed(policy: str, stream: bool) -> None:
    # At once, a stream has not begun when it fails; on the clock, it has.
    of = options("nixl", kv_load_failure=policy, speed=100.0 if stream else math.inf)
    async with MockFleet(of) as fleet, Legs(fleet) as legs:
        params = await legs.prefill()
        await fleet.engines[0].restart()
        assert fleet.engines[0].pd.engine_id != params["remote_engine_id"]
        assert freed(fleet) == {"lost": 1}
        answer = await legs.post(1, stream=stream, kv_transfer_params=params)
        if policy == "fail":
            assert answer.status_code == (200 if stream else 500)
            assert "KV load failure" in answer.text
        elif not stream:
            assert text(answer) == right_text()
            assert fleet.engines[1].scheduler.totals.prefill_tokens == len(PROMPT)
        assert pd(fleet.engines[1])["failed_loads"] == 1
        assert not wrongs(fleet)


async def test_a_prefill_engine_that_dies_during_the_pull_is_noticed(fleet: MockFleet, legs: Legs) -> None:
    params = await legs.prefill()
    task = legs.begin(1, "handoff_delay=0.2", kv_transfer_params=params)
    await until(lambda: bool(fleet.engines[1].scheduler.receiving))
    await fleet.engines[0].restart()
    assert text(await task) == right_text()
    assert pd(fleet.engines[1])["failed_loads"] == 1


@pytest.mark.parametrize(
    ("fields", "status", "released"),
    [
        ({"model": "nobody"}, 404, True),
        ({"max_tokens": 10**6}, 400, True),
        ({"min_tokens": 9}, 400, True),
        # Refused by the web framework: the layer that tells the prefill engine never hears of it.
        ({"stream_options": {"include_usage": True}}, 400, False),
        ({"max_tokens": "six"}, 400, False),
    ],
)
async def test_a_decode_engine_that_rejects_tells_the_prefill_engine(
    fleet: MockFleet, legs: Legs, fields: dict[str, Any], status: int, released: bool
) -> None:
    params = await legs.prefill()
    answer = await legs.post(1, kv_transfer_params=params, **fields)
    assert answer.status_code == status
    assert pd(fleet.engines[0])["stranded_blocks"] == (0 if released else 6)
    assert pd(fleet.engines[0])["released_by"]["released"] == released


@pytest.mark.parametrize(("fault", "kept"), [("status=400", 0), ("status=500", 6), ("die_before", 6)])
async def test_a_told_4xx_frees_and_nothing_else_does(
    fleet: MockFleet, legs: Legs, fault: str, kept: int
) -> None:
    params = await legs.prefill()
    await asyncio.gather(legs.post(1, fault, kv_transfer_params=params), return_exceptions=True)
    assert pd(fleet.engines[0])["stranded_blocks"] == kept


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}])
async def test_the_prompts_logprobs_are_not_at_the_decode_engine(
    fleet: MockFleet, legs: Legs, fields: dict[str, Any]
) -> None:
    params = await legs.prefill()
    assert (await legs.post(1, kv_transfer_params=params, **fields)).status_code == 500
    assert freed(fleet) == {"pulled": 1}
    assert (await legs.post(1, **fields)).status_code == 200


async def test_a_client_that_leaves_frees_on_either_side(fleet: MockFleet, legs: Legs) -> None:
    params = await legs.prefill()
    task = legs.begin(1, "handoff_delay=60", kv_transfer_params=params)
    await until(lambda: bool(fleet.engines[1].scheduler.receiving))
    assert pd(fleet.engines[0])["stranded_blocks"] == 0, "somebody is going to pull it"
    await legs.leave(task)
    await until(lambda: not fleet.engines[1].live)
    assert freed(fleet) == {"released": 1}
    task = legs.begin(0, "ttft=60", max_tokens=1, kv_transfer_params=PREFILL)
    await until(lambda: pd(fleet.engines[0])["held"]["requests"] == 1)
    await legs.leave(task)
    await until(lambda: not fleet.engines[0].live)
    assert freed(fleet) == {"released": 1, "aborted": 1}


async def test_a_decode_engine_that_dies_tells_nobody(fleet: MockFleet, legs: Legs) -> None:
    params = await legs.prefill()
    task = legs.begin(1, "handoff_delay=60", kv_transfer_params=params)
    await until(lambda: bool(fleet.engines[1].scheduler.receiving))
    await fleet.engines[1].restart()
    await asyncio.gather(task, return_exceptions=True)
    assert pd(fleet.engines[0])["stranded_blocks"] == 6
    assert text(await legs.post(1, kv_transfer_params=params)) == right_text()
    assert freed(fleet) == {"pulled": 1}


async def test_decode_before_prefill_is_over_breaks_the_order(fleet: MockFleet, legs: Legs) -> None:
    p = fleet.engines[0]
    filler = legs.begin(0, "ttft=60", prompt=[1] * 60 * BLOCK, max_tokens=BLOCK)
    await until(lambda: len(p.live) == 1)
    task = legs.begin(0, max_tokens=1, kv_transfer_params=PREFILL)
    await until(lambda: p.waiting == 1)
    made_up = {
        "do_remote_prefill": True,
        "remote_engine_id": p.pd.engine_id,
        "remote_request_id": next(iter(p.pd._computing.values())),  # type: ignore[attr-defined]
        "remote_block_ids": [[1]],
        "remote_host": "127.0.0.1",
        "remote_port": p.port,
    }
    assert text(await legs.post(1, kv_transfer_params=made_up)) != right_text()
    assert pd(fleet.engines[1])["order_violations"] == 1
    await legs.leave(filler)
    await legs.leave(task)


@pytest.mark.parametrize(
    ("fault", "kept"),
    [("no_handoff", 6), ("garbage_body", 6), ("die_at=1", 6), ("close_at=0", 6), ("status=500", 0)],
)
async def test_faults_of_a_prefill_leg_leave_what_a_real_one_would(
    fleet: MockFleet, legs: Legs, fault: str, kept: int
) -> None:
    body = {"max_tokens": 1, "kv_transfer_params": PREFILL}
    [answer] = await asyncio.gather(legs.post(0, fault, **body), return_exceptions=True)
    if fault == "no_handoff":
        assert isinstance(answer, httpx.Response)
        assert "kv_transfer_params" not in answer.json()
    if fault == "garbage_body":
        assert isinstance(answer, httpx.Response)
        with pytest.raises(ValueError):
            answer.json()
    assert pd(fleet.engines[0])["stranded_blocks"] == kept
    fleet.engines[0].scheduler.check_integrity()


async def test_garbage_may_be_streamed(fleet: MockFleet, legs: Legs) -> None:
    answer = await legs.post(1, "garbage_body", stream=True)
    assert answer.status_code == 200
    assert b"data:" not in answer.content


async def test_what_is_kept_is_room_that_others_lack(fleet: MockFleet, legs: Legs) -> None:
    for seed in range(10):
        await legs.prefill(prompt=[seed] * len(PROMPT))
    assert pd(fleet.engines[0])["held"]["blocks"] == 60
    task = legs.begin(0)
    await until(lambda: fleet.engines[0].waiting == 1)
    await fleet.engines[0].restart()
    await asyncio.gather(task, return_exceptions=True)


def test_on_the_clock_the_transfer_takes_its_bytes_time(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = list(range(8000))
    speed = PRESETS["llama-3.1-8b-h100-tp1"]
    more = {"speed": 1.0, "kv_blocks": None, "handoff_bytes_per_s": 1e9, "request_overhead_s": 0.0}

    async def main() -> list[float]:
        now_s = asyncio.get_running_loop().time
        async with MockFleet(options("nixl", **more)) as fleet, Legs(fleet) as legs:
            params = await legs.prefill(prompt=prompt)
            assert len(params["remote_block_ids"][0]) == 500
            begun_s = now_s()
            answer = await legs.post(1, prompt=prompt, kv_transfer_params=params)
            took_s = now_s() - begun_s
            assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 8000
            assert freed(fleet) == {"pulled": 1}
            fleet.engines[1].scheduler.check_integrity()
            await fleet.engines[0].restart()
            begun_s = now_s()
            gone = await legs.post(1, prompt=prompt[::-1], kv_transfer_params=params)
            assert text(gone) == right_text(prompt[::-1])
            return [took_s, now_s() - begun_s]

    pull_s = 8000 * speed.kv_bytes_per_token / 1e9
    decode_s = 6 * speed.step_s(0, 0, 1, 8000)
    took_s = run_virtually(main(), monkeypatch)
    assert took_s[0] == pytest.approx(pull_s + decode_s, rel=0.02)
    assert took_s[1] == pytest.approx(speed.prefill_s(8000) + decode_s, rel=0.1)


async def test_server_info_names_connector_and_role(fleet: MockFleet, legs: Legs) -> None:
    for url, role in zip(fleet.urls, ("kv_producer", "kv_consumer"), strict=True):
        info = (await legs.client.get(url + "/server_info?config_format=json")).json()
        config = info["vllm_config"]["kv_transfer_config"]
        assert (config["kv_connector"], config["kv_role"]) == ("NixlConnector", role)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prefill", 3),
        ("decode", -1),
        ("connector", "fax"),
        ("kv_load_failure", "shrug"),
        ("kv_lease_s", -1.0),
    ],
)
def test_options_name_the_field_at_fault(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        MockOptions(**{"connector": "nixl", "engines": 2, field: value})


def test_roles_go_by_order() -> None:
    of = options("nixl", prefill=2, both=1, decode=1)
    assert [of.role_of(index) for index in range(4)] == ["prefill", "prefill", "both", "decode"]
