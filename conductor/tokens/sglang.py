"""A request as SGLang understands it: unlike vLLM in how parts join, in tools, and at the conversation's end.

Written from SGLang's `serving_chat.py`, `protocol.py` and `jinja_template_utils.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from kvroute.conductor.tokens.call import (
    ChatCall,
    FlatCall,
    flag,
    flat_prompts,
    mapping,
    no_huge_numbers,
    optional_text,
)
from kvroute.conductor.tokens.call import sequence as sequence_of
from kvroute.conductor.tokens.call import text as text_of
from kvroute.conductor.tokens.outcome import NotExact
from kvroute.conductor.tokens.template import ChatTemplate
from kvroute.conductor.tokens.vllm import EFFORTS, RESERVED_KWARGS
from kvroute.conductor.tokens.yielding import YieldingList

ROLES = frozenset({"system", "assistant", "tool", "function", "developer"})


def chat(fields: Mapping[str, Any], template: ChatTemplate) -> ChatCall:
    """/v1/chat/completions, without `input_ids` (see `generate`)."""
    parts = template.takes_parts_sglang
    messages = [
        _message(mapping(message), parts) for message in YieldingList(sequence_of(fields.get("messages")))
    ]
    if not messages:
        raise NotExact("empty")
    suffix = ""
    last = messages[-1]
    if last["role"] == "assistant" and isinstance(last["content"], str):
        if flag(fields, "continue_final_message", False):
            suffix = messages.pop()["content"]
        else:
            messages[-1] = {"role": "user", "content": last["content"]}
    if not messages:
        raise NotExact("shape")
    variables = _variables(fields)
    variables |= {
        "tools": _tools(fields.get("tools"), fields.get("tool_choice")),
        "add_generation_prompt": True,
    }
    return ChatCall(messages, variables, suffix=suffix)


def completion(fields: Mapping[str, Any]) -> FlatCall:
    if fields.get("suffix"):
        raise NotExact("shape")
    return FlatCall(flat_prompts(fields.get("prompt")))


def generate(fields: Mapping[str, Any]) -> FlatCall:
    """/generate: ids, else text. Also a chat whose `input_ids` stand in for its messages."""
    if any(fields.get(name) for name in ("image_data", "audio_data", "video_data")):
        raise NotExact("multimodal")
    ids = fields.get("input_ids")
    return FlatCall(flat_prompts(fields.get("text") if ids is None else ids))


def _variables(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`chat_template_kwargs` win over the request's own effort; an effort of none turns thinking off."""
    given = dict(mapping(fields.get("chat_template_kwargs") or {}))
    no_huge_numbers(given)
    if not RESERVED_KWARGS.isdisjoint(given):
        raise NotExact("shape")
    effort = given.pop("reasoning_effort", None)
    own = optional_text(fields.get("reasoning_effort"))
    if own is not None and own not in EFFORTS:
        raise NotExact("shape")
    if own == "none":
        given = {"thinking": False, "enable_thinking": False, **given}
    effort = own if effort is None else effort
    return given if effort is None else {"reasoning_effort": effort, **given}


def _message(message: Mapping[str, Any], parts: bool) -> dict[str, Any]:
    """Fields in the order of SGLang's models, null ones left out; content that stays in parts comes last."""
    role, content = text_of(message.get("role")), message.get("content")
    if role == "user":
        if content is None:
            raise NotExact("shape")
        made: dict[str, Any] = {"role": role}
    elif (role := role.lower()) in ROLES:
        made = _generic(role, message)
    else:
        raise NotExact("shape")
    if not isinstance(content, list):
        return {"role": role, "content": text_of("" if content is None else content), **made}
    read = _content(role, content, parts)
    return {**made, "content": read} if parts else {"role": role, "content": read, **made}


def _generic(role: str, message: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {"role": role}
    for name in ("tool_call_id", "name", "reasoning_content"):
        if (value := optional_text(message.get(name))) is not None:
            made[name] = value
    if (calls := message.get("tool_calls")) is not None:
        made["tool_calls"] = [_tool_call(role, mapping(call)) for call in sequence_of(calls)]
    if message.get("tools") is not None:
        raise NotExact("shape")
    return made


def _content(role: str, content: Sequence[Any], parts: bool) -> Any:
    """Texts joined by a space, or the parts; a tool's are always joined."""
    texts = []
    for part in content:
        if mapping(part).get("type") != "text":
            raise NotExact(
                "shape" if part.get("type") in ("thinking", "reasoning", "tool_reference") else "multimodal"
            )
        texts.append(text_of(part.get("text")))
    if parts and role != "tool":
        return [{"type": "text", "text": text} for text in texts]
    return " ".join(texts)


def _tool_call(role: str, call: Mapping[str, Any]) -> dict[str, Any]:
    function = mapping(call.get("function"))
    arguments = function.get("arguments")
    if isinstance(arguments, str) and role == "assistant":
        try:
            arguments = mapping(orjson.loads(arguments))
        except orjson.JSONDecodeError:
            raise NotExact("shape") from None
    if call.get("type", "function") != "function":
        raise NotExact("shape")
    return {
        "id": optional_text(call.get("id")),
        "index": call.get("index"),
        "type": "function",
        "function": {"name": optional_text(function.get("name")), "arguments": arguments},
    }


def _tools(value: Any, choice: Any) -> list[dict[str, Any]] | None:
    """No tools when the choice is none; only the named one when it names one."""
    if not value or choice == "none":
        return None
    made = [_tool(mapping(tool)) for tool in sequence_of(value)]
    if isinstance(choice, dict):
        name = mapping(choice.get("function")).get("name")
        made = [tool for tool in made if tool["function"]["name"] == name]
    return made


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    given = mapping(tool.get("function"))
    if tool.get("defer_loading") is not None or given.get("defer_loading") is not None:
        raise NotExact("shape")
    no_huge_numbers(given.get("parameters"))
    function = {
        "description": optional_text(given.get("description")),
        "name": text_of(given.get("name")),
        "parameters": given.get("parameters"),
        "strict": flag(given, "strict", False),
    }
    return {"type": text_of(tool.get("type", "function")), "function": function, "defer_loading": None}
