"""What vLLM makes of a chat request, field by field; each case is as vLLM 0.32 itself renders it."""

from __future__ import annotations

from typing import Any

import pytest

from kvroute.conductor.tokens import vllm
from kvroute.conductor.tokens.call import Cut
from kvroute.conductor.tokens.outcome import NotExact
from kvroute.conductor.tokens.template import ChatTemplate

from .tiny import DUMP, DUMP_PARTS

TEXT = ChatTemplate(DUMP, {}, use_minijinja=False)
PARTS = ChatTemplate(DUMP_PARTS, {}, use_minijinja=False)
USER = {"role": "user", "content": "u"}
GIVEN = {
    "type": "function",
    "index": 0,
    "function": {"name": "f", "arguments": '{"b":1,"a":[1.50]}', "z": 1},
    "id": "c",
}


def part(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def answer(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "x", **fields}


MESSAGES: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    # given; seen by a template of text; seen by one of parts
    (
        {"role": "user", "content": "a", "name": "n", "foo": 1},
        {"role": "user", "content": "a", "name": "n"},
        {"role": "user", "content": [part("a")], "name": "n"},
    ),
    (
        {"role": "user", "content": [part("a", cache_control={"x": 1}), {"text": "b", "type": "text"}, "c"]},
        {"role": "user", "content": "a\nb\nc"},
        {"role": "user", "content": [part("a", cache_control={"x": 1}), part("b"), part("c")]},
    ),
    (
        {"role": "user", "content": [part(""), part("b", name="known"), part("")]},
        {"role": "user", "content": "b"},
        {"role": "user", "content": [part(""), part("b"), part("")]},
    ),
    (
        {"role": "system", "content": [part("x-anthropic-billing-header: q\nrest"), part("b")]},
        {"role": "system", "content": "rest\nb"},
        {"role": "system", "content": [part("rest"), part("b")]},
    ),
    (
        {"role": "system", "content": "x-anthropic-billing-header: q"},
        {"role": "system", "content": ""},
        {"role": "system", "content": []},
    ),
    (
        {"role": "assistant", "content": None, "tool_calls": [GIVEN]},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "c",
                    "function": {"arguments": {"b": 1, "a": [1.5]}, "name": "f", "z": 1},
                    "type": "function",
                    "index": 0,
                }
            ],
        },
        {
            "role": "assistant",
            "content": [],
            "tool_calls": [
                {
                    "id": "c",
                    "function": {"arguments": {"b": 1, "a": [1.5]}, "name": "f", "z": 1},
                    "type": "function",
                    "index": 0,
                }
            ],
        },
    ),
    (
        {"role": "tool", "tool_call_id": "c", "content": [part("r"), part("s")], "name": "f"},
        {"role": "tool", "content": "r\ns", "tool_call_id": "c", "name": "f"},
        {"role": "tool", "content": "r\ns", "tool_call_id": "c", "name": "f"},
    ),
    (
        answer(reasoning_content="think", tool_calls=[], refusal=None),
        answer(reasoning="think", reasoning_content="think"),
        {**answer(reasoning="think", reasoning_content="think"), "content": [part("x")]},
    ),
    (
        answer(reasoning="r1", reasoning_content="r2", function_call=None),
        answer(reasoning="r1", reasoning_content="r1"),
        {**answer(reasoning="r1", reasoning_content="r1"), "content": [part("x")]},
    ),
    (
        {
            "role": "assistant",
            "content": [
                part("p"),
                {"type": "refusal", "refusal": "no"},
                {"type": "thinking", "thinking": "hm"},
            ],
        },
        {"role": "assistant", "content": "p\nno\nhm"},
        {"role": "assistant", "content": [part("p"), part("no"), part("hm")]},
    ),
    (
        {"role": "function", "name": "f", "content": "x"},
        {"role": "function", "content": "x", "name": "f"},
        {"role": "function", "content": [part("x")], "name": "f"},
    ),
    (
        {"role": "user", "content": "a", "task": "t", "tool_call_id": "z", "reasoning": "r"},
        {"role": "user", "content": "a", "task": "t"},
        {"role": "user", "content": [part("a")], "task": "t"},
    ),
    (
        answer(name="nn", tool_call_id="q", tool_calls=None, reasoning=""),
        answer(reasoning="", reasoning_content="", name="nn"),
        {**answer(reasoning="", reasoning_content="", name="nn"), "content": [part("x")]},
    ),
    ({"role": "user"}, {"role": "user", "content": ""}, {"role": "user", "content": []}),
    (
        {"role": "custom", "content": "x"},
        {"role": "custom", "content": "x"},
        {"role": "custom", "content": [part("x")]},
    ),
]


@pytest.mark.parametrize(("given", "text", "parts"), MESSAGES)
def test_message(given: dict[str, Any], text: dict[str, Any], parts: dict[str, Any]) -> None:
    for template, expected in ((TEXT, text), (PARTS, parts)):
        (made,) = vllm.conversation([given], template)
        # The order of fields is what a template's `tojson` shows.
        assert repr(made) == repr(expected)


