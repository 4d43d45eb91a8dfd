"""POST /v1/completions: one prompt or several, as text or as token ids."""

from __future__ import annotations

from array import array
from typing import Any

import orjson

from kvroute.loadtests.mock_engine.dialects.base import (
    Body,
    Call,
    Defaults,
    Dialect,
    Part,
    ScriptBase,
    check_stream_options,
    field_of,
    plan_output,
    sse,
)
from kvroute.loadtests.mock_engine.tokens import Words, tokenize
from kvroute.loadtests.mock_engine.wire import invalid, rejected


def parse(body: Body, defaults: Defaults) -> Call:
    stream, include_usage = check_stream_options(body)
    if field_of(body, "n", int, 1) != 1:
        raise rejected("The mock engine answers n=1 only.", "n")
    parts = [Part(tokens) for tokens in prompt_tokens(body.get("prompt"))]
    limit, least = field_of(body, "max_tokens", int), field_of(body, "min_tokens", int, 0)
    for part in parts:
        plan_output(part, defaults, limit, least)
    call = Call(body.get("model") or defaults.model, parts, stream, include_usage)
    call.salt = field_of(body, "cache_salt", str)
    return call


def prompt_tokens(prompt: Any) -> list[array[int]]:
    """The tokens of a str, [str], [int] or [[int]]; refused when it is none of them or empty."""
    if isinstance(prompt, str):
        return [tokenize(prompt.encode("utf-8", "surrogatepass"))]
    if not isinstance(prompt, list):
        raise invalid("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    if not prompt:
        raise rejected("You must pass at least one prompt")
    if all(isinstance(item, int) for item in prompt):
        return [token_ids(prompt)]
    if not all(isinstance(item, (str, list)) for item in prompt):
        raise invalid("1 validation error:\n  prompt: Input should be a valid string or list", "prompt")
    return [tokens for item in prompt for tokens in prompt_tokens(item or "")]


def token_ids(ids: list[Any]) -> array[int]:
    """Token ids as an array; refused when one is not a token id."""
    try:
        return array("I", ids)
    except (TypeError, OverflowError) as error:
        raise invalid("1 validation error:\n  prompt: Input should be valid token ids", "prompt") from error


class CompletionScript(ScriptBase):
    """text_completion objects, whole or one per token."""

    def __init__(self, call: Call, words: Words) -> None:
        super().__init__(call, words)
        self._head = b'data: {"id":%b,"object":"text_completion","created":%d,"model":%b,"choices":[' % (
            orjson.dumps(call.id),
            call.created,
            orjson.dumps(call.model),
        )
        self._after = b'","logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'
        self._before = [self._head + b'{"index":%d,"text":"' % index for index in range(len(call.parts))]

    def opening(self) -> bytes:
        return b""

    def token(self, part: int, index: int) -> bytes:
        of = self.call.parts[part]
        after = self._after
        if index + 1 == of.output_tokens:
            reason = b'"finish_reason":"%b"' % of.finish_reason.encode()
            after = after.replace(b'"finish_reason":null', reason)
        return self._before[part] + self.words.piece(of.start + index) + after

    def uniform(self) -> tuple[bytes, bytes] | None:
        return self._before[0], self._after

    def closing(self) -> bytes:
        if not self.call.include_usage:
            return b"data: [DONE]\n\n"
        return sse(self._envelope([])) + b"data: [DONE]\n\n"

    def _envelope(self, choices: list[Body]) -> Body:
        call = self.call
        return {
            "id": call.id,
            "object": "text_completion",
            "created": call.created,
            "model": call.model,
            "choices": choices,
            "usage": call.usage(),
        }

    def plain(self) -> bytes:
        choices = [
            {
                "index": index,
                "text": self.text(part),
                "logprobs": None,
                "finish_reason": part.finish_reason,
                "stop_reason": None,
            }
            for index, part in enumerate(self.call.parts)
        ]
        return orjson.dumps(self._envelope(choices) | self.call.handoff())


DIALECT = Dialect("/v1/completions", parse, CompletionScript, "cmpl-")
