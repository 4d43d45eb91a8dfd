"""Canonical prompt bytes per API route: what byte keys are made of.

Equal prompts give equal bytes whichever way they are written (string, array of text parts, null), and a
chat that goes on extends the bytes of its last turn: constant things (tools, system) come first, then the
messages in order, and nothing counts or closes what may still grow.

Text is UTF-8, which has no bytes 0xF8 to 0xFF, so fields are marked with 0xFF and a letter: no text can
imitate a mark, and no length has to stand before a text that two prompts share only in part. Whatever is
not text (images, audio, unknown parts) stands as the digest of its canonical JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from msgspec import Struct
from xxhash import xxh3_64_hexdigest

from kvroute.conductor.keys import pack_ids

_ROLE, _TEXT, _NAME, _CALLS, _CALL_ID, _REASONING = b"\xffr", b"\xffc", b"\xffn", b"\xfft", b"\xffi", b"\xffh"
_PART, _TOOLS, _TEMPLATE, _NEXT_PROMPT, _MEDIA = b"\xffp", b"\xffT", b"\xffm", b"\xffs", b"\xffM"
_PREAMBLE = {"chat_template": _TEMPLATE, "tools": _TOOLS, "functions": _TOOLS}
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


class Prompt(Struct, frozen=True, gc=False):
    """Canonical bytes of a prompt and the domain they belong to; `no_keys` says why there are none."""

    domain: str
    data: bytes
    no_keys: str | None = None


EMPTY = Prompt("text", b"", "empty")
MISSHAPEN = Prompt("text", b"", "shape")


@dataclass(frozen=True, slots=True)
class Route:
    """How one API route carries its prompt: chat fields first, then flat fields in order of preference."""

    chat: Callable[[Mapping[str, Any]], Prompt] | None = None
    flat: tuple[str, ...] = ()

    def prompt(self, fields: Mapping[str, Any]) -> Prompt:
        """Never raises: a prompt that no engine would take is `MISSHAPEN`."""
        found = EMPTY
        try:
            for name in self.flat:
                if value := fields.get(name):
                    found = _flat(value, fields)
                    if found.no_keys is None:
                        return found
            if self.chat is not None:
                chat = self.chat(fields)
                found = found if chat is EMPTY else chat
        except (TypeError, ValueError, AttributeError, RecursionError):
            return MISSHAPEN
        return found


def _flat(value: Any, fields: Mapping[str, Any]) -> Prompt:
    """str, [str], [int] or [[int]]; several prompts of one request follow each other."""
    if isinstance(value, str):
        domain, data = "text", _utf8(value)
    elif not isinstance(value, list):
        return MISSHAPEN
    elif isinstance(value[0], str):
        domain, data = "text", _NEXT_PROMPT.join(map(_utf8, value))
    elif isinstance(value[0], list):
        # Where one id list ends is not told apart: at worst a block is believed cached that is not.
        domain, data = "ids", b"".join(map(pack_ids, value))
    else:
        domain, data = "ids", pack_ids(value)
    if not data:
        return EMPTY
    media = [
        _MEDIA + _digest(fields[name])
        for name in ("image_data", "audio_data", "video_data")
        if fields.get(name)
    ]
    return Prompt(domain, b"".join([*media, data]) if media else data)


def _chat(fields: Mapping[str, Any]) -> Prompt:
    return _conversation(fields, None, fields.get("messages"))


def _anthropic(fields: Mapping[str, Any]) -> Prompt:
    return _conversation(fields, fields.get("system"), fields.get("messages"))


def _responses(fields: Mapping[str, Any]) -> Prompt:
    items = fields.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}] if items else []
    return _conversation(fields, fields.get("instructions"), items)


def _conversation(fields: Mapping[str, Any], system: Any, messages: Any) -> Prompt:
    if not messages:
        return EMPTY
    if not isinstance(messages, list):
        return MISSHAPEN
    out: list[bytes] = []
    if not _PREAMBLE.keys().isdisjoint(fields):
        for name, mark in _PREAMBLE.items():
            if value := fields.get(name):
                out += (mark, _canonical(_without_cache_control(value)))
    if system:
        _message(out, {"role": "system", "content": system})
    for message in messages:
        _message(out, message)
    return Prompt("chat", b"".join(out))


def _message(out: list[bytes], message: Any) -> None:
    if not isinstance(message, dict) or "role" not in message:
        out += (_PART, _digest(message))  # a tool call or its output among the items of /v1/responses
        return
    get = message.get
    role, content = message["role"], get("content")
    if len(message) == 2 and isinstance(content, str) and isinstance(role, str):
        out += (_ROLE, _utf8(role), _TEXT, _utf8(content))  # nearly every message
        return
    out += (_ROLE, _plain(role))
    if name := get("name"):
        out += (_NAME, _plain(name))
    if call_id := get("tool_call_id"):
        out += (_CALL_ID, _plain(call_id))
    if reasoning := get("reasoning_content") or get("reasoning"):
        out += (_REASONING, _plain(reasoning))
    out.append(_TEXT)
    if isinstance(content, str):
        out.append(_utf8(content))
    elif content is not None:
        _content(out, content)
    if calls := get("tool_calls") or get("function_call"):
        out += (_CALLS, _canonical(calls))


def _content(out: list[bytes], parts: Any, depth: int = 0) -> None:
    """Text parts run together as the chat templates join them; others stand as digests between them."""
    if not isinstance(parts, list):
        out += (_PART, _digest(parts))
        return
    after_text = False
    for part in parts:
        text = _text_of(part)
        if text is not None:
            out += (b"\n", _utf8(text)) if after_text else (_utf8(text),)
            after_text = True
            continue
        after_text = False
        if depth == 0 and isinstance(part, dict) and part.get("type") == "tool_result":
            inner = part.get("content")
            out += (_PART, _digest({key: value for key, value in part.items() if key != "content"}), _TEXT)
            _content(out, [inner] if isinstance(inner, str) else inner or [], 1)
            out.append(_PART)
        else:
            out += (_PART, _digest(part))


def _text_of(part: Any) -> str | None:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") in _TEXT_PARTS:
        text = part.get("text")
        return text if isinstance(text, str) else None
    return None


def _plain(value: Any) -> bytes:
    return _utf8(value) if isinstance(value, str) else _canonical(value)


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def _digest(value: Any) -> bytes:
    return xxh3_64_hexdigest(_canonical(_without_cache_control(value))).encode()


def _canonical(value: Any) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # lone surrogates, integers beyond 64 bits, deep nesting
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _without_cache_control(value: Any) -> Any:
    """Anthropic's cache breakpoints move along with the conversation; they are no part of the prompt."""
    if isinstance(value, dict) and "cache_control" in value:
        return {key: inner for key, inner in value.items() if key != "cache_control"}
    if isinstance(value, list):
        return [_without_cache_control(item) for item in value]
    return value


ROUTES: Mapping[bytes, Route] = {
    b"/v1/chat/completions": Route(_chat, flat=("input_ids",)),
    b"/v1/completions": Route(flat=("prompt",)),
    b"/v1/responses": Route(_responses),
    b"/v1/messages": Route(_anthropic),
    b"/v1/embeddings": Route(_chat, flat=("input",)),
    b"/generate": Route(flat=("input_ids", "text", "prompt")),
}
"""Routes whose prompt an engine prefills, by path; on any other there are no keys. Ids come before text."""
