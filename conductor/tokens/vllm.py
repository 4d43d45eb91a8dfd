"""A request as vLLM 0.32 understands it: which fields reach the chat template, in which order and form.

Written from vLLM's entrypoints and renderers (`ChatCompletionRequest`, `parse_chat_messages`,
`safe_apply_chat_template`) and compared with the ids of real engines, see tests/engines.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from kvroute.conductor.tokens.call import (
    ChatCall,
    Cut,
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
from kvroute.conductor.tokens.yielding import YieldingList

BILLING_HEADER = "x-anthropic-billing-header"
"""Claude Code's first system line; it changes with every request, and vLLM drops it."""
EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "max"})
TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Type of a content part that is text, and the field that holds it."""
KNOWN_PART_FIELDS = frozenset(
    "audio_embeds audio_url closed data file image_embeds image_pil image_url input_audio name "
    "prompt_cache_breakpoint refusal text thinking type uuid video_embeds video_url".split()
)
"""Fields of a part that are read, not handed on to a template that takes parts."""
RESERVED_KWARGS = frozenset(
    "messages conversation tools chat_template tokenize return_dict return_tensors tokenizer_kwargs padding "
    "return_assistant_tokens_mask continue_final_message add_generation_prompt truncation max_length".split()
)
"""`chat_template_kwargs` that would be arguments of the call instead: refused or overridden by the engine."""


def chat(fields: Mapping[str, Any], template: ChatTemplate, defaults: Mapping[str, Any]) -> ChatCall:
    """/v1/chat/completions. `defaults` are the server's own --default-chat-template-kwargs."""
    if fields.get("chat_template") is not None:
        raise NotExact("template")
    if isinstance(transfer := fields.get("kv_transfer_params"), dict) and transfer.get("prompt_token_ids"):
        raise NotExact("stateful")
    continue_final = flag(fields, "continue_final_message", False)
    generate = flag(fields, "add_generation_prompt", True)
    if continue_final and generate:
        # Not both: the engine refuses them given together, and the template's call refuses the default.
        raise NotExact("shape")
    return ChatCall(
        conversation(sequence_of(fields.get("messages")), template),
        variables(
            template,
            defaults,
            fields.get("chat_template_kwargs"),
            add_generation_prompt=generate,
            tools=tools(fields.get("tools")),
            documents=documents(fields.get("documents")),
            effort=optional_text(fields.get("reasoning_effort")),
        ),
        continue_final,
        flag(fields, "add_special_tokens", False),
        cut(fields),
    )


def variables(
    template: ChatTemplate,
    defaults: Mapping[str, Any],
    given: Any,
    *,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    documents: Sequence[Mapping[str, str]] | None = None,
    effort: str | None,
) -> dict[str, Any]:
    """What the template is called with, beside the messages.

    The server's defaults, then the request's `chat_template_kwargs`, then its own fields; a null and "auto"
    override nothing; only what the template reads gets through.
    """
    given = mapping(given or {})
    no_huge_numbers(given)
    if not RESERVED_KWARGS.isdisjoint(given) or not RESERVED_KWARGS.isdisjoint(defaults):
        raise NotExact("shape")
    if effort is not None and effort not in EFFORTS:
        raise NotExact("shape")
    asked = dict(given)
    if documents is not None:
        asked["documents"] = documents
    if effort is not None:
        asked = {"enable_thinking": effort != "none", **asked, "reasoning_effort": effort}
    merged = {**defaults, **{name: value for name, value in asked.items() if value not in (None, "auto")}}
    kept = {name: value for name, value in merged.items() if name in template.variables}
    return {**kept, "tools": tools, "add_generation_prompt": add_generation_prompt}


def completion(fields: Mapping[str, Any]) -> FlatCall:
    """/v1/completions."""
    if fields.get("suffix") is not None or fields.get("prompt_embeds") is not None:
        raise NotExact("shape")
    return FlatCall(flat_prompts(fields.get("prompt")), flag(fields, "add_special_tokens", True), cut(fields))


def embedding(fields: Mapping[str, Any]) -> FlatCall:
    """/v1/embeddings with `input`."""
    if fields.get("padding") not in (None, "do_not_pad"):
        raise NotExact("shape")
    return FlatCall(
        flat_prompts(fields.get("input")), flag(fields, "add_special_tokens", True), cut(fields, "right")
    )


def cut(fields: Mapping[str, Any], default_side: Literal["left", "right"] = "left") -> Cut | None:
    """`truncate_prompt_tokens` and `truncation_side`; engines that generate cut on the left by default."""
    tokens, side = fields.get("truncate_prompt_tokens"), fields.get("truncation_side")
    if tokens is None:
        return None
    if type(tokens) is not int or side not in (None, "left", "right"):
        raise NotExact("shape")
    if tokens < 1:
        raise NotExact("truncated")  # -1 is the model's own length
    return Cut(tokens, side or default_side, whole=side is not None)


def tools(value: Any) -> list[dict[str, Any]] | None:
    """Known fields in the engine's order: null description and parameters stay, unknown fields go."""
    if value is None:
        return None
    if not sequence_of(value):
        raise NotExact("shape")
    return [_tool(mapping(tool)) for tool in value]


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type", "function") != "function":
        raise NotExact("shape")
    given = mapping(tool.get("function"))
    if (parameters := given.get("parameters")) is not None:
        no_huge_numbers(mapping(parameters))
    defer = tool.get("defer_loading")
    function: dict[str, Any] = {
        "name": text_of(given.get("name")),
        "description": optional_text(given.get("description")),
        "parameters": parameters,
    }
    inner_defer = given.get("defer_loading") if given.get("defer_loading") is not None else defer
    for name, value in (("strict", given.get("strict")), ("defer_loading", inner_defer)):
        if value is not None:
            if not isinstance(value, bool):
                raise NotExact("shape")
            function[name] = value
    made: dict[str, Any] = {"type": "function", "function": function}
    if defer is not None:
        made["defer_loading"] = defer
    return made


