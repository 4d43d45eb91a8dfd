"""/v1/responses as vLLM turns it into a conversation, where the request carries all of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvroute.conductor.tokens.call import ChatCall, mapping, optional_text
from kvroute.conductor.tokens.call import sequence as sequence_of
from kvroute.conductor.tokens.call import text as text_of
from kvroute.conductor.tokens.outcome import NotExact
from kvroute.conductor.tokens.template import ChatTemplate
from kvroute.conductor.tokens.vllm import conversation, tools, variables

UNFINISHED = ("in_progress", "incomplete")


def responses(fields: Mapping[str, Any], template: ChatTemplate, defaults: Mapping[str, Any]) -> ChatCall:
    """Unlike a chat, the rendered text gets the tokenizer's special tokens, as a completion does."""
    if any(fields.get(name) for name in ("previous_response_id", "previous_input_messages", "conversation")):
        raise NotExact("stateful")
    if fields.get("truncation") not in (None, "disabled") or fields.get("prompt") is not None:
        raise NotExact("truncated" if fields.get("prompt") is None else "shape")
    items = fields.get("input")
    messages: list[dict[str, Any]] = []
    if instructions := optional_text(fields.get("instructions")):
        messages.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        messages.append({"role": "user", "content": items})
    else:
        for item in sequence_of(items):
            _add(messages, mapping(item))
    reasoning = mapping(fields.get("reasoning") or {})
    continue_final = _goes_on(items)
    return ChatCall(
        conversation(messages, template, calls_as_given=True),
        variables(
            template,
            defaults,
            fields.get("chat_template_kwargs"),
            add_generation_prompt=not continue_final,
            tools=_tools(fields.get("tools")),
            effort=optional_text(reasoning.get("effort")),
        ),
        continue_final,
        add_special=True,
    )


def _goes_on(items: Any) -> bool:
    """Whether the last item is an unfinished message, which the model goes on with."""
    if not isinstance(items, list) or not items:
        return False
    return (
        items[-1].get("type", "message") in ("message", "reasoning") and items[-1].get("status") in UNFINISHED
    )


def _add(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    """One item: a new message, or what it adds to the assistant's message before it."""
    kind = item.get("type", "message")
    if kind == "function_call":
        if item.get("namespace") is not None:
            raise NotExact("shape")
        _add_call(messages, item)
    elif kind == "function_call_output":
        output = item.get("output")
        if not isinstance(output, str):
            output = [_part(part) for part in sequence_of(output)]
        messages.append({"role": "tool", "content": output, "tool_call_id": text_of(item.get("call_id"))})
    elif kind == "reasoning":
        _merge(messages, "reasoning", _reasoning(item))
    elif kind == "message" and "role" in item:
        _add_message(messages, item)
    else:
        raise NotExact("shape")


def _add_message(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    role, content = text_of(item["role"]), item.get("content")
    if role not in ("user", "system", "developer", "assistant"):
        raise NotExact("shape")
    if isinstance(content, list):
        content = [_part(part) for part in content]
    else:
        text_of(content)
    if role != "assistant":
        messages.append({"role": role, "content": content})
        return
    if isinstance(content, list):
        if len(content) != 1:
            raise NotExact("shape")  # of several parts the engine keeps the first: not worth following
        content = content[0]["text"]
    _merge(messages, "content", text_of(content))


def _part(part: Any) -> dict[str, str]:
    kind = mapping(part).get("type")
    if kind not in ("input_text", "output_text", "text"):
        raise NotExact("multimodal" if kind in ("input_image", "input_file", "input_audio") else "shape")
    return {"type": kind, "text": text_of(part.get("text"))}


def _reasoning(item: Mapping[str, Any]) -> str:
    if item.get("encrypted_content"):
        raise NotExact("shape")
    for name in ("content", "summary"):
        if found := item.get(name):
            return text_of(mapping(sequence_of(found)[0]).get("text"))
    return ""


def _add_call(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    call = {
        "id": text_of(item.get("call_id")),
        "function": {"name": text_of(item.get("name")), "arguments": text_of(item.get("arguments"))},
        "type": "function",
    }
    if messages and messages[-1]["role"] == "assistant":
        messages[-1].setdefault("tool_calls", []).append(call)
    else:
        messages.append({"role": "assistant", "tool_calls": [call]})


def _merge(messages: list[dict[str, Any]], name: str, value: str) -> None:
    """Into the assistant's message before it when that has none yet; else a message of its own."""
    if messages and messages[-1]["role"] == "assistant" and messages[-1].get(name) is None:
        messages[-1][name] = value
    else:
        messages.append({"role": "assistant", name: value})


def _tools(value: Any) -> list[dict[str, Any]] | None:
    """Flat function tools, wrapped as chat has them; built-in ones have no place in a template."""
    if not value:
        return None
    flat = [mapping(tool) for tool in sequence_of(value)]
    if any(tool.get("type") != "function" for tool in flat):
        raise NotExact("shape")
    wrapped = [
        {"type": "function", "function": {name: item for name, item in tool.items() if name != "type"}}
        for tool in flat
    ]
    return tools(wrapped)
