"""A client that leaves: the engine stops working for it within two seconds."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest

from .fleet import CALL_LIMIT_S, MODEL, Server, eventually, serving

pytestmark = pytest.mark.engines

TOKENS = 8000
# Some twenty seconds of work, so that a request which is gone after two was aborted.
LONG = {
    "model": MODEL,
    "prompt": "Once upon a time",
    "max_tokens": TOKENS,
    "ignore_eos": True,
    "temperature": 0,
}
GONE_WITHIN_S = 2.0


def running(engines: list[Server]) -> int:
    return sum(engine.running_requests() for engine in engines)


def generated(engines: list[Server]) -> int:
    return sum(engine.generated_tokens() for engine in engines)


def assert_stopped(engines: list[Server], generated_before: int) -> None:
    """No request runs within the limit, and the engines really stand still, short of the end."""
    assert eventually(lambda: running(engines) == 0, GONE_WITHIN_S) is not None
    at_stop = generated(engines)
    time.sleep(0.5)
    assert generated(engines) == at_stop
    assert 0 < at_stop - generated_before < TOKENS


@pytest.fixture
def before(engines: list[Server]) -> int:
    """Tokens generated so far, by engines that are idle."""
    assert eventually(lambda: running(engines) == 0, 10) is not None
    return generated(engines)


def test_stream_that_is_left(
    client: httpx.Client, gateway: Server, engines: list[Server], before: int
) -> None:
    with client.stream("POST", f"{gateway.url}/v1/completions", json={**LONG, "stream": True}) as response:
        engine = serving(response, engines)
        chunks = response.iter_raw()  # kept: a generator that is collected closes the connection
        assert b"data: " in next(chunks)
        assert eventually(lambda: engine.running_requests() == 1, 5) is not None
    assert_stopped(engines, before)


async def test_whole_response_that_is_not_awaited(
    gateway: Server, engines: list[Server], before: int
) -> None:
    async with httpx.AsyncClient(timeout=CALL_LIMIT_S) as client:
        call = asyncio.create_task(client.post(f"{gateway.url}/v1/completions", json=LONG))
        assert await asyncio.to_thread(eventually, lambda: running(engines) == 1, 10) is not None
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    assert_stopped(engines, before)


async def test_one_of_many_leaves(gateway: Server, engines: list[Server], before: int) -> None:
    """Eight streams that share the engines with it are answered to the end, by both engines."""
    short = {**LONG, "max_tokens": 200, "stream": True}
    async with httpx.AsyncClient(timeout=CALL_LIMIT_S) as client:
        long = asyncio.create_task(client.post(f"{gateway.url}/v1/completions", json=LONG))
        calls = [
            asyncio.create_task(client.post(f"{gateway.url}/v1/completions", json=short)) for _ in range(8)
        ]
        assert await asyncio.to_thread(eventually, lambda: running(engines) >= 5, 10) is not None
        long.cancel()
        responses = await asyncio.gather(*calls)
    assert [r.status_code for r in responses] == [200] * 8
    assert all(r.content.endswith(b"data: [DONE]\n\n") for r in responses)
    assert {serving(r, engines).name for r in responses} == {engine.name for engine in engines}
    assert_stopped(engines, before)
