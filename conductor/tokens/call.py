"""What every API route comes down to: a conversation to render, or texts and ids as they are."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from kvroute.conductor.tokens.outcome import NotExact
from kvroute.conductor.tokens.yielding import let_others_run

IDS_AT_ONCE = 2**14
"""Token ids looked at between two pauses: a third of a millisecond."""
HUGE = 2.0**63


MAX_DEPTH = 32
"""Of what a template sees. Where it indents (`tojson(indent=4)`), depth makes a short body a long text."""


class Cut(Struct, frozen=True):
    """`truncate_prompt_tokens`: how many tokens are kept."""

    tokens: int
    side: Literal["left", "right"]
    """The end that loses tokens."""
    whole: bool
    """Whether special tokens around a text (BOS) are cut along with it, instead of being kept and counted."""


class ChatCall(Struct, frozen=True):
    """A conversation, checked and ordered as the template will see it."""

    messages: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any]
    """Of the template, beside the messages; may hold names it does not read."""
    continue_final: bool = False
    add_special: bool = False
    cut: Cut | None = None
    suffix: str = ""
    """Text that follows what the template renders."""


class FlatCall(Struct, frozen=True):
    """Prompts that no template touches, each a text or its ids."""

    prompts: Sequence[str | list[int]]
    add_special: bool = True
    cut: Cut | None = None


def is_deep(value: Any) -> bool:
    """Whether lists and objects lie in one another more than `MAX_DEPTH` deep."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, Mapping) else outer)
            if isinstance(inner, (dict, list, tuple, Mapping))
        ]
        if not level:
            return False
    return True


def flag(fields: Mapping[str, Any], name: str, default: bool) -> bool:
    """A boolean field. Other spellings of true are left to the engine: `NotExact`."""
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise NotExact("shape")
    return value


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise NotExact("shape")
    return value


def optional_text(value: Any) -> str | None:
    return None if value is None else text(value)


def mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise NotExact("shape")
    return value


def sequence(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise NotExact("shape")
    return value


def no_huge_numbers(value: Any) -> None:
    """`NotExact` for a number of 2**63 or more: the body's parser may have made a float of an integer."""
    if isinstance(value, float):
        if abs(value) >= HUGE:
            raise NotExact("shape")
    elif isinstance(value, dict):
        for item in value.values():
            no_huge_numbers(item)
    elif isinstance(value, list):
        for item in value:
            no_huge_numbers(item)


def flat_prompts(value: Any) -> list[str | list[int]]:
    """A prompt field: str, [str], [int] or [[int]]; `NotExact` when it is neither, or holds nothing."""
    if isinstance(value, str):
        prompts: list[str | list[int]] = [value]
    elif not isinstance(value, list):
        raise NotExact("empty" if value is None else "shape")
    elif value and all(isinstance(item, str) for item in value):
        prompts = list(value)
    elif value and all(isinstance(item, list) for item in value):
        prompts = [_ids(item) for item in value]
    else:
        prompts = [_ids(value)]
    if not all(prompts):
        raise NotExact("empty")
    return prompts


def _ids(value: list[Any]) -> list[int]:
    """Of these a prompt may have a million: native code looks at them, and others run in between."""
    for start in range(0, len(value), IDS_AT_ONCE):
        some = value[start : start + IDS_AT_ONCE]
        if set(map(type, some)) != {int}:
            raise NotExact("shape")
        try:
            array("I", some)
        except OverflowError:  # below 0, or 2**32 and more
            raise NotExact("shape") from None
        let_others_run()
    return value
