"""Seeded texts and conversations on which two implementations are compared before one is trusted."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

WORDS = (
    "the quick brown fox jumps over it's we'll can't 3.14159 2025-11-30 foo_bar camelCase HTTPServer "
    'def return {"key": [1, 2.5, null]} <b>&amp;</b> https://example.org/a?b=c#d naïve café Straße Ünïcödé '
    "Привет мир שלום عالم 你好世界 こんにちは 한국어 ไทย हिन्दी 🙂👩‍👩‍👧‍👦🏳️‍🌈 ﬁ ½ ① "
    "e\u0301 \u200b \ufeff \u0000 \x7f ´ … — “q”"
).split(" ")
SPACES = (" ", " ", " ", "  ", "\n", "\n\n", "\t", "\r\n", " \n ", "", "\u00a0", "\u3000", "        ")
ALPHABET = "aAzZ09 _-.,'\"<>|/\\{}[]()\n\té漢🙂\u0301"


def texts(seed: int, count: int, special: Sequence[str]) -> list[str]:
    """Words, spaces, runs, random characters and special tokens, whole and in pieces, side by side."""
    random = Random(seed)
    return [_text(random, special) for _ in range(count)]


def _text(random: Random, special: Sequence[str]) -> str:
    out = []
    for _ in range(random.randint(1, 30)):
        kind = random.random()
        if kind < 0.55:
            out.append(random.choice(WORDS))
        elif kind < 0.70 and special:
            token = random.choice(special)
            cut = random.randint(1, len(token)) if random.random() < 0.3 else len(token)
            out.append(token[:cut])
        elif kind < 0.85:
            out.append("".join(random.choices(ALPHABET, k=random.randint(1, 12))))
        elif kind < 0.9:
            out.append(random.choice(ALPHABET) * random.randint(2, 40))
        out.append(random.choice(SPACES))
    return "".join(out)


def conversations(seed: int, count: int, special: Sequence[str], parts: bool) -> list[dict[str, Any]]:
    """Variables of a chat template: messages as the engines hand them over, tools, documents and switches."""
    random = Random(seed)
    return [_conversation(random, special, parts) for _ in range(count)]


def _conversation(random: Random, special: Sequence[str], parts: bool) -> dict[str, Any]:
    def content() -> Any:
        text = "" if random.random() < 0.1 else _text(random, special)
        if not parts:
            return text
        return [{"type": "text", "text": piece} for piece in (text, "more")[: random.randint(0, 2)]]

    messages: list[dict[str, Any]] = []
    if random.random() < 0.5:
        messages.append({"role": "system", "content": content()})
    for _ in range(random.randint(1, 4)):
        messages.append({"role": "user", "content": content()})
        messages += _answer(random, special, content)
    if random.random() < 0.7:
        messages.append({"role": "user", "content": content()})
    case: dict[str, Any] = {"messages": messages, "add_generation_prompt": random.random() < 0.8}
    if random.random() < 0.4:
        case["tools"] = [_tool(random) for _ in range(random.randint(1, 3))]
    if random.random() < 0.1:
        case["documents"] = [{"title": "t", "text": _text(random, special)}]
    for name in ("enable_thinking", "thinking"):
        if random.random() < 0.3:
            case[name] = random.random() < 0.5
    if random.random() < 0.2:
        case["reasoning_effort"] = random.choice(["none", "low", "medium", "high"])
    return case


def _answer(random: Random, special: Sequence[str], content: Any) -> list[dict[str, Any]]:
    answer: dict[str, Any] = {"role": "assistant", "content": content()}
    if random.random() < 0.2 and isinstance(answer["content"], str):
        answer["content"] = f"<think>\n{answer['content']}\n</think>\n\nso"
    messages = [answer]
    if random.random() < 0.4:
        answer["tool_calls"] = [
            {
                "id": f"call_{i}",
                "function": {"arguments": _arguments(random), "name": f"tool_{i}"},
                "type": "function",
            }
            for i in range(random.randint(1, 2))
        ]
        for call in answer["tool_calls"]:
            messages.append({"role": "tool", "content": _text(random, special), "tool_call_id": call["id"]})
    if random.random() < 0.3:
        answer["reasoning"] = answer["reasoning_content"] = _text(random, special)
    return messages


def _arguments(random: Random) -> dict[str, Any]:
    values: list[Any] = [
        "text 'quoted' <&> é",
        "",
        0,
        -7,
        2**40,
        1.0,
        2.5,
        1e-7,
        1e21,
        True,
        False,
        None,
        [1, "two", None, {"z": 1, "a": [True]}],
        {"z": "last", "a": {"b": 1.5}},
        [],
        {},
    ]
    return {f"{random.choice('zmak')}{i}": random.choice(values) for i in range(random.randint(0, 5))}


def _tool(random: Random) -> dict[str, Any]:
    function: dict[str, Any] = {
        "name": random.choice(["get_weather", "zip", "Äpfel"]),
        "description": random.choice([None, "Says 'what' <it> does & more.\nIn lines."]),
        "parameters": random.choice(
            [
                None,
                {},
                {
                    "type": "object",
                    "properties": {
                        "zone": {"type": "string", "enum": ["b", "a"], "default": None},
                        "at": {"type": ["number", "null"], "minimum": 0.5, "description": "é"},
                        "all": {"type": "array", "items": {"type": "boolean"}, "default": [True, False]},
                    },
                    "required": ["zone"],
                    "additionalProperties": False,
                },
            ]
        ),
    }
    if random.random() < 0.3:
        function["strict"] = True
    return {"type": "function", "function": function}
