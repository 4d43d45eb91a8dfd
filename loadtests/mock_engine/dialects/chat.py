"""POST /v1/chat/completions"""

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
    check_stream_options,
    field_of,
    plan_output,
    sse,
)
from kvroute.loadtests.mock_engine.tokens import Words, render_chat, tokenize
from kvroute.loadtests.mock_engine.wire import invalid, rejected


def parse(body: Body, defaults: Defaults) -> Call:
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise invalid("1 validation error:\n  ('body', 'messages'): Field required", "messages")
    stream, include_usage = check_stream_options(body)
    tools = field_of(body, "tools", list)
    choice = field_of(body, "tool_choice", (str, dict))
    if field_of(body, "n", int, 1) != 1:
        raise rejected("The mock engine answers n=1 only.", "n")
    part = Part(chat_tokens(messages, tools, bool(field_of(body, "add_generation_prompt", bool, True))))
    limit = field_of(body, "max_completion_tokens", int, field_of(body, "max_tokens", int))
    call = Call(body.get("model") or defaults.model, [part], stream, include_usage)
    call.salt = field_of(body, "cache_salt", str)
    _choose_tool(call, tools, choice)
    plan_output(part, defaults, limit, field_of(body, "min_tokens", int, 0), call.tool is not None)
    return call


def chat_tokens(messages: list[Any], tools: list[Any] | None = None, generation: bool = True) -> Any:
    """Tokens of a chat; refused when it is not one."""
    try:
        return tokenize(render_chat(messages, tools, generation))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise invalid(f"1 validation error:\n  messages: {error}", "messages") from error


def _choose_tool(call: Call, tools: list[Any] | None, choice: str | Body | None) -> None:
    """The tool to call when the request insists on one."""
    if choice != "required" and not isinstance(choice, dict):
        return
    if not tools:
        raise invalid("When using `tool_choice`, `tools` must be set.", "tool_choice")
    try:
        functions = {tool["function"]["name"]: tool["function"] for tool in tools}
        name = choice["function"]["name"] if isinstance(choice, dict) else next(iter(functions))
        properties = (functions[name].get("parameters") or {}).get("properties") or {}
    except (KeyError, TypeError, AttributeError) as error:
        raise invalid(
            "The tool specified in `tool_choice` does not match any of the tools.", "tools"
        ) from error
    call.tool = name
    call.tool_argument = next(iter(properties), "input")
    call.tool_finish = "tool_calls" if choice == "required" else "stop"


class ChatScript(ScriptBase):
    """chat.completion, or chat.completion.chunk events: the role first, then one delta per token."""

    def __init__(self, call: Call, words: Words) -> None:
        super().__init__(call, words)
        self._part = call.parts[0]
        self._before = self._prefix()
        self._after = b'"},"logprobs":null,"finish_reason":null}]}\n\n'
        if call.tool is not None:
            self._before += b'"tool_calls":[{"index":0,"function":{"arguments":"'
            self._after = b'"}}]' + self._after[1:]
        else:
            self._before += b'"content":"'

    def _prefix(self) -> bytes:
        call = self.call
        return b'data: {"id":%b,"object":"chat.completion.chunk","created":%d,"model":%b,"choices":[%b' % (
            orjson.dumps(call.id),
            call.created,
            orjson.dumps(call.model),
            b'{"index":0,"delta":{',
        )

    def _chunk(self, delta: Body, finish: str | None = None) -> Body:
        choice: Body = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        if finish is not None:
            choice["stop_reason"] = None
        return self._envelope([choice])

    def _envelope(self, choices: list[Body]) -> Body:
        call = self.call
        return {
            "id": call.id,
            "object": "chat.completion.chunk",
            "created": call.created,
            "model": call.model,
            "choices": choices,
        }

    def _finish(self) -> str:
        reason = self._part.finish_reason
        return self.call.tool_finish if self.call.tool is not None and reason == "stop" else reason

    def _arguments(self) -> tuple[str, str]:
        """What stands before and after the text in a tool call's arguments."""
        return f'{{{orjson.dumps(self.call.tool_argument).decode()}: "', '"}'

    def _tool_id(self) -> str:
        return "chatcmpl-tool-" + self.call.id.removeprefix("chatcmpl-")

    def opening(self) -> bytes:
        role = sse(self._chunk({"role": "assistant", "content": ""}))
        if self.call.tool is None:
            return role
        function = {"name": self.call.tool, "arguments": self._arguments()[0]}
        start = {"index": 0, "id": self._tool_id(), "type": "function", "function": function}
        return role + sse(self._chunk({"tool_calls": [start]}))

    def token(self, part: int, index: int) -> bytes:
        piece = self.words.piece(self._part.start + index)
        if index + 1 < self._part.output_tokens:
            return self._before + piece + self._after
        if self.call.tool is None:
            return sse(self._chunk({"content": piece.decode()}, self._finish()))
        function = {"arguments": piece.decode() + self._arguments()[1]}
        return sse(self._chunk({"tool_calls": [{"index": 0, "function": function}]}, self._finish()))

    def uniform(self) -> tuple[bytes, bytes] | None:
        return self._before, self._after

    def closing(self) -> bytes:
        if not self.call.include_usage:
            return b"data: [DONE]\n\n"
        return sse(self._envelope([]) | {"usage": self.call.usage()}) + b"data: [DONE]\n\n"

    def plain(self) -> bytes:
        call, text = self.call, self.text(self._part)
        message: Body = {"role": "assistant", "content": text, "refusal": None}
        if call.tool is not None:
            before, after = self._arguments()
            function = {"name": call.tool, "arguments": before + text + after}
            message["content"] = None
            message["tool_calls"] = [{"id": self._tool_id(), "type": "function", "function": function}]
        choice = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": self._finish(),
            "stop_reason": None,
        }
        return orjson.dumps(
            {
                "id": call.id,
                "object": "chat.completion",
                "created": call.created,
                "model": call.model,
                "choices": [choice],
                "usage": call.usage(),
                **call.handoff(),
            }
        )


DIALECT = Dialect("/v1/chat/completions", parse, ChatScript, "chatcmpl-")
