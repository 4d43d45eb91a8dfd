"""Does a chat template take message content as text, or as a list of parts?

The engines read it off the template's syntax tree, each by its own rule; the same template must be
read the same way here, their mistakes included.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

from jinja2 import nodes

SGLANG_MEDIA_WORDS = ("image", "audio", "video", "vision")
SGLANG_MESSAGE_NAMES = ("message", "msg", "m")


class _Unreadable(Exception):
    """A template that vLLM's reading gives up on, and then takes for one of text."""


def takes_parts_vllm(tree: nodes.Template) -> bool:
    """vLLM: some loop runs over the content of a message, directly, by a macro's parameter or a variable."""
    try:
        messages = list(_message_names(tree))
    except _Unreadable:
        return False
    in_macro = dict(_macro_loops(tree, messages))
    for loop in tree.find_all(nodes.For):
        over = loop.iter
        if any(_reads(over, name, "content") for name in messages):
            return True
        if not isinstance(over, nodes.Name):
            continue
        if id(loop) not in in_macro:
            if over.name == "content":
                return True
        elif over.name in in_macro[id(loop)]:
            return True
    return False


def takes_parts_sglang(tree: nodes.Template, source: str) -> bool:
    """SGLang: the template speaks of media, or loops over the content of `message`, `msg` or `m`."""
    if any(word in source for word in SGLANG_MEDIA_WORDS):
        return True
    return any(
        _reads(loop.iter, name, "content")
        for loop in tree.find_all(nodes.For)
        for name in SGLANG_MESSAGE_NAMES
    )


def _reads(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Is it `name` (or `name.key`), under any filters, tests and slices?"""
    if isinstance(node, (nodes.Filter, nodes.Test)):
        return _reads(node.node, name, key)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _reads(node.node, name, key)
    if key is None:
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
    if isinstance(node, nodes.Getitem):
        return _reads_name(node.node, name) and isinstance(node.arg, nodes.Const) and node.arg.value == key
    return isinstance(node, nodes.Getattr) and _reads_name(node.node, name) and node.attr == key


def _reads_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _aliases(tree: nodes.Template, name: str) -> list[str]:
    """`name` and every variable that is set to it, to a fixpoint."""
    found, pending = [name], deque([name])
    while pending:
        current = pending.popleft()
        for assign in tree.find_all(nodes.Assign):
            target = assign.target
            if not _reads(assign.node, current):
                continue
            if not isinstance(target, nodes.Name):
                raise _Unreadable
            if target.name not in found:
                found.append(target.name)
                pending.append(target.name)
    return found


def _message_names(tree: nodes.Template) -> Iterator[str]:
    lists = _aliases(tree, "messages")
    for loop in tree.find_all(nodes.For):
        if any(_reads(loop.iter, name) for name in lists):
            if not isinstance(loop.target, nodes.Name):
                raise _Unreadable
            yield loop.target.name


def _macro_loops(tree: nodes.Template, messages: list[str]) -> Iterator[tuple[int, frozenset[str]]]:
    """Loops inside macros, and the parameters of their macro that some call gives a message's content."""
    for macro in tree.find_all(nodes.Macro):
        given: set[str] = set()
        for call in tree.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
                arguments: Mapping[str, nodes.Node] = {
                    **{p.name: a for p, a in zip(macro.args, call.args, strict=False)},
                    **{k.key: k.value for k in call.kwargs if isinstance(k, nodes.Keyword)},
                }
                given.update(
                    name
                    for name, value in arguments.items()
                    if any(_reads(value, message, "content") for message in messages)
                )
        for loop in macro.find_all(nodes.For):
            yield id(loop), frozenset(given)
