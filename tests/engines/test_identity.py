"""Through the gateway and straight from the engine: the same status, headers and bytes.

Every call carries the same `x-request-id`, which vLLM turns into the ids of most replies, so what is left
to blank out is the time of creation and the random ids of the Responses API.
"""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from .fleet import MODEL, Server, serving

pytestmark = pytest.mark.engines

Body = dict[str, Any]
HEADERS = {"x-request-id": "one-and-the-same", "authorization": "Bearer passes-through", "x-tenant": "blue"}
SAMPLING = {"model": MODEL, "temperature": 0, "seed": 7}
MESSAGES = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "Was ist 気, 🙂 é?"},
]

CHAT = {**SAMPLING, "messages": MESSAGES, "max_tokens": 24}
COMPLETION = {**SAMPLING, "prompt": "The if statement is used for conditional execution", "max_tokens": 24}
RESPONSES = {"model": MODEL, "temperature": 0, "input": "Name a built-in type.", "max_output_tokens": 12}
ANTHROPIC = {"model": MODEL, "temperature": 0, "messages": MESSAGES[1:], "max_tokens": 12}
USAGE = {"stream_options": {"include_usage": True}}

WHOLE: dict[str, tuple[str, Body]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "chat with logprobs": ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}),
    "chat, three choices": ("/v1/chat/completions", {**CHAT, "n": 3, "temperature": 0.8}),
    "completion": ("/v1/completions", COMPLETION),
    "completion of token ids": ("/v1/completions", {**COMPLETION, "prompt": [300, 301, 302, 303]}),
    "completion of two prompts": ("/v1/completions", {**COMPLETION, "prompt": ["Lists", "Tuples"]}),
    "query string": ("/v1/completions?a=1&a=2&b=%2F", COMPLETION),
    "responses": ("/v1/responses", RESPONSES),
    "messages": ("/v1/messages", ANTHROPIC),
    "tokenize": ("/tokenize", {"model": MODEL, "prompt": "naïve 気 🙂"}),
    "tokenize a chat": ("/tokenize", {"model": MODEL, "messages": MESSAGES}),
    "detokenize": ("/detokenize", {"model": MODEL, "tokens": [264, 78, 324, 1268]}),
    "no embeddings here": ("/v1/embeddings", {"model": MODEL, "input": "x"}),
    "refused by the engine": ("/v1/completions", {**COMPLETION, "max_tokens": -1}),
    "too long for the engine": ("/v1/completions", {**COMPLETION, "max_tokens": 10**6}),
    "unknown path": ("/no/such/path", {"model": MODEL}),
}
STREAMS: dict[str, tuple[str, Body]] = {
    "chat": ("/v1/chat/completions", {**CHAT, **USAGE}),
    "completion": ("/v1/completions", {**COMPLETION, **USAGE}),
    "responses": ("/v1/responses", RESPONSES),
    "messages": ("/v1/messages", ANTHROPIC),
}


def blanked(body: bytes) -> bytes:
    body = re.sub(rb'"(created|created_at|completed_at)":\d+(\.\d+)?', rb'"\1":0', body)
    return re.sub(rb'"(resp|msg)_[0-9a-f]+"', rb'"\1_"', body)


def forwarded(response: httpx.Response) -> list[tuple[bytes, bytes]]:
    """Headers in their order and spelling, without the date and those the gateway adds."""
    assert len(response.headers.get_list("date")) == 1
    return [(k, v) for k, v in response.headers.raw if k != b"date" and not k.startswith(b"x-kvroute-")]


def warm(client: httpx.Client, engines: list[Server], path: str, body: Body) -> None:
    """Both engines hold the prompt before anything is compared, so that `cached_tokens` is the same."""
    for engine in engines:
        client.post(engine.url + path, json=body, headers=HEADERS)


def both(
    client: httpx.Client, gateway: Server, engines: list[Server], path: str, body: Body
) -> list[httpx.Response]:
    """One response through the gateway from each engine; round robin soon comes to both."""
    by_engine: dict[str, httpx.Response] = {}
    for _ in range(8):
        response = client.post(gateway.url + path, json=body, headers=HEADERS)
        by_engine[serving(response, engines).name] = response
        if len(by_engine) == len(engines):
            return list(by_engine.values())
    raise AssertionError(f"only {list(by_engine)} served")


@pytest.mark.parametrize("case", WHOLE)
def test_whole_response(case: str, client: httpx.Client, gateway: Server, engines: list[Server]) -> None:
    path, body = WHOLE[case]
    warm(client, engines, path, body)
    for routed in both(client, gateway, engines, path, body):
        direct = client.post(serving(routed, engines).url + path, json=body, headers=HEADERS)
        assert routed.status_code == direct.status_code
        assert forwarded(routed) == forwarded(direct)
        assert blanked(routed.content) == blanked(direct.content)


@pytest.mark.parametrize("case", STREAMS)
def test_stream(case: str, client: httpx.Client, gateway: Server, engines: list[Server]) -> None:
    """vLLM joins tokens into one event when its own server task is late, about one stream in eight.

    So two direct calls may differ in where events end, never in what they say: text and usage must agree
    in every pair, and each engine's bytes must agree in one of a few pairs.
    """
    path, body = STREAMS[case]
    body = {**body, "stream": True}
    warm(client, engines, path, body)
    unequal = {engine.name for engine in engines}
    for _ in range(12):
        for routed in both(client, gateway, engines, path, body):
            engine = serving(routed, engines)
            direct = client.post(engine.url + path, json=body, headers=HEADERS)
            assert (routed.status_code, forwarded(routed)) == (200, forwarded(direct))
            assert told(routed) == told(direct)
            if blanked(routed.content) == blanked(direct.content):
                unequal.discard(engine.name)
        if not unequal:
            return
    raise AssertionError(f"never the same bytes as a direct call: {unequal}")


def told(response: httpx.Response) -> tuple[str, Body | None, str]:
    """A stream's text, its usage and its last line, whichever of the three APIs it speaks."""
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    text, usage = "", None
    for event in (json.loads(line) for line in lines if line != "[DONE]"):
        for choice in event.get("choices", ()):
            text += choice.get("text") or choice.get("delta", {}).get("content") or ""
        if isinstance(delta := event.get("delta"), str):
            text += delta
        elif delta is not None:
            text += delta.get("text") or ""
        usage = event.get("usage") or usage
    assert text
    return text, usage, lines[-1] if lines[-1] == "[DONE]" else json.loads(lines[-1])["type"]


def test_get_requests_are_passed_on(client: httpx.Client, gateway: Server, engines: list[Server]) -> None:
    routed = client.get(f"{gateway.url}/version", headers=HEADERS)
    direct = client.get(f"{serving(routed, engines).url}/version", headers=HEADERS)
    assert forwarded(routed) == forwarded(direct)
    assert routed.content == direct.content


def test_models_are_listed_with_every_field_of_the_engine(
    client: httpx.Client, gateway: Server, engines: list[Server]
) -> None:
    direct = client.get(f"{engines[0].url}/v1/models").json()["data"][0]
    (card,) = client.get(f"{gateway.url}/v1/models").json()["data"]
    assert card["id"] == MODEL
    assert direct.keys() <= card.keys()
    assert card["max_model_len"] == direct["max_model_len"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_unknown_model(path: str, client: httpx.Client, gateway: Server) -> None:
    response = client.post(gateway.url + path, json={**CHAT, **COMPLETION, "model": "other"})
    assert response.status_code == 404
    error = response.json()["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    assert "other" in error["message"]
    assert MODEL in error["message"]
