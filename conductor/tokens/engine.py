"""The engine's own `/tokenize` (vLLM) in place of a tokenizer of one's own: a round trip for each prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import httpx
import msgspec
import orjson
from msgspec import Struct

from kvroute.conductor.keys import pack_ids
from kvroute.conductor.tokens.call import flag, flat_prompts, mapping, optional_text, sequence
from kvroute.conductor.tokens.cases import texts as sample_texts
from kvroute.conductor.tokens.exact import ExactTokenizer
from kvroute.conductor.tokens.outcome import NotExact, TokenizedPrompts, Unavailable
from kvroute.conductor.tokens.vllm import RESERVED_KWARGS, TEXT_PARTS, documents

CHAT, COMPLETIONS = b"/v1/chat/completions", b"/v1/completions"
BUDGET_S = 0.05
MAX_IN_FLIGHT = 32
MAX_ANSWER_BYTES = 32 * 2**20
MAX_TEXTS = 8
"""Texts of one request that are asked for, each by itself."""
COMPARE_SEED = 7
COMPARE_TEXTS = 4
COMPARE_TIMEOUT_S = 10.0
"""Of each question of a comparison: no prompt waits for it."""


class _Answer(Struct):
    tokens: list[int]


class EngineTokenizer:
    """Asks the engine, at most `MAX_IN_FLIGHT` questions at a time, each within a budget."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self._in_flight = 0

    async def encode(
        self, url: str, path: bytes, fields: Mapping[str, Any], budget_s: float = BUDGET_S
    ) -> TokenizedPrompts | Unavailable:
        """`url` is that of an engine that serves the request's model. Never raises."""
        try:
            questions = _questions(path, fields)
            if self._in_flight >= MAX_IN_FLIGHT:
                return Unavailable("busy")
            self._in_flight += 1
            try:
                async with asyncio.timeout(budget_s):
                    return TokenizedPrompts(tuple([await self._ask(url, question) for question in questions]))
            finally:
                self._in_flight -= 1
        except NotExact as error:
            return Unavailable(error.reason)
        except (TimeoutError, httpx.TimeoutException):
            return Unavailable("engine_timeout")
        except (httpx.HTTPError, httpx.InvalidURL, msgspec.MsgspecError):
            return Unavailable("engine_error")
        except (TypeError, ValueError, RecursionError):
            return Unavailable("shape")

    async def _ask(self, url: str, question: bytes | list[int]) -> bytes:
        if isinstance(question, list):
            return pack_ids(question)
        headers = {"content-type": "application/json"}
        # The budget is the only limit: a client's own, of 5 s by default, would end longer ones.
        request = self._client.build_request(
            "POST", f"{url}/tokenize", content=question, headers=headers, timeout=None
        )
        response = await self._client.send(request, stream=True)
        try:
            if response.status_code != httpx.codes.OK:
                raise NotExact("engine_error")
            answer = bytearray()
            async for piece in response.aiter_bytes():
                answer += piece
                if len(answer) > MAX_ANSWER_BYTES:
                    raise NotExact("engine_error")
        finally:
            await response.aclose()
        tokens = msgspec.json.decode(answer, type=_Answer).tokens
        if not tokens:
            raise NotExact("empty")
        return pack_ids(tokens)


def _questions(path: bytes, fields: Mapping[str, Any]) -> list[bytes | list[int]]:
    """What to send to `/tokenize` for each prompt of a request, or its ids where it brings them."""
    if fields.get("truncate_prompt_tokens") is not None:
        raise NotExact("truncated")
    if path == CHAT:
        return [orjson.dumps(_chat(fields))]
    if path != COMPLETIONS:
        raise NotExact("route")
    if fields.get("suffix") is not None or fields.get("prompt_embeds") is not None:
        raise NotExact("shape")
    prompts = flat_prompts(fields.get("prompt"))
    if len(prompts) > MAX_TEXTS:
        raise NotExact("shape")
    special = flag(fields, "add_special_tokens", True)
    return [
        orjson.dumps({"model": fields.get("model"), "prompt": prompt, "add_special_tokens": special})
        if isinstance(prompt, str)
        else prompt
        for prompt in prompts
    ]


def _chat(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`/tokenize` has no `reasoning_effort` and no `documents`: as template arguments they are the same."""
    if fields.get("chat_template") is not None:
        raise NotExact("template")
    if isinstance(transfer := fields.get("kv_transfer_params"), dict) and transfer.get("prompt_token_ids"):
        raise NotExact("stateful")
    given = mapping(fields.get("chat_template_kwargs") or {})
    if not RESERVED_KWARGS.isdisjoint(given):
        raise NotExact("shape")
    effort = optional_text(fields.get("reasoning_effort"))
    if effort is not None:
        given = {"enable_thinking": effort != "none", **given, "reasoning_effort": effort}
    if (found := documents(fields.get("documents"))) is not None:
        given = {**given, "documents": found}
    asked = {
        "model": fields.get("model"),
        "messages": [_message(mapping(message)) for message in sequence(fields.get("messages"))],
        "add_generation_prompt": flag(fields, "add_generation_prompt", True),
        "continue_final_message": flag(fields, "continue_final_message", False),
        "add_special_tokens": flag(fields, "add_special_tokens", False),
        "chat_template_kwargs": given,
    }
    return asked if fields.get("tools") is None else {**asked, "tools": fields["tools"]}


def _message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """`/tokenize` does not read the old name of `reasoning`."""
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            if isinstance(part, dict) and part.get("type") not in TEXT_PARTS:
                raise NotExact("multimodal")
    if "reasoning_content" not in message:
        return message
    renamed = {name: value for name, value in message.items() if name != "reasoning_content"}
    if renamed.get("reasoning") is None:
        renamed["reasoning"] = message["reasoning_content"]
    return renamed


async def agrees_with_engine(
    exact: ExactTokenizer, engine: EngineTokenizer, url: str, model: str | None
) -> bool | None:
    """Whether both make the same ids of some texts and a chat; None when not even one could be compared."""
    compared = False
    texts = sample_texts(COMPARE_SEED, COMPARE_TEXTS, ())
    requests: list[tuple[bytes, dict[str, Any]]] = [(COMPLETIONS, {"prompt": text}) for text in texts]
    requests += [(CHAT, {"messages": [{"role": "user", "content": text}]}) for text in texts]
    for path, fields in requests:
        ours = exact.encode(path, fields)
        theirs = await engine.encode(url, path, {**fields, "model": model}, COMPARE_TIMEOUT_S)
        if isinstance(ours, TokenizedPrompts) and isinstance(theirs, TokenizedPrompts):
            if ours != theirs:
                return False
            compared = True
    return True if compared else None
