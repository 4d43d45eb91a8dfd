"""Chat templates: one source, rendered as the engines render it.

The reference is jinja2 in the sandbox that transformers uses (same options, filters and globals). minijinja
renders the same in a quarter of the time; it is used for a template only when `minijinja_agrees` said so,
and a render it refuses is done again by jinja2.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from datetime import datetime
from threading import Lock
from typing import Any, NoReturn

import jinja2
import minijinja
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvroute.conductor.tokens.content_format import takes_parts_sglang, takes_parts_vllm
from kvroute.conductor.tokens.outcome import NotExact
from kvroute.conductor.tokens.yielding import YieldingList

_CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
_NAME = "chat"
_REPLACEMENT = "\ufffd"
"""minijinja writes it for a lone surrogate, which the engines refuse; from jinja2 that comes out as it is."""
UNSET: Mapping[str, Any] = {"tools": None, "documents": None, "add_generation_prompt": False}
"""Variables that a template always has."""


class ChatTemplate:
    """A compiled template. Thread-safe: rendering changes nothing here but `fallbacks`."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], use_minijinja: bool) -> None:
        """Raises `jinja2.TemplateError` when the source is not a template."""
        environment = _jinja_environment()
        tree = environment.parse(source)
        self.source = source
        self.variables = frozenset(meta.find_undeclared_variables(tree))
        """Names it reads from outside; other `chat_template_kwargs` do not reach it."""
        self.takes_parts_vllm = takes_parts_vllm(tree)
        self.takes_parts_sglang = takes_parts_sglang(tree, source)
        self.knows_developer = '"developer"' in source or "'developer'" in source
        self.fallbacks = 0
        """Renders for which jinja2 was asked after minijinja."""
        self._counting = Lock()
        self._special_tokens = dict(special_tokens)
        self._jinja = environment.from_string(source)
        self._minijinja = _minijinja_environment(source) if use_minijinja else None
        self.takes_later_system = _takes_later_system(source)
        """Whether a system message may stand after others. vLLM asks so of /v1/messages."""

    def render(self, messages: Sequence[Mapping[str, Any]], continue_final: bool, **given: Any) -> str:
        """The prompt's text. `given` are its variables beside the messages (tools, documents, ...).

        Raises `NotExact("template")` when the template refuses the conversation, as the engine then does.
        """
        variables = {**UNSET, **self._special_tokens, **given}
        messages = YieldingList(messages)
        if continue_final:
            return self._continue_final(messages, variables)
        return self._render(messages, variables)

    def _render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        if self._minijinja is not None:
            with suppress(Exception):
                rendered = self._minijinja.render_template(_NAME, messages=messages, **variables)
                if _REPLACEMENT not in rendered:
                    return rendered
            with self._counting:
                self.fallbacks += 1
        try:
            return self._jinja.render(messages=messages, **variables)
        except Exception as error:  # a template can raise anything its values make Python raise
            raise NotExact("template") from error

    def _continue_final(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """Up to the end of the last message's text, found by a mark, as transformers does."""
        final = deepcopy(dict(messages[-1]))
        content = final.get("content")
        if isinstance(content, list):
            last = next((part for part in reversed(content) if "text" in part), None)
            if last is None:
                raise NotExact("template")
            content = last["text"]
            last["text"] = content + _CONTINUE_MARK
        elif isinstance(content, str):
            final["content"] = content + _CONTINUE_MARK
        else:
            raise NotExact("template")
        rendered = self._render(YieldingList([*messages[:-1], final]), variables)
        if content.strip() not in rendered or (at := rendered.rfind(_CONTINUE_MARK.strip())) < 0:
            raise NotExact("template")
        kept = rendered[:at]
        return kept if rendered.startswith(_CONTINUE_MARK, at) else kept.rstrip()


def _takes_later_system(source: str) -> bool:
    """As vLLM tries it: without the globals and the `generation` tag, which then count as refusals."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    turns = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
    try:
        environment.from_string(source).render(messages=turns, add_generation_prompt=False)
    except jinja2.TemplateError:
        return False
    except Exception:  # vLLM would fail as a whole
        return True
    return True


def minijinja_agrees(
    source: str, special_tokens: Mapping[str, str], cases: Sequence[Mapping[str, Any]]
) -> bool:
    """Do both engines render every case alike? A case that both refuse counts as alike."""
    try:
        reference = ChatTemplate(source, special_tokens, use_minijinja=False)
        fast = _minijinja_environment(source)
    except (jinja2.TemplateError, minijinja.TemplateError):
        return False
    for case in cases:
        try:
            expected = reference.render(continue_final=False, **case)
        except NotExact:
            continue  # the engine refuses it too, so whatever minijinja makes of it reaches no cache
        try:
            if fast.render_template(_NAME, **{**UNSET, **special_tokens, **case}) != expected:
                return False
        except Exception:
            return False
    return True


class _Generation(Extension):
    """`{% generation %}`: marks what the assistant said, for training; renders its body."""

    tags = {"generation"}  # noqa: RUF012  (as its base declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return caller()


def _jinja_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


def _minijinja_environment(source: str) -> minijinja.Environment:
    filters: dict[str, Callable[..., Any]] = {"tojson": _tojson}
    environment = minijinja.Environment(trim_blocks=True, lstrip_blocks=True, filters=filters)
    environment.add_global("raise_exception", _raise_exception)
    environment.add_global("strftime_now", _strftime_now)
    environment.add_template(_NAME, source)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without the HTML escapes of jinja2's own."""
    separators = tuple(separators) if separators is not None else None  # type: ignore[assignment]
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
