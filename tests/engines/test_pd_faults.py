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
from functools import partial
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
    leave,
    nixl,
    request,
    settled,
    settles,
    waiting,
)

pytestmark = pytest.mark.engines

LEASE_S = 15
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
    if rig.prefill.process.poll() is not None:
        return idle(rig.decode)
    return idle(rig.decode) and idle(rig.prefill) and rig.held() == 0


@contextmanager
def stopped(engine: Server) -> Iterator[None]:
    engine.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        engine.signal(signal.SIGCONT)


def has_generated(engine: Server, count: int) -> bool:
    return engine.generated_tokens() > count


async def under_way(rig: Rig, body: Body, after_tokens: int) -> asyncio.Task[Answer]:
    """A request that decodes. An engine that stands still by itself may cost one its lease, and an error."""
    for _ in range(4):
        enough = rig.decode.generated_tokens() + after_tokens
        task = rig.send(COMPLETIONS, body)
        while not task.done():
            if await settles(partial(has_generated, rig.decode, enough), 0.5):
                return task
    raise AssertionError(task.result().body)


def clean_error(answer: Answer) -> bool:
    """Told as an error of the gateway's, before or in the stream; nobody takes it for the whole answer."""
    return not answer.finished and '"error"' in answer.body


def right_or_clean(answer: Answer, expected: Answer) -> bool:
    return clean_error(answer) or (answer.status, answer.text, answer.finished) == (200, expected.text, True)


async def test_decode_engine_stands_still_beyond_the_lease(rig: Rig, cold: Cold, rng: random.Random) -> None:
    """Its heartbeats stop with it, the blocks go to other prompts, and it fetches them all the same. What it
    fetched is in its prefix cache as well, for whoever asks the same again.
    """
    body = request(COMPLETIONS, rng)
    expected = cold(COMPLETIONS, body)
    expired = rig.expired()
    with rig.busy(rig.decode):
        task = await rig.sent(COMPLETIONS, body, rig.is_handed_over)
        with stopped(rig.decode):
            assert await settles(lambda: rig.expired() > expired)
            await asyncio.to_thread(rig.overwrite_prefill)
    answer = await asyncio.wait_for(task, PATIENCE_S)
    assert right_or_clean(answer, expected), answer.body
    assert await settles(lambda: idle(rig.decode))
    again = await asyncio.to_thread(rig.ask, COMPLETIONS, body)
    assert right_or_clean(again, expected), again.body


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_prefill_engine_stands_still_while_prefilling(
    rig: Rig, cold: Cold, rng: random.Random, stream: bool
) -> None:
    """The decode engine does it all, while the other still stands."""
    body = request(COMPLETIONS, rng)
    expected = cold(COMPLETIONS, body)
    with rig.busy(rig.prefill):
        task = await rig.sent(COMPLETIONS, {**body, "stream": stream}, lambda: waiting(rig.prefill) == 1)
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
        task = await rig.sent(COMPLETIONS, body, rig.is_handed_over)
        with stopped(rig.prefill):
            filler.close()
            await asyncio.wait([task], timeout=LEASE_S + 4)
    answer = await asyncio.wait_for(task, PATIENCE_S)
    assert right_or_clean(answer, expected), answer.body


async def test_clients_leave_at_any_time(rig: Rig, cold: Cold, rng: random.Random) -> None:
    """Of all that was handed over and that nobody will fetch the engines are told. Where NIXL is starved of
    CPU the notice itself comes late, and where a prefill ends while its abort is on the way there is none:
    those blocks are kept for the lease, and no longer.
    """
    body = request(COMPLETIONS, rng)
    expected, untold = cold(COMPLETIONS, body), rig.untold()
    for _ in range(20):
        task = rig.send(COMPLETIONS, {**request(COMPLETIONS, rng), "stream": rng.random() < 0.5})
        await asyncio.wait([task], timeout=rng.random() * 0.3)
        await leave(task)
    assert await settles(lambda: at_rest(rig))
    assert rig.untold() == untold
    answer = await asyncio.to_thread(rig.ask, COMPLETIONS, body)
    assert right_or_clean(answer, expected), answer.body


async def test_decode_engine_killed(rig: Rig, cold: Cold, rng: random.Random) -> None:
    """With one request decoding and one waiting there; no other engine decodes. Then it comes back."""
    decoding = {**request(COMPLETIONS, rng, max_tokens=4000), "ignore_eos": True, "stream": True}
    expected = cold(COMPLETIONS, {**decoding, "max_tokens": 24})
    first = await under_way(rig, decoding, 24)
    second = await rig.sent(COMPLETIONS, request(COMPLETIONS, rng), rig.is_handed_over)
    rig.decode.signal(signal.SIGKILL)
    broken, refused = await asyncio.wait_for(asyncio.gather(first, second), PATIENCE_S)
    assert broken.text.startswith(expected.text)
    assert not broken.finished
    assert refused.status in (502, 503), refused.body
    assert clean_error(refused)
    rig.restart(DECODE)


async def test_prefill_engine_killed_while_prefilling(rig: Rig, cold: Cold, rng: random.Random) -> None:
    """The decode engine does it all, at once. Then the other comes back, under a new engine id."""
    body = request(CHAT, rng)
    expected = cold(CHAT, body)
    with rig.busy(rig.prefill):
        task = await rig.sent(CHAT, body, lambda: waiting(rig.prefill) == 1)
        rig.prefill.signal(signal.SIGKILL)
        answer = await asyncio.wait_for(task, PATIENCE_S)
    assert (answer.status, answer.text, answer.finished) == (200, expected.text, True), answer.body
    rig.restart(PREFILL)


async def test_prefill_engine_killed_while_handed_over(rig: Rig, cold: Cold, rng: random.Random) -> None:
    """The decode engine cannot fetch and computes the prompt. Last in this file: the other stays dead."""
    body = request(CHAT, rng)
    expected = cold(CHAT, body)
    with rig.busy(rig.decode):
        task = await rig.sent(CHAT, {**body, "stream": True}, rig.is_handed_over)
        rig.prefill.signal(signal.SIGKILL)
    answer = await asyncio.wait_for(task, PATIENCE_S)
    assert right_or_clean(answer, expected), answer.body