@pytest.mark.parametrize("arguments", ["not json", "", "[1]", "null", "1"])
def test_arguments_that_are_no_mapping_become_an_empty_one(arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    (made,) = vllm.conversation([answer(tool_calls=[call])], TEXT)
    assert made["tool_calls"][0]["function"]["arguments"] == {}


def test_developer_is_system_where_the_template_does_not_know_it() -> None:
    told = [
        {"role": "developer", "content": "dev"},
        {"role": "system", "content": [part("s"), part("t")]},
        USER,
    ]
    assert vllm.conversation(told, TEXT) == [{"role": "system", "content": "dev\n\ns\nt"}, USER]
    assert vllm.conversation([USER, told[0]], TEXT) == [{"role": "system", "content": "dev"}, USER]
    assert vllm.conversation(told[:1], PARTS) == [{"role": "system", "content": [part("dev")]}]
    knows = ChatTemplate(DUMP + "{{ 'developer' }}", {}, use_minijinja=False)
    assert vllm.conversation(told[:1], knows) == [{"role": "developer", "content": "dev", "tools": None}]


def test_request_is_left_as_it_was() -> None:
    fields = {
        "messages": [
            answer(tool_calls=[GIVEN]),
            {"role": "system", "content": [part("x-anthropic-billing-header\nq")]},
        ]
    }
    before = repr(fields)
    vllm.chat(fields, TEXT, {})
    assert repr(fields) == before


TOOLS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {
            "type": "function",
            "function": {"strict": None, "parameters": {"b": 1, "a": 2}, "name": "f", "x": 1},
            "y": 2,
        },
        {"type": "function", "function": {"name": "f", "description": None, "parameters": {"b": 1, "a": 2}}},
    ),
    (
        {
            "type": "function",
            "function": {"name": "g", "description": "d", "strict": True, "defer_loading": True},
        },
        {
            "type": "function",
            "function": {
                "name": "g",
                "description": "d",
                "parameters": None,
                "strict": True,
                "defer_loading": True,
            },
        },
    ),
    (
        {"function": {"name": "g"}, "defer_loading": False},
        {
            "type": "function",
            "function": {"name": "g", "description": None, "parameters": None, "defer_loading": False},
            "defer_loading": False,
        },
    ),
]


@pytest.mark.parametrize(("given", "seen"), TOOLS)
def test_tool(given: dict[str, Any], seen: dict[str, Any]) -> None:
    assert repr(vllm.tools([given])) == repr([seen])


def variables(
    template: ChatTemplate = TEXT, defaults: dict[str, Any] | None = None, **fields: Any
) -> dict[str, Any]:
    given = dict(vllm.chat({"messages": [USER], **fields}, template, defaults or {}).variables)
    return {name: value for name, value in given.items() if name not in ("tools", "add_generation_prompt")}


def test_template_variables() -> None:
    assert variables(chat_template_kwargs={"enable_thinking": True, "unread": 1}) == {"enable_thinking": True}
    assert variables(reasoning_effort="none") == {"reasoning_effort": "none", "enable_thinking": False}
    assert variables(reasoning_effort="low", chat_template_kwargs={"enable_thinking": False}) == {
        "reasoning_effort": "low",
        "enable_thinking": False,
    }
    defaults = {"enable_thinking": False}
    assert variables(defaults=defaults) == defaults
    assert variables(defaults=defaults, chat_template_kwargs={"enable_thinking": "auto"}) == defaults
    assert variables(defaults=defaults, chat_template_kwargs={"enable_thinking": None}) == defaults
    assert variables(defaults=defaults, chat_template_kwargs={"enable_thinking": True}) == {
        "enable_thinking": True
    }
    assert variables(chat_template_kwargs=None) == {}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"messages": []}, "empty"),
        ({"messages": None}, "shape"),
        ({"messages": [1]}, "shape"),
        ({"messages": [{"content": "no role"}]}, "shape"),
        ({"messages": [{"role": "user", "content": None}]}, "shape"),
        ({"messages": [{"role": "user", "content": [part("a", uuid="x")]}]}, "multimodal"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]},
            "multimodal",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "multimodal"),
        (
            {
                "messages": [
                    answer(
                        tool_calls=[{"type": "custom", "id": "1", "function": {"name": "f", "arguments": ""}}]
                    )
                ]
            },
            "shape",
        ),
        (
            {
                "messages": [
                    answer(
                        tool_calls=[
                            {"type": "function", "id": "1", "function": {"name": "f", "arguments": {}}}
                        ]
                    )
                ]
            },
            "shape",
        ),
        ({"messages": [{"role": "developer", "content": "d", "tools": []}]}, "shape"),
        ({"messages": [USER], "chat_template": "{{ x }}"}, "template"),
        ({"messages": [USER], "add_generation_prompt": "yes"}, "shape"),
        ({"messages": [USER], "continue_final_message": True}, "shape"),
        ({"messages": [USER], "chat_template_kwargs": {"tools": []}}, "shape"),
        ({"messages": [USER], "chat_template_kwargs": {"a": 1e30}}, "shape"),
        ({"messages": [USER], "reasoning_effort": "extreme"}, "shape"),
        ({"messages": [USER], "tools": []}, "shape"),
        ({"messages": [USER], "tools": [{"type": "web_search"}]}, "shape"),
        (
            {"messages": [USER], "tools": [{"function": {"name": "f", "parameters": {"maximum": 2.0**64}}}]},
            "shape",
        ),
        ({"messages": [USER], "truncate_prompt_tokens": -1}, "truncated"),
        ({"messages": [USER], "truncate_prompt_tokens": True}, "shape"),
        ({"messages": [USER], "documents": [{"a": 1}]}, "shape"),
        ({"messages": [USER], "kv_transfer_params": {"prompt_token_ids": [1]}}, "stateful"),
    ],
)
def test_not_exact(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotExact) as raised:
        vllm.chat(fields, TEXT, {})
    assert raised.value.reason == reason


def test_cut() -> None:
    assert vllm.cut({"truncate_prompt_tokens": 3}) == Cut(3, "left", whole=False)
    assert vllm.cut({"truncate_prompt_tokens": 3, "truncation_side": "right"}) == Cut(3, "right", whole=True)
    assert vllm.embedding({"input": "a", "truncate_prompt_tokens": 3}).cut == Cut(3, "right", whole=False)
