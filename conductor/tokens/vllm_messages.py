"""/v1/messages (Anthropic) as vLLM turns it into a chat request."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvroute.conductor.tokens.call import ChatCall, mapping, optional_text
from kvroute.conductor.tokens.call import sequence as sequence_of
from kvroute.conductor.tokens.call import text as text_of
from kvroute.conductor.tokens.outcome import NotExact
from kvroute.conductor.tokens.template import ChatTemplate
from kvroute.conductor.tokens.vllm import BILLING_HEADER, conversation, tools, variables

BLOCKS = frozenset({"text", "thinking", "redacted_thinking", "tool_use", "tool_reference"})
"""Kinds of content blocks that are read; the third and the last leave nothing in the prompt."""


def messages(fields: Mapping[str, Any], template: ChatTemplate, defaults: Mapping[str, Any]) -> ChatCall:
    """System blocks become one system message, tool results messages of their own."""
    given = [mapping(message) for message in sequence_of(fields.get("messages"))]
    merge = not template.takes_later_system
    system = list(_system_texts(fields.get("system")))
    if merge:
        for message in given:
            if message.get("role") == "system":
                system += _system_texts(message.get("content"))
    made: list[dict[str, Any]] = [{"role": "system", "content": "".join(system)}] if system else []
    for message in given:
        made += _converted(message, merge)
    return ChatCall(
        conversation(made, template),
        variables(
            template,
            defaults,
            fields.get("chat_template_kwargs"),
            add_generation_prompt=True,
            tools=_tools(fields.get("tools")),
            effort=_effort(fields, template),
        ),
    )


def _system_texts(content: Any) -> Iterator[str]:
    """Texts of a system field or message, without the line that changes with every request."""
    if content is None or content == "":
        return
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else sequence_of(content)
    for block in blocks:
        kind = mapping(block).get("type")
        if kind in ("tool_addition", "tool_removal"):
            raise NotExact("shape")
        if kind == "text" and (text := text_of(block.get("text"))) and not text.startswith(BILLING_HEADER):
            yield text


def _converted(message: Mapping[str, Any], merge: bool) -> Iterator[dict[str, Any]]:
    """The chat messages that one message becomes: tool results first, then what is left of it."""
    role, content = message.get("role"), message.get("content")
    if role == "system":
        text = "".join(_system_texts(content))
        if text and not merge:
            yield {"role": "system", "content": text}
        return
    if role not in ("user", "assistant"):
        raise NotExact("shape")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    blocks = [mapping(block) for block in sequence_of(content)]
    if role == "user":
        yield from _results(blocks)
    left = _left(role, blocks)
    if role == "assistant" or "content" in left:
        yield left


def _results(blocks: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for block in blocks:
        if block.get("type") == "tool_result":
            content = _result(block.get("content"))
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": content}


def _left(role: str, blocks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A message without its tool results."""
    made: dict[str, Any] = {"role": role}
    by_kind: dict[Any, list[Mapping[str, Any]]] = {}
    for block in blocks:
        by_kind.setdefault(block.get("type"), []).append(block)
    if unknown := by_kind.keys() - BLOCKS - ({"tool_result"} if role == "user" else set()):
        raise NotExact("multimodal" if "image" in unknown else "shape")
    parts = [text_of(block.get("text")) for block in by_kind.get("text", ())]
    if thoughts := by_kind.get("thinking"):
        made["reasoning"] = "".join(text_of(block.get("thinking")) for block in thoughts)
    if calls := by_kind.get("tool_use"):
        made["tool_calls"] = [_call(block) for block in calls]
    if parts := list(filter(None, parts)):
        made["content"] = parts[0] if len(parts) == 1 else [{"type": "text", "text": text} for text in parts]
    return made


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    if not block.get("id"):
        raise NotExact("shape")  # the engine would make one up from the clock
    arguments = json.dumps(mapping(block.get("input") or {}))
    function = {"name": block.get("name") or "", "arguments": arguments}
    return {"id": text_of(block["id"]), "type": "function", "function": function}


def _result(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for block in map(mapping, sequence_of(content)):
        if block.get("type") != "text":
            raise NotExact("multimodal" if block.get("type") == "image" else "shape")
        texts.append(text_of(block.get("text", "")))
    return "\n".join(texts)


def _tools(value: Any) -> list[dict[str, Any]] | None:
    if not value:
        return None
    return tools([_tool(mapping(tool)) for tool in sequence_of(value)])


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A schema without a type is an object's; the type then comes last."""
    schema = dict(mapping(tool.get("input_schema")))
    schema.setdefault("type", "object")
    kept = {name: tool.get(name) for name in ("name", "description", "strict", "defer_loading")}
    return {"type": "function", "function": {**kept, "parameters": schema}}


def _effort(fields: Mapping[str, Any], template: ChatTemplate) -> str | None:
    """What `thinking` and `output_config` ask of a template that knows efforts."""
    thinking = mapping(fields.get("thinking") or {})
    if thinking.get("type") == "disabled":
        if "reasoning_effort" in template.variables:
            raise NotExact("shape")  # the engine finds out by trial which effort that is
        return "none"
    return optional_text(mapping(fields.get("output_config") or {}).get("effort"))
