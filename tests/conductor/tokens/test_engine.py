"""Asking the engine's /tokenize."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from kvroute.conductor.tokens import engine as engine_module
from kvroute.conductor.tokens.engine import EngineTokenizer
from kvroute.conductor.tokens.outcome import TokenizedPrompts, Unavailable

from .tiny import ids

CHAT, COMPLETIONS = b"/v1/chat/completions", b"/v1/completions"
USER = {"role": "user", "content": "hi"}
Made = TokenizedPrompts | Unavailable


def ask(
    path: bytes,
    fields: dict[str, Any],
    answer: Callable[[httpx.Request], httpx.Response | Awaitable[httpx.Response]] | None = None,
    budget_s: float = 5.0,
) -> tuple[Made, list[dict[str, Any]]]:
    seen: list[dict[str, Any]] = []

    async def handle(request: httpx.Request) -> httpx.Response:
        assert request.url == "http://engine:1/tokenize"
        seen.append(json.loads(request.content))
        made = (
            answer(request) if answer is not None else httpx.Response(200, json={"tokens": [1, 2, len(seen)]})
        )
        return made if isinstance(made, httpx.Response) else await made

    async def run() -> Made:
        async with httpx.AsyncClient(transport=httpx.MockTransport(handle)) as client:
            return await EngineTokenizer(client).encode("http://engine:1", path, fields, budget_s)

    return asyncio.run(run()), seen


def test_nothing_but_the_budget_ends_a_question() -> None:
    limits: list[dict[str, float | None]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        limits.append(request.extensions["timeout"])
        return httpx.Response(200, json={"tokens": [1]})

    ask(COMPLETIONS, {"model": "m", "prompt": "a"}, answer)
    assert [set(each.values()) for each in limits] == [{None}], "the client's own is 5 s"


def test_chat_is_asked_as_the_engine_will_read_it() -> None:
    old = {"role": "assistant", "content": "x", "reasoning_content": "r"}
    both = {**old, "reasoning": "new"}
    fields = {
        "model": "m",
        "messages": [USER, old, both],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "reasoning_effort": "none",
        "documents": [{"title": "t"}],
        "chat_template_kwargs": {"a": 1},
        "temperature": 0.5,
    }
    made, (asked,) = ask(CHAT, fields)
    assert ids(made) == [[1, 2, 1]]
    assert asked == {
        "model": "m",
        "messages": [USER, *({"role": "assistant", "content": "x", "reasoning": r} for r in ("r", "new"))],
        "add_generation_prompt": True,
        "continue_final_message": False,
        "add_special_tokens": False,
        "chat_template_kwargs": {
            "enable_thinking": False,
            "a": 1,
            "reasoning_effort": "none",
            "documents": [{"title": "t"}],
        },
        "tools": fields["tools"],
    }


def test_completions_are_asked_text_by_text() -> None:
    made, asked = ask(COMPLETIONS, {"model": "m", "prompt": ["a", "b"], "add_special_tokens": False})
    assert ids(made) == [[1, 2, 1], [1, 2, 2]]
    assert asked[1] == {"model": "m", "prompt": "b", "add_special_tokens": False}
    made, asked = ask(COMPLETIONS, {"prompt": [7, 8]})
    assert ids(made) == [[7, 8]]
    assert asked == []


@pytest.mark.parametrize(
    ("path", "fields", "reason"),
    [
        (b"/v1/responses", {"input": "a"}, "route"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "multimodal"),
        (CHAT, {"messages": [USER], "chat_template": "x"}, "template"),
        (CHAT, {"messages": [USER], "chat_template_kwargs": {"tools": []}}, "shape"),
        (CHAT, {"messages": [USER], "truncate_prompt_tokens": 5}, "truncated"),
        (CHAT, {"messages": "x"}, "shape"),
        (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "shape"),
        (COMPLETIONS, {"prompt": ["a"] * 9}, "shape"),
        (COMPLETIONS, {"prompt": ""}, "empty"),
    ],
)
def test_nothing_is_asked(path: bytes, fields: dict[str, Any], reason: str) -> None:
    made, asked = ask(path, fields)
    assert isinstance(made, Unavailable)
    assert made.reason == reason
    assert asked == []


def refuse(_: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused")


async def never(_: httpx.Request) -> httpx.Response:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (refuse, "engine_error"),
        (lambda _: httpx.Response(500), "engine_error"),
        (lambda _: httpx.Response(200, text="<html>"), "engine_error"),
        (lambda _: httpx.Response(200, json={"tokens": "x"}), "engine_error"),
        (lambda _: httpx.Response(200, json={"tokens": [-1]}), "shape"),
        (lambda _: httpx.Response(200, json={"tokens": []}), "empty"),
        (lambda _: httpx.Response(200, json={"tokens": [1] * 100}), "engine_error"),
        (never, "engine_timeout"),
    ],
)
def test_answers_that_are_none(answer: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "MAX_ANSWER_BYTES", 100)
    made, _ = ask(COMPLETIONS, {"prompt": "a"}, answer, budget_s=0.05)
    assert made == Unavailable(reason)  # type: ignore[arg-type]


async def test_questions_in_flight_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "MAX_IN_FLIGHT", 1)
    release, arrived = asyncio.Event(), asyncio.Event()

    async def hold(_: httpx.Request) -> httpx.Response:
        arrived.set()
        await release.wait()
        return httpx.Response(200, json={"tokens": [1]})

    async with httpx.AsyncClient(transport=httpx.MockTransport(hold)) as client:
        engine = EngineTokenizer(client)
        first = asyncio.create_task(engine.encode("http://e", COMPLETIONS, {"prompt": "a"}, 5.0))
        await arrived.wait()
        assert await engine.encode("http://e", COMPLETIONS, {"prompt": "a"}) == Unavailable("busy")
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        release.set()
        assert ids(await engine.encode("http://e", COMPLETIONS, {"prompt": "a"}, 5.0)) == [[1]]
