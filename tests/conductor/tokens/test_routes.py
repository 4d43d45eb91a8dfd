"""/v1/responses and /v1/messages as vLLM turns them into conversations, and SGLang's own rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvroute.conductor.tokens import sglang
from kvroute.conductor.tokens.outcome import NotExact
from kvroute.conductor.tokens.template import ChatTemplate
from kvroute.conductor.tokens.vllm_messages import messages
from kvroute.conductor.tokens.vllm_responses import responses

from .tiny import DUMP, DUMP_PARTS

TEXT = ChatTemplate(DUMP, {}, use_minijinja=False)
PARTS = ChatTemplate(DUMP_PARTS, {}, use_minijinja=False)
STRICT = ChatTemplate(
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('system first') }}{% endif %}{{ message.content }}{% endfor %}",
    {},
    use_minijinja=False,
)
USER = {"role": "user", "content": "u"}


def call(name: str = "f", call_id: str = "c") -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": '{"a": 1}'}


def asked(items: Any, **fields: Any) -> Any:
    return responses({"input": items, **fields}, TEXT, {})


def test_responses_become_a_conversation() -> None:
    items = [
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "think"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
        call(),
        call("g", "d"),
        {"type": "function_call_output", "call_id": "c", "output": "1"},
        {"role": "assistant", "content": "x"},
        {"role": "assistant", "content": "y"},
    ]
    made = asked(items, instructions="be brief", reasoning={"effort": "low"})
    calls = [
        {"id": name, "function": {"name": tool, "arguments": {"a": 1}}, "type": "function"}
        for name, tool in (("c", "f"), ("d", "g"))
    ]
    assert made.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "so",
            "tool_calls": calls,
            "reasoning": "think",
            "reasoning_content": "think",
        },
        {"role": "tool", "content": "1", "tool_call_id": "c"},
        {"role": "assistant", "content": "x"},
        {"role": "assistant", "content": "y"},
    ]
    assert list(made.messages[2]["tool_calls"][0]["function"]) == ["name", "arguments"]
    assert made.add_special
    assert made.variables["add_generation_prompt"]
    assert made.variables["reasoning_effort"] == "low"
    assert asked("hi").messages == [{"role": "user", "content": "hi"}]


def test_responses_tools_are_wrapped() -> None:
    flat = {"type": "function", "name": "f", "description": "d", "parameters": {"a": 1}, "strict": True}
    wrapped = {
        "type": "function",
        "function": {"name": "f", "description": "d", "parameters": {"a": 1}, "strict": True},
    }
    assert asked("hi", tools=[flat]).variables["tools"] == [wrapped]
    assert asked("hi", tools=[]).variables["tools"] is None


def test_responses_go_on_with_an_unfinished_answer() -> None:
    unfinished = {"type": "message", "role": "assistant", "status": "incomplete", "content": "half"}
    made = asked([USER, unfinished])
    assert made.continue_final
    assert not made.variables["add_generation_prompt"]
    assert not asked([{**USER, "status": "completed"}]).continue_final


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"input": "a", "previous_response_id": "r"}, "stateful"),
        ({"input": "a", "truncation": "auto"}, "truncated"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "shape"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "multimodal"),
        ({"input": [{"type": "item_reference", "id": "1"}]}, "shape"),
        ({"input": [{"type": "custom_tool_call", "name": "f"}]}, "shape"),
        ({"input": [{"role": "assistant", "content": []}]}, "shape"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "shape"),
        ({"input": []}, "empty"),
        ({}, "shape"),
    ],
)
def test_responses_not_exact(fields: dict[str, Any], reason: str) -> None:
    _refused(lambda: responses(fields, TEXT, {}), reason)


def test_messages_become_a_conversation() -> None:
    given = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "a", "cache_control": {}}, {"type": "text", "text": ""}],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "b"},
                {"type": "tool_use", "id": "t", "name": "f", "input": {"q": "é"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "first"},
                {
                    "type": "tool_result",
                    "tool_use_id": "t",
                    "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}],
                },
                {"type": "text", "text": "second"},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]},
    ]
    system = [{"type": "text", "text": t} for t in ("x-anthropic-billing-header: 1", "s", "", "t")]
    made = messages({"system": system, "messages": given}, TEXT, {})
    assert made.messages == [
        {"role": "system", "content": "st"},
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "b",
            "tool_calls": [
                {"id": "t", "function": {"arguments": {"q": "é"}, "name": "f"}, "type": "function"}
            ],
            "reasoning": "hm",
            "reasoning_content": "hm",
        },
        {"role": "tool", "content": "1\n2", "tool_call_id": "t"},
        {"role": "user", "content": "first\nsecond"},
        {"role": "tool", "content": "", "tool_call_id": "t"},
    ]
    assert not made.add_special


def test_later_system_messages_move_to_the_front_where_the_template_refuses_them() -> None:
    given = {"system": "a", "messages": [USER, {"role": "system", "content": "b"}, USER]}
    assert [m["content"] for m in messages(given, TEXT, {}).messages] == ["a", "u", "b", "u"]
    assert [m["content"] for m in messages(given, STRICT, {}).messages] == ["ab", "u", "u"]


def test_messages_tools_and_effort() -> None:
    tool = {"name": "f", "input_schema": {"properties": {}}}
    made = messages({"messages": [USER], "tools": [tool], "output_config": {"effort": "high"}}, TEXT, {})
    expected = {"name": "f", "description": None, "parameters": {"properties": {}, "type": "object"}}
    assert repr(made.variables["tools"]) == repr([{"type": "function", "function": expected}])
    assert made.variables["reasoning_effort"] == "high"
    assert "type" not in tool["input_schema"]
    assert (
        messages({"messages": [USER], "thinking": {"type": "disabled"}}, STRICT, {}).variables["tools"]
        is None
    )


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "multimodal"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]}
                ]
            },
            "multimodal",
        ),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}]}, "shape"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_result"}]}]}, "shape"),
        ({"messages": [{"role": "system", "content": [{"type": "tool_addition"}]}]}, "shape"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "shape"),
        ({"messages": [USER], "thinking": {"type": "disabled"}}, "shape"),
        ({"messages": []}, "empty"),
        ({}, "shape"),
    ],
)
def test_messages_not_exact(fields: dict[str, Any], reason: str) -> None:
    _refused(lambda: messages(fields, TEXT, {}), reason)


def parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


def test_sglang_messages() -> None:
    tool_call = {"id": "c", "function": {"name": "f", "arguments": '{"a": 1}'}}
    given = [
        {"role": "System", "content": parts("a", "b"), "name": "n"},
        {"role": "user", "content": "u", "name": "dropped"},
        {"role": "assistant", "content": None, "tool_calls": [tool_call], "reasoning_content": "r"},
        {"role": "tool", "tool_call_id": "c", "content": parts("x", "y")},
        {"role": "user", "content": "u"},
    ]
    kept = {"id": "c", "index": None, "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    expected = [
        {"role": "system", "content": "a b", "name": "n"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "", "reasoning_content": "r", "tool_calls": [kept]},
        {"role": "tool", "content": "x y", "tool_call_id": "c"},
        {"role": "user", "content": "u"},
    ]
    assert repr(list(sglang.chat({"messages": given}, TEXT).messages)) == repr(expected)
    seen = sglang.chat({"messages": given}, ChatTemplate("{{ 'vision' }}", {}, use_minijinja=False)).messages
    assert repr(seen[0]) == repr({"role": "system", "name": "n", "content": parts("a", "b")})
    assert seen[3]["content"] == "x y"


def test_sglang_ends_with_a_user() -> None:
    given = [USER, {"role": "assistant", "content": "half"}]
    assert sglang.chat({"messages": given}, TEXT).messages[-1] == {"role": "user", "content": "half"}
    going_on = sglang.chat({"messages": given, "continue_final_message": True}, TEXT)
    assert going_on.messages == [USER]
    assert going_on.suffix == "half"
    assert going_on.variables["add_generation_prompt"]


def test_sglang_tools_follow_the_choice() -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": {"a": 1}}} for name in ("f", "g")]

    def seen(choice: Any) -> Any:
        found = sglang.chat({"messages": [USER], "tools": tools, "tool_choice": choice}, TEXT).variables[
            "tools"
        ]
        return found and [tool["function"]["name"] for tool in found]

    assert seen("none") is None
    assert seen("auto") == ["f", "g"]
    assert seen({"type": "function", "function": {"name": "g"}}) == ["g"]
    made = sglang.chat({"messages": [USER], "tools": tools[:1]}, TEXT).variables["tools"]
    function = {"description": None, "name": "f", "parameters": {"a": 1}, "strict": False}
    assert repr(made[0]["function"]) == repr(function)


def test_sglang_effort() -> None:
    def seen(**fields: Any) -> dict[str, Any]:
        made = dict(sglang.chat({"messages": [USER], **fields}, TEXT).variables)
        return {name: value for name, value in made.items() if name not in ("tools", "add_generation_prompt")}

    assert seen(reasoning_effort="none") == {
        "reasoning_effort": "none",
        "thinking": False,
        "enable_thinking": False,
    }
    given = {"reasoning_effort": "high", "enable_thinking": True}
    assert seen(reasoning_effort="none", chat_template_kwargs=given) == {**given, "thinking": False}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"messages": []}, "empty"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "shape"),
        ({"messages": [{"role": "user"}]}, "shape"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "multimodal"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "no"}}]},
                    USER,
                ]
            },
            "shape",
        ),
        ({"messages": [{"role": "assistant", "content": "x"}], "continue_final_message": True}, "shape"),
        (
            {"messages": [USER], "tools": [{"function": {"name": "f", "parameters": {"maximum": 1e19}}}]},
            "shape",
        ),
    ],
)
def test_sglang_not_exact(fields: dict[str, Any], reason: str) -> None:
    _refused(lambda: sglang.chat(fields, TEXT), reason)


def _refused(make: Callable[[], object], reason: str) -> None:
    with pytest.raises(NotExact) as raised:
        make()
    assert raised.value.reason == reason
