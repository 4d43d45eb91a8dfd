"""Ids of whole requests, on every route, against `tokenizers` and jinja2 used directly."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any, get_args

import pytest
from structlog.testing import capture_logs

from kvroute.conductor.keys import Namespace, token_keys
from kvroute.conductor.prompts import ROUTES
from kvroute.conductor.tokens import exact as exact_module
from kvroute.conductor.tokens.cases import conversations
from kvroute.conductor.tokens.exact import ExactTokenizer
from kvroute.conductor.tokens.outcome import REASONS, Reason, TokenizedPrompts, Unavailable
from kvroute.types import EngineKind

from .tiny import SIMPLE, SPECIAL, exact, ids, train, write

REFERENCE = train()
CHAT, COMPLETIONS = b"/v1/chat/completions", b"/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "the quick brown fox"}]}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> ExactTokenizer:
    return exact(directory)


def of(text: str, special: bool = False) -> list[int]:
    return list(REFERENCE.encode(text, add_special_tokens=special).ids)


def test_chat(tokenizer: ExactTokenizer) -> None:
    expected = of("<s><|im_start|>user\nthe quick brown fox<|im_end|>\n<|im_start|>assistant\n")
    assert ids(tokenizer.encode(CHAT, HELLO)) == [expected]
    bare = {**HELLO, "add_generation_prompt": False, "add_special_tokens": True}
    assert ids(tokenizer.encode(CHAT, bare)) == [
        of("<s><s><|im_start|>user\nthe quick brown fox<|im_end|>\n")
    ]
    going_on = {
        "messages": [*HELLO["messages"], {"role": "assistant", "content": "jumps "}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    text = "<s><|im_start|>user\nthe quick brown fox<|im_end|>\n<|im_start|>assistant\njumps "
    assert ids(tokenizer.encode(CHAT, going_on)) == [of(text)]


def test_chat_on_every_route_has_tokens(tokenizer: ExactTokenizer) -> None:
    text = "<s><|im_start|>user\nthe quick brown fox<|im_end|>\n<|im_start|>assistant\n"
    asked = {b"/v1/messages": HELLO, b"/v1/responses": {"input": "the quick brown fox"}}
    assert ids(tokenizer.encode(b"/v1/messages", asked[b"/v1/messages"])) == [of(text)]
    # The engine adds special tokens to what it renders for this route.
    assert ids(tokenizer.encode(b"/v1/responses", asked[b"/v1/responses"])) == [of(text, special=True)]
    assert ids(tokenizer.encode(b"/v1/embeddings", {"input": "the fox"})) == [of("the fox", special=True)]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("the fox", [of("the fox", special=True)]),
        (["the fox", "<|im_start|>é"], [of("the fox", special=True), of("<|im_start|>é", special=True)]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [2**32 - 1]], [[5, 6], [2**32 - 1]]),
    ],
)
def test_completion_prompts(tokenizer: ExactTokenizer, prompt: Any, expected: list[list[int]]) -> None:
    made = tokenizer.encode(COMPLETIONS, {"prompt": prompt, "echo": True})
    assert ids(made) == expected
    assert isinstance(made, TokenizedPrompts)
    assert made.tokens == sum(map(len, expected))


def test_truncation(tokenizer: ExactTokenizer) -> None:
    def cut(prompt: Any, **fields: Any) -> list[int]:
        (made,) = ids(tokenizer.encode(COMPLETIONS, {"prompt": prompt, **fields}))
        return made

    text = "over the lazy 2025-11-30 fox"
    bare, bos = of(text), of("", special=True)
    assert cut(text, truncate_prompt_tokens=4) == bos + bare[-3:]
    assert cut(text, truncate_prompt_tokens=4, truncation_side="left") == bare[-4:]
    assert cut(text, truncate_prompt_tokens=4, truncation_side="right") == (bos + bare)[:4]
    assert cut(text, truncate_prompt_tokens=4, add_special_tokens=False) == bare[-4:]
    assert cut(text, truncate_prompt_tokens=4000) == bos + bare
    assert cut([1, 2, 3, 4], truncate_prompt_tokens=2) == [3, 4]
    assert tokenizer.encode(COMPLETIONS, {"prompt": text, "truncate_prompt_tokens": 1}) == Unavailable(
        "truncated"
    )


@pytest.mark.parametrize(
    ("path", "fields", "reason"),
    [
        (b"/v1/unknown", HELLO, "route"),
        (b"/generate", {"text": "a"}, "route"),
        (COMPLETIONS, {}, "empty"),
        (COMPLETIONS, {"prompt": ""}, "empty"),
        (COMPLETIONS, {"prompt": ["a", ""]}, "empty"),
        (COMPLETIONS, {"prompt": []}, "empty"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "shape"),
        (COMPLETIONS, {"prompt": [True]}, "shape"),
        (COMPLETIONS, {"prompt": [-1]}, "shape"),
        (COMPLETIONS, {"prompt": [2**32]}, "shape"),
        (COMPLETIONS, {"prompt": 5}, "shape"),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "shape"),
        (COMPLETIONS, {"prompt": "a\ud800"}, "shape"),
        (CHAT, {"messages": [{"role": "user", "content": "\udfff"}]}, "shape"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "multimodal"),
        (CHAT, {**HELLO, "chat_template": "x"}, "template"),
        (b"/v1/embeddings", {"input": "a", "padding": "max_length"}, "shape"),
        (b"/v1/responses", {"input": "a", "previous_response_id": "x"}, "stateful"),
    ],
)
def test_reasons(tokenizer: ExactTokenizer, path: bytes, fields: dict[str, Any], reason: Reason) -> None:
    assert tokenizer.encode(path, fields) == Unavailable(reason)


def test_reasons_are_a_fixed_documented_set() -> None:
    assert tuple(REASONS) == get_args(Reason)


def test_too_long(tokenizer: ExactTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_module, "MAX_PROMPT_CHARS", 10)
    assert tokenizer.encode(COMPLETIONS, {"prompt": ["12345", "123456"]}) == Unavailable("too_long")
    assert ids(tokenizer.encode(COMPLETIONS, {"prompt": ["12345", "12345"]}))


def test_anything_is_answered(tokenizer: ExactTokenizer) -> None:
    """No JSON value in any field makes it raise."""
    seed = Random().randrange(2**32)
    print("seed", seed)
    random = Random(seed)
    odd: list[Any] = [
        None,
        True,
        0,
        -1,
        1.5,
        1e300,
        "",
        "x",
        "\ud800",
        [],
        {},
        [None],
        [[1]],
        [{}],
        {"type": "text"},
    ]
    odd += [{"role": "user", "content": value} for value in odd] + [[value, value] for value in odd]
    names = (
        "messages prompt input tools documents reasoning_effort chat_template_kwargs truncate_prompt_tokens "
    )
    names += (
        "add_generation_prompt continue_final_message system thinking output_config reasoning instructions"
    )
    for _ in range(3000):
        fields = {name: random.choice(odd) for name in random.sample(names.split(), 4)}
        made = tokenizer.encode(random.choice([*ROUTES]), fields)
        assert isinstance(made, TokenizedPrompts) or made.reason in REASONS, fields


def test_a_template_that_cannot_be_compiled_is_named(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": SIMPLE}, {"name": "tool_use", "template": "{% if %}"}]
    directory = write(tmp_path, chat_template=templates)
    with capture_logs() as logs:
        made = exact(directory)
    (line,) = logs
    assert (line["event"], line["log_level"]) == ("chat_template_failed", "warning")
    assert (line["template"], line["tokenizer"]) == ("tool_use", str(directory / "tokenizer.json"))
    assert ids(made.encode(CHAT, HELLO))
    assert made.template_fallbacks == 0
    made.encode(CHAT, {"messages": [{"role": "user", "content": "\ufffd"}]})
    assert made.template_fallbacks == 1


def test_depth_is_no_crash(tokenizer: ExactTokenizer) -> None:
    deep: Any = {}
    for _ in range(100_000):
        deep = {"a": deep}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    assert tokenizer.encode(CHAT, {**HELLO, "tools": [tool]}) == Unavailable("shape")


def test_a_growing_chat_extends_its_ids(tokenizer: ExactTokenizer) -> None:
    root = Namespace(model="m").root("ids")
    messages: list[dict[str, str]] = []
    before: list[int] = []
    for turn in range(12):
        messages.append({"role": "user", "content": f"turn {turn} of the quick brown fox 你好世界"})
        made = tokenizer.encode(CHAT, {"messages": messages})
        assert isinstance(made, TokenizedPrompts)
        keys = list(token_keys(made.prompts[0], root, 4).keys)
        # The generation prompt is no answer yet: a turn's last blocks are not part of the next turn.
        shared = next((i for i, (a, b) in enumerate(zip(before, keys, strict=False)) if a != b), len(before))
        assert shared >= len(before) - 3
        before = keys
        messages.append({"role": "assistant", "content": "jumps over the lazy dog"})


def test_unicode_forms_are_told_apart_as_the_engine_does(tmp_path: Path) -> None:
    """A normaliser makes é one whichever way it is written; a tokenizer without one keeps both apart."""
    made = exact(write(tmp_path / "nfc"))
    composed, apart = ids(made.encode(COMPLETIONS, {"prompt": ["caf\u00e9 x", "cafe\u0301 x"]}))
    assert composed == apart
    directory = write(tmp_path / "plain")
    raw = json.loads((directory / "tokenizer.json").read_text())
    raw["normalizer"] = None
    (directory / "tokenizer.json").write_text(json.dumps(raw))
    composed, apart = ids(exact(directory).encode(COMPLETIONS, {"prompt": ["caf\u00e9 x", "cafe\u0301 x"]}))
    assert composed != apart
    assert len(set(composed) & set(apart)) >= 2


def test_templates_by_name(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | tojson }}"},
    ]
    made = exact(write(tmp_path, chat_template=named))  # type: ignore[arg-type]
    tool = {"type": "function", "function": {"name": "f"}}
    text = '[{"type": "function", "function": {"name": "f", "description": null, "parameters": null}}]'
    assert ids(made.encode(CHAT, HELLO)) == [of("plain")]
    assert ids(made.encode(CHAT, {**HELLO, "tools": [tool]})) == [of(text)]


@pytest.mark.parametrize("template", [None, "{% if %}", "{{ raise_exception('no') }}"])
def test_no_usable_template(tmp_path: Path, template: str | None) -> None:
    made = exact(write(tmp_path, template))
    assert made.encode(CHAT, HELLO) == Unavailable("template")
    assert ids(made.encode(COMPLETIONS, {"prompt": "the"})) == [of("the", special=True)]


def test_server_defaults_reach_the_template(tmp_path: Path) -> None:
    made = exact(write(tmp_path, "{{ enable_thinking }}"), defaults={"enable_thinking": "x"})
    assert ids(made.encode(CHAT, HELLO)) == [of("x")]


def test_sglang(directory: Path) -> None:
    made = exact(directory, EngineKind.SGLANG)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    text = "<s><|im_start|>user\na b<|im_end|>\n<|im_start|>assistant\n"
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": parts}], "add_generation_prompt": False}
    assert ids(made.encode(CHAT, asked)) == [of(text)]
    going_on: dict[str, Any] = {"messages": [*asked["messages"], {"role": "assistant", "content": "c"}]}
    going_on["continue_final_message"] = True
    assert ids(made.encode(CHAT, going_on)) == [of(text + "c")]
    assert ids(made.encode(CHAT, {"input_ids": [1, 2]})) == [[1, 2]]
    assert ids(made.encode(b"/generate", {"text": ["a", "b"]})) == [
        of("a", special=True),
        of("b", special=True),
    ]
    assert ids(made.encode(b"/generate", {"input_ids": [[1], [2]], "text": "x"})) == [[1], [2]]
    assert made.encode(b"/generate", {"text": "a", "image_data": "x"}) == Unavailable("multimodal")
    assert made.encode(b"/v1/responses", {"input": "a"}) == Unavailable("route")


def test_one_tokenizer_on_many_threads(tokenizer: ExactTokenizer) -> None:
    seed = Random().randrange(2**32)
    print("seed", seed)
    asked = [{"messages": case["messages"]} for case in conversations(seed, 40, SPECIAL, parts=False)]
    expected = [tokenizer.encode(CHAT, fields) for fields in asked]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            assert list(pool.map(lambda fields: tokenizer.encode(CHAT, fields), asked)) == expected


@pytest.mark.parametrize("where", ["tools", "arguments"])
def test_depth_that_a_template_could_blow_up_is_not_rendered(tokenizer: ExactTokenizer, where: str) -> None:
    def nested(depth: int) -> dict[str, Any]:
        value: Any = 1
        for _ in range(depth):
            value = {"a": value}
        user = {"role": "user", "content": "hi"}
        if where == "tools":
            function = {"name": "f", "description": None, "parameters": value}
            return {"messages": [user], "tools": [{"type": "function", "function": function}]}
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps(value)}}
        return {"messages": [user, {"role": "assistant", "content": None, "tool_calls": [call]}]}

    shallow = tokenizer.encode(b"/v1/chat/completions", nested(12))
    assert isinstance(shallow, TokenizedPrompts), shallow
    assert tokenizer.encode(b"/v1/chat/completions", nested(200)) == Unavailable("too_deep")
