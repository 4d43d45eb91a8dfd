"""Split requests over a store that both engines read and write (vLLM's ExampleConnector): no parameters."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .fleet import Server
from .pd import (
    BLOCK_TOKENS,
    CHAT,
    COMPLETIONS,
    PATIENCE_S,
    Answer,
    Body,
    Rig,
    idle,
    leave,
    request,
    settled,
    settles,
    shared_storage,
    tokens,
    waiting,
)

pytestmark = pytest.mark.engines

Cold = Callable[[str, Body], Answer]


@pytest.fixture(scope="module")
def rig(
    engines: list[Server],
    vllm_python: Path,
    run_directory: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Rig]:
    transfer = shared_storage(tmp_path_factory.mktemp("store"))
    made = Rig(vllm_python, run_directory / "tiny-model", run_directory, "storage", transfer)
    try:
        made.start()
        yield made
    finally:
        made.close()


def readable(prompt_tokens: int) -> int:
    """What this connector reads back: the whole blocks before the last token, but nothing where that one is
    alone in its block.
    """
    blocks = (prompt_tokens - 1) // BLOCK_TOKENS
    return 0 if prompt_tokens % BLOCK_TOKENS == 1 else blocks * BLOCK_TOKENS


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_the_text_is_a_cold_engine_s(
    rig: Rig, cold: Cold, rng: random.Random, path: str, stream: bool
) -> None:
    body = request(path, rng)
    expected = cold(path, body)
    moved = rig.moved_tokens()
    answer = rig.ask(path, {**body, "stream": stream})
    assert (answer.status, answer.text, answer.finished) == (200, expected.text, True), answer.body
    assert rig.moved_tokens() - moved == readable(expected.prompt_tokens)
    assert settled(lambda: rig.held() == 0)


def test_two_prompts(rig: Rig, cold: Cold, rng: random.Random) -> None:
    body = {**request(COMPLETIONS, rng), "prompt": [tokens(rng), tokens(rng)]}
    expected = cold(COMPLETIONS, body)
    answer = rig.ask(COMPLETIONS, body)
    assert (answer.status, answer.text) == (200, expected.text), answer.body


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_client_that_leaves_while_prefilling(rig: Rig, rng: random.Random, stream: bool) -> None:
    before = rig.decode.metric("vllm:prompt_tokens_total")
    with rig.busy(rig.prefill):
        task = rig.send(COMPLETIONS, {**request(COMPLETIONS, rng), "stream": stream})
        await rig.reach(task, lambda: waiting(rig.prefill) == 1)
        await leave(task)
        assert await settles(lambda: waiting(rig.prefill) == 0)
    assert await settles(lambda: idle(rig.prefill) and rig.held() == 0)
    assert rig.decode.metric("vllm:prompt_tokens_total") == before


async def test_prefill_engine_killed_while_prefilling(rig: Rig, cold: Cold, rng: random.Random) -> None:
    """The decode engine does it all. Last in this file: the engine stays dead."""
    body = request(CHAT, rng)
    expected = cold(CHAT, body)
    with rig.busy(rig.prefill):
        task = rig.send(CHAT, body)
        await rig.reach(task, lambda: waiting(rig.prefill) == 1)
        rig.prefill.signal(signal.SIGKILL)
        answer = await asyncio.wait_for(task, PATIENCE_S)
    assert (answer.status, answer.text) == (200, expected.text), answer.body
