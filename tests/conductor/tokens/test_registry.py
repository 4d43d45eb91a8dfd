"""Which model's ids come from where, and what happens while they cannot."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvroute.conductor.tokens import registry as registry_module
from kvroute.conductor.tokens.exact import THREAD_ABOVE_BYTES, ExactTokenizer
from kvroute.conductor.tokens.files import UnusableTokenizer
from kvroute.conductor.tokens.outcome import Unavailable
from kvroute.conductor.tokens.registry import TokenizerOptions, Tokenizers, load_checked, needs_later

from .tiny import exact, ids, write

COMPLETIONS = b"/v1/completions"
FOX = {"prompt": "the fox"}
LOCAL = TokenizerOptions(tokenizer=Path("/somewhere"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> ExactTokenizer:
    return exact(write(tmp_path_factory.mktemp("model")))


def ready(made: ExactTokenizer, **more: Any) -> Tokenizers:
    async def load(_: TokenizerOptions) -> ExactTokenizer:
        return made

    return Tokenizers({"m": LOCAL, "n": TokenizerOptions("bytes")}, load=load, **more)


async def test_a_model_is_found_by_its_name_its_adapters_and_alone(made: ExactTokenizer) -> None:
    tokenizers = ready(made)
    await tokenizers.run()
    expected = made.encode(COMPLETIONS, FOX)
    tokenizers.name_adapters({"lora": "m", "other": "unknown"})
    for model in ("m", "lora", "m:lora", None):
        assert tokenizers.now(model, COMPLETIONS, FOX) == expected
    for model in ("n", "other", "unknown", "x:y"):
        assert tokenizers.now(model, COMPLETIONS, FOX) == Unavailable("no_tokenizer")
        assert await tokenizers.later(model, COMPLETIONS, FOX) == Unavailable("no_tokenizer")
    tokenizers.close()


async def test_large_bodies_are_answered_later(made: ExactTokenizer) -> None:
    tokenizers = ready(made)
    await tokenizers.run()
    body = json.dumps(FOX).encode()
    assert tokenizers.now("m", COMPLETIONS, body) is None
    expected = made.encode(COMPLETIONS, FOX)
    assert await tokenizers.later("m", COMPLETIONS, body) == expected
    assert await tokenizers.later("m", COMPLETIONS, FOX) == expected
    # What orjson refuses and Python's parser takes.
    assert await tokenizers.later("m", COMPLETIONS, body[:-1] + b', "top_p": NaN}') == expected
    for bad in (b"[1]", b"{", b"[" * 100_000, b"\xff"):
        assert await tokenizers.later("m", COMPLETIONS, bad) == Unavailable("shape")
    assert not needs_later(THREAD_ABOVE_BYTES)
    assert needs_later(THREAD_ABOVE_BYTES + 1)
    tokenizers.close()


async def test_later_is_bounded(made: ExactTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "MAX_BODY_BYTES", 30)
    monkeypatch.setattr(registry_module, "MAX_WAITING", 2)
    tokenizers = ready(made)
    await tokenizers.run()
    assert await tokenizers.later("m", COMPLETIONS, b" " * 31) == Unavailable("too_long")
    hold, started = threading.Event(), threading.Semaphore(0)
    encode = made.encode

    def held(path: bytes, fields: Any) -> Any:
        started.release()
        hold.wait(10)
        return encode(path, fields)

    monkeypatch.setattr(made, "encode", held)
    asked = [asyncio.create_task(tokenizers.later("m", COMPLETIONS, FOX)) for _ in range(3)]
    await asyncio.sleep(0)
    assert await asked[2] == Unavailable("busy")
    # The one that gave up still has its thread, and its room.
    await asyncio.to_thread(lambda: [started.acquire(timeout=10) for _ in range(2)])
    asked[0].cancel()
    await asyncio.gather(asked[0], return_exceptions=True)
    assert await tokenizers.later("m", COMPLETIONS, FOX) == Unavailable("busy")
    hold.set()
    assert ids(await asked[1])
    for _ in range(3):
        assert ids(await tokenizers.later("m", COMPLETIONS, FOX)), "room was not given back"
    tokenizers.close()


async def test_nothing_waits_for_a_tokenizer_that_is_loading(made: ExactTokenizer) -> None:
    release = asyncio.Event()

    async def load(_: TokenizerOptions) -> ExactTokenizer:
        await release.wait()
        return made

    tokenizers = Tokenizers({"m": LOCAL}, load=load)
    running = asyncio.create_task(tokenizers.run())
    await asyncio.sleep(0)
    assert tokenizers.now("m", COMPLETIONS, FOX) == Unavailable("loading")
    assert await tokenizers.later("m", COMPLETIONS, FOX) == Unavailable("loading")
    assert tokenizers.loaded() == {"m": False}
    release.set()
    await running
    assert tokenizers.loaded() == {"m": True}
    assert ids(tokenizers.now("m", COMPLETIONS, FOX))
    tokenizers.close()


async def test_a_load_that_fails_is_tried_again_ever_later(
    made: ExactTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    tokenizers: Tokenizers

    async def sleep(delay_s: float) -> None:
        waits.append(delay_s)
        assert tokenizers.now("bad", COMPLETIONS, FOX) == Unavailable("load_failed")
        assert ids(tokenizers.now("good", COMPLETIONS, FOX))

    outcomes: list[Exception | None] = [UnusableTokenizer("no file"), RuntimeError("odd"), OSError("disk")]
    outcomes += [UnusableTokenizer("still")] * 8 + [None]
    bad = TokenizerOptions(tokenizer=Path("/bad"))

    async def load(options: TokenizerOptions) -> ExactTokenizer:
        if options is bad and (failure := outcomes.pop(0)) is not None:
            raise failure
        return made

    monkeypatch.setattr(registry_module.asyncio, "sleep", sleep)
    tokenizers = Tokenizers({"bad": bad, "good": LOCAL}, load=load)
    await tokenizers.run()
    assert waits == [5, 10, 20, 40, 80, 160, 320, 600, 600, 600, 600]
    assert ids(tokenizers.now("bad", COMPLETIONS, FOX))
    tokenizers.close()


async def test_predictions_that_do_not_hold_are_not_used(made: ExactTokenizer) -> None:
    now_s = [0.0]
    tokenizers = ready(made, clock=lambda: now_s[0])
    await tokenizers.run()
    for _ in range(3):
        tokenizers.observe_prompt_tokens("m", 10, 12)
    tokenizers.observe_prompt_tokens("unknown", 10, 12)
    assert tokenizers.now("m", COMPLETIONS, FOX) == Unavailable("mismatch")
    assert await tokenizers.later("m", COMPLETIONS, FOX) == Unavailable("mismatch")
    now_s[0] += 1000
    answers = [tokenizers.now("m", COMPLETIONS, FOX) for _ in range(8)]
    tokens = len(ids(made.encode(COMPLETIONS, FOX))[0])
    assert answers == [Unavailable("mismatch")] * 7 + [Unavailable("mismatch", tokens)]
    for _ in range(16):
        tokenizers.observe_prompt_tokens("m", tokens, tokens)
    assert ids(tokenizers.now("m", COMPLETIONS, FOX))
    assert tokenizers.agreements()["m"].losses == 1
    tokenizers.close()


async def test_the_engine_as_the_source() -> None:
    async def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"tokens": [1, 2]})

    with pytest.raises(ValueError, match="client is None"):
        Tokenizers({"m": TokenizerOptions("engine")})
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        tokenizers = Tokenizers({"m": TokenizerOptions("engine")}, client)
        await tokenizers.run()
        assert tokenizers.now("m", COMPLETIONS, FOX) is None
        assert ids(await tokenizers.later("m", COMPLETIONS, FOX, "http://e")) == [[1, 2]]
        assert ids(await tokenizers.later("m", COMPLETIONS, b'{"prompt": "a"}', "http://e")) == [[1, 2]]
        assert await tokenizers.later("m", COMPLETIONS, b"[]", "http://e") == Unavailable("shape")
        assert await tokenizers.later("m", COMPLETIONS, FOX) == Unavailable("engine_error")
        tokenizers.close()


async def test_an_engine_that_tokenises_otherwise_is_found_out(made: ExactTokenizer) -> None:
    wrong = False

    async def answer(request: httpx.Request) -> httpx.Response:
        asked = json.loads(request.content)
        path = b"/v1/chat/completions" if "messages" in asked else COMPLETIONS
        (tokens,) = ids(
            made.encode(path, {name: asked[name] for name in ("prompt", "messages") if name in asked})
        )
        return httpx.Response(200, json={"tokens": tokens[1:] if wrong and path != COMPLETIONS else tokens})

    assert await ready(made).compare("m", "http://e") is None
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        tokenizers = ready(made, client=client, engine_budget_s=5.0)
        assert await tokenizers.compare("m", "http://e") is None
        await tokenizers.run()
        assert await tokenizers.compare("m", "http://e") is True
        assert ids(tokenizers.now("m", COMPLETIONS, FOX))
        wrong = True
        assert await tokenizers.compare("m", "http://e") is False
        assert tokenizers.now("m", COMPLETIONS, FOX) == Unavailable("mismatch")
        assert tokenizers.agreements()["m"].losses == 1
        tokenizers.close()
    async with httpx.AsyncClient(transport=httpx.MockTransport(lambda _: httpx.Response(404))) as client:
        tokenizers = ready(made, client=client)
        await tokenizers.run()
        assert await tokenizers.compare("m", "http://e") is None
        tokenizers.close()


@pytest.mark.parametrize(
    "options", [{}, {"source": "engine", "tokenizer": Path("x")}, {"source": "bytes", "tokenizer": Path("x")}]
)
def test_options_name_what_is_wrong(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a path is expected with source 'local', and with no other"):
        TokenizerOptions(**options)


async def test_a_directory_is_loaded_and_checked(tmp_path: Path) -> None:
    loaded = await load_checked(TokenizerOptions(tokenizer=write(tmp_path)))
    assert loaded.encoder.name == "fastokens"
    with pytest.raises(UnusableTokenizer, match="is missing"):
        await load_checked(TokenizerOptions(tokenizer=tmp_path / "none"))
