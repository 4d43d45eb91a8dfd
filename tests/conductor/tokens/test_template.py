"""Rendering as the engines do it, by either engine of ours, and how a template is read."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest

from kvroute.conductor.tokens.cases import conversations
from kvroute.conductor.tokens.outcome import NotExact
from kvroute.conductor.tokens.template import ChatTemplate, minijinja_agrees

from .tiny import SIMPLE

BOTH = pytest.mark.parametrize("use_minijinja", [False, True])


def each(name: str, over: str, body: str = "") -> str:
    return f"{{% for {name} in {over} %}}{body}{{% endfor %}}"


def macro(parameter: str, body: str) -> str:
    return f"{{% macro show({parameter}) %}}{body}{{% endmacro %}}"


LOOP = each("message", "messages", "{{ message.content }}")
ARGUMENTS = each("name, value", "c.function.arguments.items()", "{{ value }}")


def render(source: str, content: Any = "hi", use_minijinja: bool = False, **given: Any) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"}, use_minijinja)
    made = template.render([{"role": "user", "content": content}], given.pop("go_on", False), **given)
    assert template.fallbacks == 0
    return made


@BOTH
def test_what_templates_may_use(use_minijinja: bool) -> None:
    def made(source: str, **given: Any) -> str:
        return render(source, use_minijinja=use_minijinja, **given)

    assert made("{{ bos_token }}{{ eos_token }}x") == "<s>x"
    assert made("{{ bos_token }}", bos_token="mine") == "mine"
    assert (
        made('{{ {"a": "<é&>", "b": [1, none, true, 1.5]} | tojson }}')
        == '{"a": "<é&>", "b": [1, null, true, 1.5]}'
    )
    assert (
        made("{{ tools | tojson(indent=2) }}", tools=[{"b": 1, "a": 2}])
        == '[\n  {\n    "b": 1,\n    "a": 2\n  }\n]'
    )
    assert made("{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}") == "13"
    assert made("  {% if true %}\n  x\n  {% endif %}\n") == "  x\n"
    assert made("{{ messages[0].content.split('i')[0] ~ ' a '.strip() }}") == "ha"
    assert made("{% if tools is none and documents is none and x is not defined %}none{% endif %}") == "none"
    assert len(made("{{ strftime_now('%Y') }}")) == 4


def test_generation_tag_renders_its_body() -> None:
    assert (
        render("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}")
        == "hi"
    )


@BOTH
@pytest.mark.parametrize("source", ["{{ raise_exception('no') }}", "{{ messages.none.at }}", "{{ 1 / 0 }}"])
def test_refusal(source: str, use_minijinja: bool) -> None:
    template = ChatTemplate(source, {}, use_minijinja)
    with pytest.raises(NotExact) as raised:
        template.render([{"role": "user", "content": "hi"}], False)
    assert raised.value.reason == "template"


def test_sandbox() -> None:
    with pytest.raises(NotExact):
        render("{{ ''.__class__.__mro__ }}{{ messages.append(1) }}")


def test_what_minijinja_refuses_jinja2_renders_and_it_is_counted() -> None:
    source = "{{ 'a'.zfill(3) }}"
    template = ChatTemplate(source, {}, use_minijinja=True)
    assert template.render([], False) == "00a"
    assert template.fallbacks == 1


@BOTH
@pytest.mark.parametrize(
    ("source", "content", "expected"),
    [
        ("[" + LOOP + "]", "half a ", "[half a "),
        ("[" + LOOP.replace("content", "content | trim") + "]", "half a ", "[half a"),
        (
            each("m", "messages", each("p", "m.content", "{{ p.text }}") + ";"),
            [{"type": "text", "text": "x"}],
            "x",
        ),
    ],
)
def test_going_on_with_the_last_message(
    source: str, content: Any, expected: str, use_minijinja: bool
) -> None:
    assert render(source, content, use_minijinja, go_on=True) == expected


@pytest.mark.parametrize(
    ("source", "content"), [("nothing of it", "hi"), (LOOP, None), (LOOP, [{"type": "x"}])]
)
def test_nothing_to_go_on_with(source: str, content: Any) -> None:
    with pytest.raises(NotExact):
        render(source, content, go_on=True)


@pytest.mark.parametrize(
    ("source", "agrees"),
    [
        (SIMPLE, True),
        (LOOP + "{{ tools | tojson }}", True),
        (LOOP + "{{ add_generation_prompt }}", True),
        ("{% generation %}{% endgeneration %}", False),
        ("{{ 'a'.zfill(3) }}", False),
        (each("m", "messages", each("c", "m.tool_calls or []", "{{ c.function }}")), True),
        (each("m", "messages", each("c", "m.tool_calls or []", ARGUMENTS)), False),
        ("{% if %}", False),
    ],
)
def test_agreement_of_the_engines(source: str, agrees: bool) -> None:
    print("seed 5")
    assert (
        minijinja_agrees(source, {"bos_token": "<s>"}, conversations(5, 60, ["<s>"], parts=False)) is agrees
    )


@pytest.mark.parametrize(
    ("source", "vllm", "sglang"),
    [
        (LOOP, False, False),
        (each("message", "messages", each("c", "message.content")), True, True),
        (each("msg", "messages[1:]", each("c", "msg['content'] | list")), True, True),
        (each("x", "messages", each("c", "x.content")), True, False),
        ("{% set ms = messages %}" + each("x", "ms", each("c", "x.content")), True, False),
        (each("x", "messages", "{% set content = x.content %}" + each("c", "content")), True, False),
        (macro("body", each("c", "body")) + each("m", "messages", "{{ show(m.content) }}"), True, False),
        (macro("body", each("c", "body")) + each("m", "messages", "{{ show(body=m.content) }}"), True, False),
        (macro("content", each("c", "content")) + "{{ show(tools) }}", False, False),
        ("{% set ns.m = messages %}" + each("x", "messages", each("c", "x.content")), False, False),
        ("{# vision #}" + LOOP, False, True),
    ],
)
def test_content_format(source: str, vllm: bool, sglang: bool) -> None:
    template = ChatTemplate(source, {}, use_minijinja=False)
    assert (template.takes_parts_vllm, template.takes_parts_sglang) == (vllm, sglang)


def test_what_a_template_says_of_itself() -> None:
    template = ChatTemplate("{{ enable_thinking }}{{ bos_token }}" + LOOP, {}, use_minijinja=False)
    assert template.variables >= {"enable_thinking", "bos_token", "messages"}
    assert template.takes_later_system
    assert not template.knows_developer
    strict = "{% if messages[2].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    assert not ChatTemplate(strict, {}, use_minijinja=False).takes_later_system
    with pytest.raises(jinja2.TemplateError):
        ChatTemplate("{% if %}", {}, use_minijinja=False)
