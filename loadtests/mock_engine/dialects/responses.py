"""POST /v1/responses: OpenAI's newer API, one output message."""

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
    messages = _messages(body)
    part = Part(chat_tokens(messages, field_of(body, "tools", list)))
    plan_output(part, defaults, field_of(body, "max_output_tokens", int))
    stream = bool(field_of(body, "stream", bool, False))
    call = Call(body.get("model") or defaults.model, [part], stream)
    call.salt = field_of(body, "cache_salt", str)
    return call


def _messages(body: Body) -> list[Body]:
    """Instructions and input items as a chat."""
    given = body.get("input")
    if isinstance(given, str):
        messages: list[Any] = [{"role": "user", "content": given}]
    elif isinstance(given, list):
        messages = [_message(item) for item in given]
    else:
        raise invalid("1 validation error:\n  ('body', 'input'): Field required", "input")
    instructions = field_of(body, "instructions", str)
    return ([{"role": "system", "content": instructions}] if instructions else []) + messages


def _message(item: Any) -> Any:
    """Function calls and their outputs are items of their own here."""
    kind = item.get("type") if isinstance(item, dict) else None
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        return {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
    if kind == "function_call_output":
        return {"role": "tool", "content": item.get("output")}
    return item


class ResponseScript(ScriptBase):
    """A response object, or the events that build one up, numbered from 0."""

    def __init__(self, call: Call, words: Words) -> None:
        super().__init__(call, words)
        self._part = call.parts[0]
        self._item = "msg_" + call.id.removeprefix("resp_")
        self._sequence = 0
        where = {"item_id": self._item, "output_index": 0, "content_index": 0}
        self._where: Body = where
        self._before = b"event: response.output_text.delta\ndata: " + orjson.dumps(
            {"type": "response.output_text.delta", **where, "logprobs": []}
        ).replace(b"}", b',"delta":"')

    def _event(self, name: str, **fields: Any) -> bytes:
        event = sse({"type": name, "sequence_number": self._sequence, **fields}, name)
        self._sequence += 1
        return event

    def _response(self, status: str, output: list[Body], usage: Body | None) -> Body:
        call, cut = self.call, self._part.finish_reason == "length" and status != "in_progress"
        return {
            "id": call.id,
            "object": "response",
            "created_at": call.created,
            "status": "incomplete" if cut else status,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "error": None,
            "instructions": None,
            "metadata": None,
            "model": call.model,
            "output": output,
            "parallel_tool_calls": True,
            "temperature": 1.0,
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0,
            "usage": usage,
        }

    def _message(self, status: str, text: str | None) -> Body:
        content = [] if text is None else [self._content(text)]
        return {
            "id": self._item,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _content(self, text: str) -> Body:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _complete(self) -> Body:
        call = self.call
        usage = {
            "input_tokens": call.prompt_tokens,
            "input_tokens_details": {"cached_tokens": call.cached_tokens},
            "output_tokens": call.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": call.prompt_tokens + call.output_tokens,
        }
        return self._response("completed", [self._message("completed", self.text(self._part))], usage)

    def opening(self) -> bytes:
        begun = self._response("in_progress", [], None)
        return (
            self._event("response.created", response=begun)
            + self._event("response.in_progress", response=begun)
            + self._event(
                "response.output_item.added", output_index=0, item=self._message("in_progress", None)
            )
            + self._event("response.content_part.added", **self._where, part=self._content(""))
        )

    def token(self, part: int, index: int) -> bytes:
        number = self._sequence
        self._sequence += 1
        piece = self.words.piece(self._part.start + index)
        return b'%b%b","sequence_number":%d}\n\n' % (self._before, piece, number)

    def closing(self) -> bytes:
        text, complete = self.text(self._part), self._complete()
        name = "response.incomplete" if complete["status"] == "incomplete" else "response.completed"
        return (
            self._event("response.output_text.done", **self._where, text=text, logprobs=[])
            + self._event("response.content_part.done", **self._where, part=self._content(text))
            + self._event("response.output_item.done", output_index=0, item=complete["output"][0])
            + self._event(name, response=complete)
        )

    def error(self, message: str) -> bytes:
        return self._event("error", code="server_error", message=message, param=None)

    def plain(self) -> bytes:
        return orjson.dumps(self._complete() | self.call.handoff())


DIALECT = Dialect("/v1/responses", parse, ResponseScript, "resp_")
