"""Split requests over NIXL: the answers of a single engine, and nothing left on the prefill engine.

The lease is far longer than any wait here: blocks that are free were fetched or released.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .fleet import Server
from .pd import (
    BLOCK_TOKENS,
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    Answer,
    Body,
    Rig,
    completion,
    idle,
    leave,
    nixl,
    request,
    settled,
    settles,
    tokens,
    waiting,
)

pytestmark = pytest.mark.engines

LEASE_S = 300
Cold = Callable[[str, Body], Answer]


@pytest.fixture(scope="module")
def rig(engines: list[Server], vllm_python: Path, run_directory: Path) -> Iterator[Rig]:
    made = Rig(vllm_python, run_directory / "tiny-model", run_directory, "nixl", nixl(LEASE_S))
    try:
        made.start()
        yield made
    finally:
        made.close()


@pytest.fixture(autouse=True)
def nothing_is_stranded(rig: Rig) -> Iterator[None]:
    """Whatever a test does: both engines come to rest, and no lease ended it."""
    yield
    assert settled(lambda: rig.held() == 0 and idle(rig.prefill) and idle(rig.decode))
    assert rig.expired() == 0


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
    assert rig.moved_tokens() - moved == expected.prompt_tokens


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_other_routes(rig: Rig, cold: Cold, rng: random.Random, path: str) -> None:
    body = request(path, rng)
    expected = cold(path, body)
    moved = rig.moved_tokens()
    answer = rig.ask(path, body)
    assert (answer.status, answer.text) == (200, expected.text), answer.body
    assert rig.moved_tokens() - moved == expected.prompt_tokens > BLOCK_TOKENS


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_cached_tokens_are_the_prefill_engine_s(rig: Rig, rng: random.Random, stream: bool) -> None:
    """Also where the decode engine holds the prompt: it is the same one that was just decoded there."""
    body = {**completion(tokens(rng, 300), 4), "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    first, again = (rig.ask(COMPLETIONS, body).body for _ in range(2))
    assert '"cached_tokens":0' in first.replace(" ", "")
    assert '"cached_tokens":288' in again.replace(" ", "")


@pytest.mark.parametrize(
    "more",
    [{"prompt": "two"}, {"n": 2, "temperature": 0.01, "seed": 1}, {"echo": True}, {"prompt_logprobs": 1}],
    ids=["two prompts", "two samples", "echo", "prompt logprobs"],
)
def test_what_cannot_be_split_is_answered_right(
    rig: Rig, cold: Cold, rng: random.Random, more: dict[str, Any]
) -> None:
    """Handed over, the second prompt would be answered with the first one's KV, status 200."""
    body = {**request(COMPLETIONS, rng), **more}
    if body["prompt"] == "two":
        body["prompt"] = [tokens(rng), tokens(rng)]
    moved = rig.moved_tokens()
    expected = cold(COMPLETIONS, body)
    answer = rig.ask(COMPLETIONS, body)
    assert (answer.status, answer.text) == (200, expected.text), answer.body
    assert rig.moved_tokens() == moved


def test_transfer_parameters_of_a_client_do_not_reach_an_engine(
    rig: Rig, cold: Cold, rng: random.Random
) -> None:
    """Without more beside it this one ends a decode engine's process."""
    body = request(COMPLETIONS, rng)
    expected = cold(COMPLETIONS, body)
    moved = rig.moved_tokens()
    answer = rig.ask(COMPLETIONS, {**body, "kv_transfer_params": {"do_remote_prefill": True}})
    assert (answer.status, answer.text) == (200, expected.text), answer.body
    assert rig.moved_tokens() - moved == 300


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_request_that_only_the_decode_engine_refuses(
    rig: Rig, rng: random.Random, path: str, stream: bool
) -> None:
    """The prefill engine, asked for one token, has no such objection: it has blocks to free."""
    body = {**request(path, rng, max_tokens=8), "min_tokens": 9, "stream": stream}
    answer = rig.ask(path, body)
    assert answer.status == 400, answer.body
    assert "min_tokens" in answer.body


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
class TestDisconnect:
    """The client leaves; `nothing_is_stranded` says what must come of it."""

    async def test_while_prefilling(self, rig: Rig, rng: random.Random, stream: bool) -> None:
        before = rig.decode.metric("vllm:prompt_tokens_total")
        with rig.busy(rig.prefill):
            task = rig.send(COMPLETIONS, {**request(COMPLETIONS, rng), "stream": stream})
            await rig.reach(task, lambda: waiting(rig.prefill) == 1)
            await leave(task)
            assert await settles(lambda: waiting(rig.prefill) == 0)
        assert rig.decode.metric("vllm:prompt_tokens_total") == before

    async def test_while_handed_over(self, rig: Rig, rng: random.Random, stream: bool) -> None:
        moved = rig.moved_tokens()
        with rig.busy(rig.decode):
            task = rig.send(COMPLETIONS, {**request(COMPLETIONS, rng), "stream": stream})
            await rig.reach(task, rig.is_handed_over)
            await leave(task)
            assert await settles(lambda: waiting(rig.decode) == 0)
            assert await settles(lambda: rig.held() == 0)
        assert rig.moved_tokens() == moved

    async def test_while_decoding(self, rig: Rig, rng: random.Random, stream: bool) -> None:
        body = {**request(COMPLETIONS, rng, max_tokens=7000), "ignore_eos": True, "stream": stream}
        before = rig.decode.generated_tokens()
        task = rig.send(COMPLETIONS, body)
        assert await settles(lambda: rig.decode.generated_tokens() > before + 5)
        await leave(task)
        assert await settles(lambda: idle(rig.decode))
        assert rig.decode.generated_tokens() < before + 7000
