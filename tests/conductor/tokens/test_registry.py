"""Which model's ids come from where, and what happens while they cannot."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvroute.conductor.tokens import registry as registry_module
from kvroute.conductor.tokens.exact import ExactTokenizer
from kvroute.conductor.tokens.files import UnusableTokenizer
from kvroute.conductor.tokens.outcome import Unavailable
from kvroute.conductor.tokens.registry import TokenizerOptions, Tokenizers, load_checked

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


async def test_a_model_is_found_by_its_configured_name(made: ExactTokenizer) -> None:
    tokenizers = ready(made)
    await tokenizers.run()
    assert tokenizers.now("m", COMPLETIONS, FOX) == made.encode(COMPLETIONS, FOX)
    for model in ("n", "unknown", "m:lora"):
        assert tokenizers.now(model, COMPLETIONS, FOX) == Unavailable("no_tokenizer")
    # Its name may have come to stand for a model of another source since `now` said None.
    for model in ("m", "n", "unknown"):
        assert await tokenizers.ask_engine(model, COMPLETIONS, FOX, "http://e") == Unavailable("no_tokenizer")


async def test_nothing_waits_for_a_tokenizer_that_is_loading(made: ExactTokenizer) -> None:
    release = asyncio.Event()

    async def load(_: TokenizerOptions) -> ExactTokenizer:
        await release.wait()
        return made

    tokenizers = Tokenizers({"m": LOCAL}, load=load)
    running = asyncio.create_task(tokenizers.run())
    await asyncio.sleep(0)
    assert tokenizers.now("m", COMPLETIONS, FOX) == Unavailable("loading")
    assert tokenizers.loaded() == {"m": False}
    release.set()
    await running
    assert tokenizers.loaded() == {"m": True}
    assert ids(tokenizers.now("m", COMPLETIONS, FOX))


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


async def test_predictions_that_do_not_hold_are_not_used(made: ExactTokenizer) -> None:
    now_s = [0.0]
    tokenizers = ready(made, clock=lambda: now_s[0])
    await tokenizers.run()
    for _ in range(3):
        tokenizers.observe_prompt_tokens("m", 10, 12)
    tokenizers.observe_prompt_tokens("unknown", 10, 12)
    assert tokenizers.now("m", COMPLETIONS, FOX) == Unavailable("mismatch")
    now_s[0] += 1000
    answers = [tokenizers.now("m", COMPLETIONS, FOX) for _ in range(8)]
    tokens = len(ids(made.encode(COMPLETIONS, FOX))[0])
    assert answers == [Unavailable("mismatch")] * 7 + [Unavailable("mismatch", tokens)]
    for _ in range(16):
        tokenizers.observe_prompt_tokens("m", tokens, tokens)
    assert ids(tokenizers.now("m", COMPLETIONS, FOX))
    assert tokenizers.agreements()["m"].losses == 1


async def test_the_engine_as_the_source() -> None:
    async def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"tokens": [1, 2]})

    with pytest.raises(ValueError, match="client is None"):
        Tokenizers({"m": TokenizerOptions("engine")})
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        tokenizers = Tokenizers({"m": TokenizerOptions("engine")}, client)
        await tokenizers.run()
        assert tokenizers.now("m", COMPLETIONS, FOX) is None
        assert ids(await tokenizers.ask_engine("m", COMPLETIONS, FOX, "http://e")) == [[1, 2]]
        for _ in range(3):
            tokenizers.observe_prompt_tokens("m", 2, 3)
        distrusted = await tokenizers.ask_engine("m", COMPLETIONS, FOX, "http://e")
        assert distrusted == Unavailable("mismatch")


async def test_an_engine_has_the_time_that_its_model_gives_it() -> None:
    async def never(_: httpx.Request) -> httpx.Response:
        await asyncio.sleep(3600)
        raise AssertionError

    options = TokenizerOptions("engine", engine_timeout_s=0.001)
    async with httpx.AsyncClient(transport=httpx.MockTransport(never)) as client:
        made = await Tokenizers({"m": options}, client).ask_engine("m", COMPLETIONS, FOX, "http://e")
    assert made == Unavailable("engine_timeout")


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
        tokenizers = ready(made, client=client)
        assert await tokenizers.compare("m", "http://e") is None
        await tokenizers.run()
        assert await tokenizers.compare("m", "http://e") is True
        assert ids(tokenizers.now("m", COMPLETIONS, FOX))
        wrong = True
        assert await tokenizers.compare("m", "http://e") is False
        assert tokenizers.now("m", COMPLETIONS, FOX) == Unavailable("mismatch")
        assert tokenizers.agreements()["m"].losses == 1
    async with httpx.AsyncClient(transport=httpx.MockTransport(lambda _: httpx.Response(404))) as client:
        tokenizers = ready(made, client=client)
        await tokenizers.run()
        assert await tokenizers.compare("m", "http://e") is None


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