def documents(value: Any) -> list[Mapping[str, str]] | None:
    """Checked, and as given."""
    if value is None:
        return None
    for document in sequence_of(value):
        if not all(isinstance(item, str) for item in mapping(document).values()):
            raise NotExact("shape")
    return list(value)


def conversation(
    messages: Sequence[Any], template: ChatTemplate, calls_as_given: bool = False
) -> list[dict[str, Any]]:
    """Messages as the template sees them.

    The fields of tool calls take the order of the chat API's types, unless `calls_as_given`.
    """
    if not messages:
        raise NotExact("empty")
    parts = template.takes_parts_vllm
    made = [_message(message, parts, calls_as_given) for message in YieldingList(messages)]
    if not template.knows_developer and any(message["role"] == "developer" for message in made):
        return _system_first(made)
    return made


def _message(message: Any, parts: bool, calls_as_given: bool) -> dict[str, Any]:
    role, content = text_of(mapping(message).get("role")), message.get("content")
    if len(message) == 2 and isinstance(content, str) and role not in ("system", "developer"):
        return {"role": role, "content": [{"type": "text", "text": content}] if parts else content}
    if content is None and "content" in message and role not in ("assistant", "function"):
        raise NotExact("shape")
    made: dict[str, Any] = {"role": role, "content": _content(role, content, parts)}
    if role == "assistant":
        _assistant(message, made, calls_as_given)
    elif role == "tool":
        if "tool_call_id" in message:
            made["tool_call_id"] = optional_text(message["tool_call_id"])
        if isinstance(made["content"], list):
            made["content"] = "\n".join(part["text"] for part in made["content"])
    for name in ("name", "task"):
        if (value := optional_text(message.get(name))) is not None:
            made[name] = value
    if role == "developer":
        if message.get("tools") is not None:
            raise NotExact("shape")
        made["tools"] = None
    return made


def _content(role: str, content: Any, parts: bool) -> Any:
    """A list of text parts when the template takes `parts`, else all texts that are not empty, by line."""
    given = [content] if isinstance(content, str) else sequence_of([] if content is None else content)
    made: list[dict[str, Any]] = []
    for part in given:
        piece = _part(part)
        if role == "system" and piece["text"].startswith(BILLING_HEADER) and _is_plain(part):
            piece["text"] = piece["text"].partition("\n")[2]
            if not piece["text"]:
                continue
        made.append(piece)
    return made if parts else "\n".join([piece["text"] for piece in made if piece["text"]])


def _is_plain(part: Any) -> bool:
    return isinstance(part, str) or part.get("type") == "text"


def _part(part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = mapping(part).get("type")
    if kind not in TEXT_PARTS or part.get("uuid") is not None:
        raise NotExact("shape" if kind in ("tool_reference", None) else "multimodal")
    made = {"type": "text", "text": text_of(part.get(TEXT_PARTS[kind]))}
    if len(part) > 2:
        made |= {name: value for name, value in part.items() if name not in KNOWN_PART_FIELDS}
    return made


def _assistant(message: Mapping[str, Any], made: dict[str, Any], calls_as_given: bool) -> None:
    if calls := message.get("tool_calls"):
        made["tool_calls"] = [_tool_call(mapping(call), calls_as_given) for call in sequence_of(calls)]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        made["reasoning"] = made["reasoning_content"] = text_of(reasoning)


def _tool_call(call: Mapping[str, Any], as_given: bool) -> dict[str, Any]:
    function = mapping(call.get("function"))
    if call.get("type") != "function":
        raise NotExact("shape")
    inner = {"arguments": _arguments(function.get("arguments")), "name": text_of(function.get("name"))}
    if as_given:
        return {**call, "function": {**function, **inner}}
    inner |= {name: value for name, value in function.items() if name not in inner}
    made = {"id": text_of(call.get("id")), "function": inner, "type": "function"}
    return made | {name: value for name, value in call.items() if name not in made}


def _arguments(arguments: Any) -> dict[str, Any]:
    """A template wants a mapping: what is none, or no JSON, becomes an empty one."""
    try:
        read = json.loads(text_of(arguments)) if arguments != "" else {}
    except ValueError:
        return {}
    except RecursionError:
        raise NotExact("shape") from None
    return read if isinstance(read, dict) else {}


def _system_first(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For templates without a developer role: it is system, and all system text comes first, as one."""
    systems, others = [], []
    in_place = True
    for at, message in enumerate(messages):
        if message["role"] not in ("system", "developer"):
            others.append(message)
            continue
        in_place = in_place and at == 0
        systems.append(message)
    if in_place:
        (only,) = systems
        renamed = {name: value for name, value in only.items() if name != "tools"} | {"role": "system"}
        return [renamed, *others]
    texts = [
        "\n".join(part["text"] for part in content)
        if isinstance(content := message["content"], list)
        else content
        for message in systems
    ]
    return [{"role": "system", "content": "\n\n".join(filter(None, texts))}, *others]
