"""The ids that are predicted for a request are the ids the engine prefills, for every shape of request."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from kvroute.conductor.tokens.cases import conversations
from kvroute.conductor.tokens.engine import EngineTokenizer, agrees_with_engine
from kvroute.conductor.tokens.exact import ExactTokenizer
from kvroute.conductor.tokens.outcome import TokenizedPrompts
from kvroute.conductor.tokens.registry import TokenizerOptions, load_checked

from .fleet import (
    CALL_LIMIT_S,
    MODEL,
    START_LIMIT_S,
    Server,
    engine_command,
    free_port,
    started,
    vllm_environment,
)

pytestmark = pytest.mark.engines

CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
RICH = """\
{%- if tools %}
{{- '<bos>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
{{- '# Tools\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}
{{- '\\n</tools><end>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<bos>system\\n' + messages[0].content + '<end>\\n' }}
{%- endif %}
{%- for document in documents or [] %}{{ '<doc>' }}{{ document | tojson(indent=2) }}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<bos>' + message.role + (':' + message.name if message.name is defined else '') + '\\n' }}
{{- message.content + '<end>\\n' }}
{%- elif message.role == 'assistant' %}
{%- set content, thought = message.content, '' %}
{%- if message.reasoning_content is string %}
{%- set thought = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<bos>assistant\\n' }}
{%- if thought %}{{ '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}
{{- content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor %}
{{- '<end>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.previtem is not defined or loop.previtem.role != 'tool' %}{{ '<bos>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<end>\\n' }}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<bos>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- if reasoning_effort is defined %}{{ '[' + reasoning_effort + ']' }}{% endif %}
{%- endif %}
"""
PARTS = """\
{% for message in messages %}<bos>[{{ message.role }}]
{% if message.content is string %}{{ message.content | trim }}{% else %}
{% for part in message.content %}{{ part.text }}{{ part | tojson }}{% endfor %}{% endif %}
{% for call in message.tool_calls or [] %}{{ call | tojson }}
{% for name, value in call.function.arguments.items() %}{{ name }}={{ value }};{% endfor %}
{% endfor %}<end>
{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}[assistant]{% endif %}
"""
TEMPLATES = {"rich": RICH, "parts": PARTS}


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def user(content: Any = "What is the weather in Paris?", **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def assistant(content: Any = "Let me see.", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def system(content: Any = "Be brief.") -> dict[str, Any]:
    return {"role": "system", "content": content}


def call(
    arguments: str = '{"city": "Paris", "n": 1.50, "all": true}', name: str = "weather"
) -> dict[str, Any]:
    return {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content: Any = "sunny", name: str = "weather") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{name}", "content": content}


SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["b", "a"]}},
    "required": ["city"],
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "It's <é>", "parameters": SCHEMA}}
BARE_TOOL = {"type": "function", "function": {"name": "bare"}, "ignored": 1}
STRICT_TOOL = {
    "function": {"strict": True, "parameters": SCHEMA, "name": "strict", "more": 1},
    "type": "function",
}
CALLED = [user(), assistant(None, tool_calls=[call()]), result()]
CHATS: dict[str, dict[str, Any]] = {
    "one": {"messages": [user()]},
    "system": {"messages": [system(), user()]},
    "turns": {"messages": [system(), user(), assistant(), user("And in Rome? 你好 🙂 naïve")]},
    "empty": {"messages": [system(""), user("")]},
    "special": {"messages": [user("a <end> b <bos><pad> c < end>")]},
    "spaces": {"messages": [user("  two \n\n\n\t lines \r\n ")]},
    "unicode": {"messages": [user("e\u0301 é \u200b \ufeff \u0000 👩‍👩‍👧‍👦 ﬁ ½ שלום")]},
    "names": {"messages": [user(name="bob"), assistant(name="al"), user()]},
    "unknown fields": {"messages": [user(foo=1), assistant(refusal=None, audio=None), user()]},
    "parts": {"messages": [user([text("a"), text("b")]), assistant([text("c")]), user([text("")])]},
    "parts of no text": {"messages": [user([]), assistant([]), user([text(""), text("x"), text("")])]},
    "part strings": {"messages": [user(["a", text("b", cache_control={"type": "ephemeral"})])]},
    "part extras": {"messages": [user([text("a", zed=[1], name="known")])]},
    "refusal": {"messages": [user(), assistant([{"type": "refusal", "refusal": "no"}]), user()]},
    "thinking part": {
        "messages": [user(), assistant([{"type": "thinking", "thinking": "hm"}, text("x")]), user()]
    },
    "system parts": {"messages": [system([text("a"), text("b")]), user()]},
    "billing header": {"messages": [system("x-anthropic-billing-header: cch=1\nBe kind."), user()]},
    "billing header alone": {
        "messages": [system([text("x-anthropic-billing-header: 1"), text("b")]), user()]
    },
    "developer": {"messages": [{"role": "developer", "content": "Be brief."}, user()]},
    "developer later": {
        "messages": [system(), user(), {"role": "developer", "content": [text("x")]}, user()]
    },
    "later system": {"messages": [user(), system("later"), user()]},
    "other role": {"messages": [{"role": "critic", "content": "x"}, user()]},
    "no content": {"messages": [{"role": "user"}, {"role": "assistant"}, user()]},
    "null content": {"messages": [user(), assistant(None), user()]},
    "tools": {"messages": [system(), user()], "tools": [TOOL]},
    "tool forms": {"messages": [user()], "tools": [TOOL, BARE_TOOL, STRICT_TOOL]},
    "tool choice none": {"messages": [user()], "tools": [TOOL], "tool_choice": "none"},
    "called": {"messages": CALLED, "tools": [TOOL]},
    "called, no tools": {"messages": CALLED},
    "called twice": {
        "messages": [
            user(),
            assistant("x", tool_calls=[call(), call("", "b")]),
            result(),
            result("y", "b"),
            user(),
        ]
    },
    "call with index": {"messages": [user(), assistant(None, tool_calls=[{**call(), "index": 0}]), result()]},
    "arguments of no JSON": {"messages": [user(), assistant("", tool_calls=[call("{oops")]), result()]},
    "arguments of a list": {"messages": [user(), assistant("", tool_calls=[call("[1, 2]")]), result()]},
    "arguments of numbers": {
        "messages": [
            user(),
            assistant("", tool_calls=[call('{"a": 1e-7, "b": 18446744073709551616, "c": NaN}')]),
        ]
    },
    "no calls": {"messages": [user(), assistant("x", tool_calls=[]), user()]},
    "result parts": {"messages": [*CALLED[:2], result([text("a"), text("b")]), assistant("so"), user()]},
    "reasoning": {"messages": [user(), assistant("x", reasoning="because"), user()]},
    "reasoning_content": {"messages": [user(), assistant("x", reasoning_content="because"), user()]},
    "reasoning both": {"messages": [user(), assistant("x", reasoning="a", reasoning_content="b"), user()]},
    "reasoning null": {"messages": [user(), assistant("<think>\nhm\n</think>\n\nx", reasoning=None), user()]},
    "effort": {"messages": [user()], "reasoning_effort": "low"},
    "effort none": {"messages": [user()], "reasoning_effort": "none"},
    "effort and kwargs": {
        "messages": [user()],
        "reasoning_effort": "high",
        "chat_template_kwargs": {"enable_thinking": False, "unread": 1},
    },
    "kwargs": {"messages": [user()], "chat_template_kwargs": {"enable_thinking": False}},
    "kwargs null": {"messages": [user()], "chat_template_kwargs": {"enable_thinking": None}},
    "documents": {"messages": [user()], "documents": [{"title": "t", "text": "é"}, {"title": "u"}]},
    "no generation prompt": {"messages": [user()], "add_generation_prompt": False},
    "special tokens": {"messages": [user()], "add_special_tokens": True},
    "go on": {
        "messages": [user(), assistant("The weather in Paris is ")],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "go on with parts": {
        "messages": [user(), assistant([text("The"), text("weather")])],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "truncated": {"messages": [user()], "truncate_prompt_tokens": 5},
    "truncated right": {"messages": [user()], "truncate_prompt_tokens": 5, "truncation_side": "right"},
    "sampling": {
        "messages": [user()],
        "temperature": 0.5,
        "seed": 1,
        "stop": ["x"],
        "logprobs": True,
        "n": 2,
    },
}
COMPLETION_SHAPES: dict[str, dict[str, Any]] = {
    "text": {"prompt": "The quick brown fox"},
    "texts": {"prompt": ["The quick", "<bos>brown <end>", " fox"]},
    "ids": {"prompt": [5, 6, 7, 2047]},
    "lists of ids": {"prompt": [[5, 6], [7]]},
    "templated": {"prompt": "<bos>[user]\nhi<end>\n"},
    "no special tokens": {"prompt": "The quick", "add_special_tokens": False},
    "echo": {"prompt": "The quick", "echo": True},
    "long": {"prompt": "The quick brown fox jumps over the lazy dog. " * 100},
    "truncated": {"prompt": "The quick brown fox jumps over", "truncate_prompt_tokens": 3},
    "truncated left": {
        "prompt": "The quick brown fox",
        "truncate_prompt_tokens": 3,
        "truncation_side": "left",
    },
    "truncated right": {
        "prompt": "The quick brown fox",
        "truncate_prompt_tokens": 3,
        "truncation_side": "right",
    },
    "truncated ids": {"prompt": [5, 6, 7, 8], "truncate_prompt_tokens": 2},
}
FUNCTION_CALL = {
    "type": "function_call",
    "call_id": "c1",
    "name": "weather",
    "arguments": '{"city": "Paris"}',
}
FUNCTION_OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
RESPONSE_SHAPES: dict[str, dict[str, Any]] = {
    "text": {"input": "What is the weather?"},
    "instructions": {"input": "What is the weather?", "instructions": "Be brief."},
    "items": {"input": [system(), user(), assistant(), user("And now?")]},
    "typed": {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
            {"type": "message", "role": "developer", "content": "d"},
            user(),
        ]
    },
    "call": {"input": [user(), FUNCTION_CALL, FUNCTION_OUTPUT]},
    "answer and call": {"input": [user(), assistant("x"), FUNCTION_CALL, FUNCTION_OUTPUT, user()]},
    "reasoning": {
        "input": [
            user(),
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            assistant("x"),
            user(),
        ]
    },
    "tools": {"input": "hi", "tools": [{"type": "function", **TOOL["function"]}]},
    "effort": {"input": "hi", "reasoning": {"effort": "low"}},
    "go on": {
        "input": [
            user(),
            {
                "type": "message",
                "role": "assistant",
                "status": "incomplete",
                "content": [{"type": "output_text", "text": "The wea"}],
            },
        ]
    },
}
MESSAGE_SHAPES: dict[str, dict[str, Any]] = {
    "text": {"messages": [user()]},
    "system": {"messages": [user()], "system": "Be brief."},
    "system blocks": {
        "messages": [user()],
        "system": [
            text("x-anthropic-billing-header: 1"),
            text("Be "),
            text("brief.", cache_control={"type": "ephemeral"}),
        ],
    },
    "blocks": {"messages": [user([text("a"), text("b")]), assistant([text("c")]), user()]},
    "system within": {"messages": [user(), {"role": "system", "content": "x"}, user()]},
    "thinking": {
        "messages": [
            user(),
            assistant([{"type": "thinking", "thinking": "hm", "signature": "s"}, text("x")]),
            user(),
        ]
    },
    "tool use": {
        "messages": [
            user(),
            assistant([text("x"), {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": "é"}}]),
            user(
                [{"type": "tool_result", "tool_use_id": "t1", "content": [text("1"), text("2")]}, text("so?")]
            ),
        ],
        "tools": [
            {"name": "f", "description": "d", "input_schema": {"properties": {"a": {"type": "string"}}}}
        ],
    },
    "effort": {"messages": [user()], "output_config": {"effort": "high"}},
}


@pytest.fixture(scope="module")
def engine(vllm_python: Path, run_directory: Path) -> Iterator[Server]:
    """Its template is `RICH`; requests may bring others."""
    model = run_directory / "parity-model"
    script = Path(__file__).with_name("make_tiny_model.py")
    subprocess.run([vllm_python, script, model], env=vllm_environment(), check=True, timeout=START_LIMIT_S)
    for name, template in TEMPLATES.items():
        (run_directory / f"{name}.jinja").write_text(template)
    port = free_port()
    command = [
        *engine_command(vllm_python, model, port),
        *("--chat-template", str(run_directory / "rich.jinja"), "--trust-request-chat-template"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    ]
    with started("parity", port, command, vllm_environment(), run_directory) as server:
        server.wait_for("/health", START_LIMIT_S)
        yield server


@pytest.fixture(scope="module")
def tokenizers(engine: Server, run_directory: Path) -> dict[str, ExactTokenizer]:
    model = run_directory / "parity-model"
    return {
        name: asyncio.run(load_checked(TokenizerOptions("local", model, run_directory / f"{name}.jinja")))
        for name in TEMPLATES
    }


def ask(engine: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(engine.url + path, json=body, timeout=CALL_LIMIT_S)
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


def predicted(tokenizer: ExactTokenizer, path: str, body: dict[str, Any]) -> list[list[int]]:
    made = tokenizer.encode(path.encode(), body)
    assert isinstance(made, TokenizedPrompts), made
    return [list(memoryview(prompt).cast("I")) for prompt in made.prompts]


def prefilled(engine: Server, body: dict[str, Any], template: str) -> list[int]:
    asked = {**body, "model": MODEL, "max_tokens": 1, "return_token_ids": True}
    if template != "rich":
        asked["chat_template"] = TEMPLATES[template]
    ids: list[int] = ask(engine, CHAT, asked)["prompt_token_ids"]
    return ids


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("shape", CHATS)
def test_chat(engine: Server, tokenizers: dict[str, ExactTokenizer], shape: str, template: str) -> None:
    body = CHATS[shape]
    assert predicted(tokenizers[template], CHAT, body) == [prefilled(engine, body, template)]


@pytest.mark.parametrize("template", TEMPLATES)
def test_random_chats(engine: Server, tokenizers: dict[str, ExactTokenizer], template: str) -> None:
    seed = Random().randrange(2**32)
    print("seed", seed)
    for case in conversations(seed, 25, ["<bos>", "<end>", "<pad>"], parts=False):
        for message in case["messages"]:
            for made in message.get("tool_calls", ()):
                made["function"]["arguments"] = json.dumps(made["function"]["arguments"])
        kwargs = {name: case.pop(name) for name in ("thinking", "enable_thinking") if name in case}
        body = {**case, "chat_template_kwargs": kwargs}
        assert predicted(tokenizers[template], CHAT, body) == [prefilled(engine, body, template)], body


@pytest.mark.parametrize("shape", COMPLETION_SHAPES)
def test_completion(engine: Server, tokenizers: dict[str, ExactTokenizer], shape: str) -> None:
    body = COMPLETION_SHAPES[shape]
    answer = ask(engine, COMPLETIONS, {**body, "model": MODEL, "max_tokens": 1, "return_token_ids": True})
    made = predicted(tokenizers["rich"], COMPLETIONS, body)
    assert made == [choice["prompt_token_ids"] for choice in answer["choices"]]
    assert sum(map(len, made)) == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize("shape", RESPONSE_SHAPES)
def test_response(engine: Server, tokenizers: dict[str, ExactTokenizer], shape: str) -> None:
    body = RESPONSE_SHAPES[shape]
    asked = {**body, "model": MODEL, "max_output_tokens": 1, "enable_response_messages": True, "store": False}
    answer = ask(engine, RESPONSES, asked)
    (made,) = predicted(tokenizers["rich"], RESPONSES, body)
    assert len(made) == answer["usage"]["input_tokens"]
    assert made == answer["input_messages"][0]["tokens"]


@pytest.mark.parametrize("shape", MESSAGE_SHAPES)
def test_message(engine: Server, tokenizers: dict[str, ExactTokenizer], shape: str) -> None:
    """The answer has no ids, only how many they were."""
    body = MESSAGE_SHAPES[shape]
    answer = ask(engine, MESSAGES, {**body, "model": MODEL, "max_tokens": 1})
    (made,) = predicted(tokenizers["rich"], MESSAGES, body)
    usage = answer["usage"]
    cached = (usage.get("cache_read_input_tokens") or 0) + (usage.get("cache_creation_input_tokens") or 0)
    assert len(made) == usage["input_tokens"] + cached


async def test_comparing_with_the_engine(engine: Server, tokenizers: dict[str, ExactTokenizer]) -> None:
    """The template that the engine has agrees, another does not."""
    async with httpx.AsyncClient() as client:
        asked = EngineTokenizer(client)
        assert await agrees_with_engine(tokenizers["rich"], asked, engine.url, MODEL) is True
        assert await agrees_with_engine(tokenizers["parts"], asked, engine.url, MODEL) is False


@pytest.mark.parametrize("shape", [name for name in CHATS if not name.startswith("truncated")])
async def test_the_engine_asked(engine: Server, shape: str) -> None:
    """`/tokenize`, asked as we ask it, gives what the chat prefills."""
    body = CHATS[shape]
    async with httpx.AsyncClient() as client:
        made = await EngineTokenizer(client).encode(
            engine.url, CHAT.encode(), {**body, "model": MODEL}, CALL_LIMIT_S
        )
    assert isinstance(made, TokenizedPrompts), made
    assert list(memoryview(made.prompts[0]).cast("I")) == prefilled(engine, body, "rich")
