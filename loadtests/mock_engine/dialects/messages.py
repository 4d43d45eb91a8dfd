"""POST /v1/messages: Anthropic's API."""

from __future__ import annotations

from typing import Any

import orjson

from kvroute.loadtests.mock_engine.dialects.base import (
    Body,
    Call,
    Defaults,
    Dialect,
    Part,
    ScriptBase,
    field_of,
    plan_output,
    sse,
)
from kvroute.loadtests.mock_engine.dialects.chat import chat_tokens
from kvroute.loadtests.mock_engine.tokens import Words
from kvroute.loadtests.mock_engine.wire import invalid


def parse(body: Body, defaults: Defaults) -> Call:
    messages, limit = body.get("messages"), field_of(body, "max_tokens", int)
    if not isinstance(messages, list):
        raise invalid("1 validation error:\n  ('body', 'messages'): Field required", "messages")
    if limit is None:
        raise invalid("1 validation error:\n  ('body', 'max_tokens'): Field required", "max_tokens")
    system: Any = field_of(body, "system", (str, list))
    if system:
        messages = [{"role": "system", "content": system}, *messages]
    part = Part(chat_tokens(messages, field_of(body, "tools", list)))
    plan_output(part, defaults, limit)
    stream = bool(field_of(body, "stream", bool, False))
    return Call(body.get("model") or defaults.model, [part], stream)


class MessageScript(ScriptBase):
    """A message, or the events that build one up."""

    _BEFORE = (
        b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
        b'"delta":{"type":"text_delta","text":"'
    )

    _AFTER = b'"}}\n\n'

    def __init__(self, call: Call, words: Words) -> None:
        super().__init__(call, words)
        self._part = call.parts[0]

    def _stop_reason(self) -> str:
        return "max_tokens" if self._part.finish_reason == "length" else "end_turn"

    def _usage(self, output_tokens: int) -> Body:
        call = self.call
        return {
            "input_tokens": call.prompt_tokens - call.cached_tokens,
            "output_tokens": output_tokens,
            "cache_read_input_tokens": call.cached_tokens,
        }

    def _message(self, content: list[Body], stop: str | None, output_tokens: int) -> Body:
        return {
            "id": self.call.id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self.call.model,
            "stop_reason": stop,
            "stop_sequence": None,
            "usage": self._usage(output_tokens),
        }

    def opening(self) -> bytes:
        block = {"type": "text", "text": ""}
        start = {"type": "message_start", "message": self._message([], None, 0)}
        return sse(start, "message_start") + sse(
            {"type": "content_block_start", "index": 0, "content_block": block}, "content_block_start"
        )

    def token(self, part: int, index: int) -> bytes:
        return self._BEFORE + self.words.piece(self._part.start + index) + self._AFTER

    def uniform(self) -> tuple[bytes, bytes] | None:
        return self._BEFORE, self._AFTER

    def closing(self) -> bytes:
        delta = {"stop_reason": self._stop_reason(), "stop_sequence": None}
        usage = self._usage(self.call.output_tokens)
        return (
            sse({"type": "content_block_stop", "index": 0}, "content_block_stop")
            + sse({"type": "message_delta", "delta": delta, "usage": usage}, "message_delta")
            + sse({"type": "message_stop"}, "message_stop")
        )

    def error(self, message: str) -> bytes:
        return sse({"type": "error", "error": {"type": "internal_error", "message": message}}, "error")

    def plain(self) -> bytes:
        block = {"type": "text", "text": self.text(self._part)}
        message = self._message([block], self._stop_reason(), self.call.output_tokens)
        return orjson.dumps(message | self.call.handoff())


DIALECT = Dialect("/v1/messages", parse, MessageScript, "chatcmpl-")
