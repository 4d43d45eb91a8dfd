"""An engine dies or stands still amid a split request: the right text or a clean error, and soon.

Leases are short, so that they end while a test waits. A decode engine that asks for blocks whose lease is
over gets what is there by then, and answers 200.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from .fleet import Server
from .pd import (
    CHAT,
    COMPLETIONS,
    DECODE,
    PATIENCE_S,
    PREFILL,
    Answer,
    Body,
    Rig,
    idle,
    nixl,
    request,
    settled,
    settles,
    waiting,
)

pytestmark = pytest.mark.engines

LEASE_S = 6
PREFILL_TIMEOUT_S = 8
Cold = Callable[[str, Body], Answer]


@pytest.fixture(scope="module")
def started_rig(engines: list[Server], vllm_python: Path, run_directory: Path) -> Iterator[Rig]:
    transfer = nixl(LEASE_S, KVROUTE_PD__PREFILL_TIMEOUT_S=str(PREFILL_TIMEOUT_S))
    made = Rig(vllm_python, run_directory / "tiny-model", run_directory, "faults", transfer)
    try:
        made.start()
        yield made
    finally:
        made.close()


@pytest.fixture
def rig(started_rig: Rig, rng: random.Random) -> Iterator[Rig]:
    """At rest and splitting requests again, whatever the test before did to it."""
    assert settled(lambda: splits(started_rig, rng))
    yield started_rig
    assert settled(lambda: at_rest(started_rig))


def splits(rig: Rig, rng: random.Random) -> bool:
    moved = rig.moved_tokens()
    return rig.ask(COMPLETIONS, request(COMPLETIONS, rng)).status == 200 and rig.moved_tokens() > moved


def at_rest(rig: Rig) -> bool:
    return all(idle(e) for e in (rig.prefill, rig.decode)) and rig.held() == 0


@contextmanager
def stopped(engine: Server) -> Iterator[None]:
    engine.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        engine.signal(signal.SIGCONT)


def clean_error(answer: Answer) -> bool:
    """Told as an error of the gateway's, before or in the stream; nobody takes it for the whole answer."""
    return not answer.finished and '"error"' in answer.body


async def test_decode_engine_stands_still_beyond_the_lease(rig: Rig, cold: Cold, rng: random.Random) -> None:
    """Its heartbeats stop with it, the blocks go to other prompts, and it fetches them all the same."""
    body = request(COMPLETIONS, rng)
    expected = cold(COMPLETIONS, body)
    expired = rig.expired()
    with rig.busy(rig.decode):
        task = rig.send(COMPLETIONS, body)
        assert await settles(lambda: waiting(rig.decode) == 1)
        with stopped(rig.decode):
            assert await settles(lambda: rig.expired() > expired)
            await asyncio.to_thread(rig.overwrite_prefill)
    answer = await asyncio.wait_for(task, PATIENCE_S)
    assert (answer.status, answer.text, answer.finished) == (200, expected.text, True), answer.body


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_prefill_engine_stands_still_while_prefilling(
    rig: Rig, cold: Cold, rng: random.Random, stream: bool
) -> None:
    """The decode engine does it all, while the other still stands."""
    body = request(COMPLETIONS, rng)
    expected = cold(COMPLETIONS, body)
    with rig.busy(rig.prefill):
        task = rig.send(COMPLETIONS, {**body, "stream": stream})
        assert await settles(lambda: waiting(rig.prefill) == 1)
        with stopped(rig.prefill):
            answer = await asyncio.wait_for(task, PATIENCE_S)
    assert (answer.status, answer.text, answer.finished) == (200, expected.text, True), answer.body


async def test_prefill_engine_stands_still_beyond_the_lease_while_handed_over(
    rig: Rig, cold: Cold, rng: random.Random
) -> None:
    body = request(COMPLETIONS, rng)
    expected = cold(COMPLETIONS, body)
    with ExitStack() as filler:
        filler.enter_context(rig.busy(rig.decode))
        task = rig.send(COMPLETIONS, body)
        assert await settles(lambda: waiting(rig.decode) == 1)
        with stopped(rig.prefill):
            filler.close()
            await asyncio.wait([task], timeout=LEASE_S + 4)
    answer = await asyncio.wait_for(task, PATIENCE_S)
    assert clean_error(answer) or (answer.status, answer.text) == (200, expected.text), answer.body


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_prefill_engine_killed(rig: Rig, cold: Cold, rng: random.Random, stream: bool) -> None:
    """Unstreamed while it prefills, streamed when its blocks wait to be fetched. Then it comes back, under a
    new engine id: `rig` of the next test waits until it is used again.
    """
    body = request(CHAT, rng)
    expected = cold(CHAT, body)
    at = rig.decode if stream else rig.prefill
    with rig.busy(at):
        task = rig.send(CHAT, {**body, "stream": stream})
        assert await settles(lambda: waiting(at) == 1)
        rig.prefill.signal(signal.SIGKILL)
        if not stream:
            answer = await asyncio.wait_for(task, PATIENCE_S)
    answer = await asyncio.wait_for(task, PATIENCE_S)
    assert (answer.status, answer.text, answer.finished) == (200, expected.text, True), answer.body
    await asyncio.to_thread(rig.restart, PREFILL)


async def test_decode_engine_killed(rig: Rig, cold: Cold, rng: random.Random) -> None:
    """With one request decoding and one waiting there; no other engine decodes."""
    decoding = {**request(COMPLETIONS, rng, max_tokens=4000), "ignore_eos": True, "stream": True}
    expected = cold(COMPLETIONS, {**decoding, "max_tokens": 24})
    before = rig.decode.generated_tokens()
    first = rig.send(COMPLETIONS, decoding)
    assert await settles(lambda: rig.decode.generated_tokens() > before + 24)
    second = rig.send(COMPLETIONS, request(COMPLETIONS, rng))
    assert await settles(lambda: waiting(rig.decode) == 1)
    rig.decode.signal(signal.SIGKILL)
    started, refused = await asyncio.wait_for(asyncio.gather(first, second), PATIENCE_S)
    assert started.text.startswith(expected.text)
    assert not started.finished
    assert refused.status in (502, 503), refused.body
    assert clean_error(refused)
    await asyncio.to_thread(rig.restart, DECODE)
    assert await settles(lambda: splits(rig, rng))
