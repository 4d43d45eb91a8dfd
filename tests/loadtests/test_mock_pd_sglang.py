"""The mock engine's SGLang side: rooms where two requests meet, and both wait for the KV."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from kvroute.loadtests.mock_engine import MockFleet
from tests.kit import until
from tests.loadtests.pd_kit import PROMPT, Legs, check, options, pd, right_text, text
from tests.loadtests.virtual_time import run_virtually

ROOM = 2**62 + 5


@pytest.fixture
async def fleet() -> AsyncIterator[MockFleet]:
    async with MockFleet(options("sglang")) as fleet:
        yield fleet
        check(fleet)


@pytest.fixture
async def legs(fleet: MockFleet) -> AsyncIterator[Legs]:
    async with Legs(fleet) as legs:
        yield legs


def to_room(fleet: MockFleet, room: Any = ROOM, **more: Any) -> dict[str, Any]:
    """The same for both legs."""
    port = fleet.engines[0].port
    return {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": room, **more}


def freed(fleet: MockFleet) -> dict[str, int]:
    section = pd(fleet.engines[0])
    assert section["held"]["blocks"] == 0
    return {why: count for why, count in section["released_by"].items() if count}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
async def test_both_answer_once_the_kv_has_moved(
    fleet: MockFleet, legs: Legs, first: int, stream: bool
) -> None:
    one = legs.begin(first, **to_room(fleet, stream=stream))
    await until(lambda: len(fleet.engines[first].live) == 1)
    await asyncio.sleep(0)
    assert fleet.engines[0].scheduler.totals.prefill_tokens == 0, "computed for nobody"
    other = legs.begin(1 - first, **to_room(fleet, stream=stream))
    answers = dict(zip((first, 1 - first), await asyncio.gather(one, other), strict=True))
    if stream:
        assert "data: [DONE]" in answers[0].text
        assert answers[1].text.count('"text":"') == 6
    else:
        assert text(answers[1]) == right_text()
        assert answers[0].json()["usage"]["completion_tokens"] == 1
    assert freed(fleet) == {"pulled": 1}
    assert fleet.engines[0].scheduler.totals.prefill_tokens == len(PROMPT)
    assert fleet.engines[1].scheduler.totals.prefill_tokens == 0


async def test_prefill_says_nothing_before_its_kv_is_there(fleet: MockFleet, legs: Legs) -> None:
    prefill = legs.begin(0, **to_room(fleet))
    decode = legs.begin(1, "handoff_delay=0.2", **to_room(fleet))
    await until(lambda: pd(fleet.engines[0])["held"]["blocks"] == 6)
    assert fleet.engines[0].live
    assert not prefill.done()
    assert text(await decode) == right_text()
    assert (await prefill).status_code == 200


@pytest.mark.parametrize("lists", [False, True])
async def test_lists_of_prompts_have_a_room_each(fleet: MockFleet, legs: Legs, lists: bool) -> None:
    prompts = [PROMPT, PROMPT[::-1], PROMPT[:40]]
    body = to_room(fleet, prompt=prompts)
    if lists:
        body |= {
            "bootstrap_host": ["127.0.0.1"] * 3,
            "bootstrap_port": [fleet.engines[0].port] * 3,
            "bootstrap_room": [5, 900, 7],
        }
    prefill, decode = await asyncio.gather(legs.post(0, **body), legs.post(1, **body))
    assert prefill.status_code == 200
    assert [choice["text"] for choice in decode.json()["choices"]] == [right_text(one) for one in prompts]
    assert freed(fleet) == {"pulled": 3}


async def test_its_own_api_works_too(fleet: MockFleet, legs: Legs) -> None:
    body = to_room(fleet, input_ids=PROMPT, sampling_params={"max_new_tokens": 6})
    both = [legs.post(engine, path="/generate", **body) for engine in (0, 1)]
    prefill, decode = await asyncio.gather(*both)
    assert decode.json()["text"] == right_text()
    assert prefill.json()["meta_info"]["completion_tokens"] == 1


@pytest.mark.parametrize("engine", [0, 1])
@pytest.mark.parametrize(
    "change",
    [
        {"bootstrap_room": None},
        {"bootstrap_room": -1},
        {"bootstrap_room": 2**63},
        {"bootstrap_room": "x"},
        {"bootstrap_room": [1, 2]},
    ],
)
async def test_without_a_room_it_is_refused(
    fleet: MockFleet, legs: Legs, engine: int, change: dict[str, Any]
) -> None:
    answer = await legs.post(engine, **to_room(fleet, **change))
    assert answer.status_code == 400
    assert "bootstrap" in answer.json()["error"]["message"]
    assert (await legs.post(engine)).status_code == 400


@pytest.mark.parametrize("engine", [0, 1])
def test_a_room_where_nobody_comes(monkeypatch: pytest.MonkeyPatch, engine: int) -> None:
    async def main() -> None:
        async with MockFleet(options("sglang", kv_wait_s=300.0)) as fleet, Legs(fleet) as legs:
            legs.client.timeout = httpx.Timeout(1000)
            begun_s = asyncio.get_running_loop().time()
            answer = await legs.post(engine, **to_room(fleet))
            assert asyncio.get_running_loop().time() - begun_s == pytest.approx(300, abs=1)
            assert answer.status_code == 500
            assert str(ROOM) in answer.json()["error"]["message"]
            for side in fleet.engines:
                assert not side.pd._rooms  # type: ignore[attr-defined]
                assert side.scheduler.cache.used_ratio == 0

    run_virtually(main(), monkeypatch)


@pytest.mark.parametrize("engine", [0, 1])
async def test_a_client_that_leaves_frees_its_leg_and_the_other_waits(
    fleet: MockFleet, legs: Legs, engine: int
) -> None:
    tasks = [legs.begin(0, **to_room(fleet)), legs.begin(1, "handoff_delay=60", **to_room(fleet))]
    await until(lambda: pd(fleet.engines[0])["held"]["blocks"] == 6)
    await legs.leave(tasks[engine])
    await until(lambda: not fleet.engines[engine].live)
    assert not tasks[1 - engine].done()
    if engine == 0:
        assert freed(fleet) == {"aborted": 1}
    else:
        assert fleet.engines[1].scheduler.cache.used_ratio == 0
        assert pd(fleet.engines[0])["stranded_blocks"] == 6
    await legs.leave(tasks[1 - engine])
    await until(lambda: not fleet.engines[1 - engine].live)
    assert freed(fleet) == {"aborted": 1}
    assert not fleet.engines[0].pd._rooms  # type: ignore[attr-defined]


async def test_a_room_used_twice_at_once_is_loud(fleet: MockFleet, legs: Legs) -> None:
    tasks = [legs.begin(0, **to_room(fleet)) for _ in range(2)]
    await until(lambda: pd(fleet.engines[0])["repeated_ids"] == [ROOM])
    assert text(await legs.post(1, **to_room(fleet))) == right_text()
    done, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    assert len(done) == len(left) == 1
    await legs.leave(left.pop())


async def test_a_room_of_two_prompts_is_wrong_text(fleet: MockFleet, legs: Legs) -> None:
    other = legs.begin(0, **to_room(fleet, prompt=PROMPT[::-1]))
    assert text(await legs.post(1, **to_room(fleet))) != right_text()
    assert (await other).status_code == 200
    assert [item["why"] for item in pd(fleet.engines[1])["wrong_text_ids"]] == ["foreign"]


async def test_a_prefill_engine_that_restarts_leaves_the_decode_waiting(fleet: MockFleet, legs: Legs) -> None:
    tasks = [legs.begin(0, **to_room(fleet)), legs.begin(1, "handoff_delay=0.1", **to_room(fleet))]
    await until(lambda: pd(fleet.engines[0])["held"]["blocks"] == 6)
    await fleet.engines[0].restart()
    await asyncio.gather(tasks[0], return_exceptions=True)
    assert freed(fleet) == {"lost": 1}
    assert not tasks[1].done()
    await legs.leave(tasks[1])


async def test_nobody_at_the_address(fleet: MockFleet, legs: Legs) -> None:
    for change in ({"bootstrap_port": 1}, {"bootstrap_port": None}, {"bootstrap_host": None}):
        task = legs.begin(1, **to_room(fleet, **change))
        await until(lambda: bool(fleet.engines[1].scheduler.receiving))
        assert not fleet.engines[0].pd._rooms  # type: ignore[attr-defined]
        await legs.leave(task)
        await until(lambda: not fleet.engines[1].live)


async def test_server_info_is_flat(fleet: MockFleet, legs: Legs) -> None:
    modes = []
    for url in fleet.urls:
        for path in ("/server_info", "/get_server_info"):
            info = (await legs.client.get(url + path)).json()
            assert info["page_size"] == 16
            modes.append((info["disaggregation_mode"], info["disaggregation_bootstrap_port"]))
    ports = [engine.port for engine in fleet.engines]
    assert modes == [("prefill", ports[0])] * 2 + [("decode", ports[1])] * 2


async def test_on_the_clock() -> None:
    more = {"speed": 20.0, "kv_blocks": None, "request_overhead_s": 0.0}
    async with MockFleet(options("sglang", **more)) as fleet, Legs(fleet) as legs:
        prompt = list(range(2000))
        answers = await asyncio.gather(*[legs.post(i, **to_room(fleet, prompt=prompt)) for i in (0, 1)])
        assert text(answers[1]) == right_text(prompt)
        assert freed(fleet) == {"pulled": 1}
