"""What routing needs of a request, read once; the body itself is forwarded as it came.

The gateway refuses only what it cannot route on: a body that is not JSON, not an object, or names its
model by something other than a string, on the generation routes. Anything else passes and the engine
judges it, an empty body and one of another content type included. A prompt that gives no keys says why,
by one of `NO_KEYS`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from kvroute.conductor.keys import BYTES_PER_TOKEN, byte_keys, namespace_key
from kvroute.router.prompt_bytes import ROUTES, Prompt
from kvroute.types import PromptKeys, RequestView

NO_KEYS = ("route", "content_type", "empty", "shape", "short")
"""Why a prompt has no keys: not a prompt route; not a JSON body; no prompt or an empty one; a prompt of no
shape an engine takes; shorter than one chunk. A fixed set, fit for a metric label."""

SESSION_HEADERS = (b"x-session-id", b"x-kvroute-session")
SESSION_FIELDS = (
    ("session_id", None),
    ("prompt_cache_key", None),
    ("metadata", "session_id"),
    ("metadata", "user_id"),
    ("user", None),
)
"""Where a session id is looked for, headers first; the first non-empty string (or integer) is taken. `user`
is last: it is the coarsest, and one user may hold many conversations."""

_NAMESPACE_FIELDS = (("lora_path", "adapter"), ("cache_salt", "cache_salt"), ("extra_key", "extra_key"))
_TRUTHY = frozenset({"true", "1", "yes", "on", "t", "y"})


class MalformedBody(Exception):
    """A body that cannot be routed on; the message names the field, the fault and what is accepted."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


@dataclass(slots=True)
class ParsedRequest:
    """A request's view and, on demand, its prompt keys. Drop it once routed: it holds the prompt's text."""

    view: RequestView
    namespace: Mapping[str, str] = field(default_factory=dict)
    """Arguments of `namespace_key`: what separates this prompt from equal text elsewhere."""
    no_keys: str | None = None
    """One of `NO_KEYS` when the prompt gives no keys whatever the chunk size."""
    _prompt: bytes = b""
    _keys: tuple[int, PromptKeys] | None = None

    def prompt_bytes(self) -> bytes:
        """The canonical bytes that byte keys are made of; empty when there is no prompt."""
        return self._prompt

    def prompt_keys(self, chunk_bytes: int) -> tuple[PromptKeys | None, str | None]:
        """Keys of the full chunks, made once; or None and the reason, one of `NO_KEYS`."""
        if self.no_keys is not None:
            return None, self.no_keys
        if len(self._prompt) < chunk_bytes:
            return None, "short"
        if self._keys is None or self._keys[0] != chunk_bytes:
            self._keys = chunk_bytes, byte_keys(self._prompt, namespace_key(**self.namespace), chunk_bytes)
        return self._keys[1], None


def parse_request(path: bytes | str, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> ParsedRequest:
    """Read one request; `path` may carry a query. Raises `MalformedBody` (see above) and nothing else."""
    if isinstance(path, bytes):
        path = path.decode("latin-1")
    route = ROUTES.get(path.partition("?")[0])
    is_json, session_id = _read_headers(headers)
    no_keys = "route" if route is None else "empty" if not body else None
    if is_json is False or not body or (route is None and not is_json):
        return ParsedRequest(RequestView(session_id=session_id), no_keys=no_keys or "content_type")
    if route is None:
        return _parse_other(session_id, body)
    fields = _load(body)
    model = _model(fields)
    prompt = route.prompt(fields)
    return ParsedRequest(
        RequestView(
            model,
            session_id or _session_id(fields),
            -(-len(prompt.data) // BYTES_PER_TOKEN),
            _is_true(fields.get("stream")),
        ),
        _namespace(model, fields, prompt),
        prompt.no_keys,
        prompt.data,
    )


def _parse_other(session_id: str | None, body: bytes) -> ParsedRequest:
    """A JSON route the table does not know: its model and stream flag if they are there, never a refusal."""
    try:
        fields = _load(body)
    except MalformedBody:
        return ParsedRequest(RequestView(session_id=session_id), no_keys="route")
    model = fields.get("model")
    view = RequestView(
        model if isinstance(model, str) else None,
        session_id or _session_id(fields),
        stream=_is_true(fields.get("stream")),
    )
    return ParsedRequest(view, no_keys="route")


def _read_headers(headers: Iterable[tuple[bytes, bytes]]) -> tuple[bool | None, str | None]:
    """Is the content JSON (None when not said), and the session id the headers give."""
    is_json = None
    sessions: dict[bytes, bytes] = {}
    for name, value in headers:
        size = len(name)
        if size == 12 and name.lower() == b"content-type":
            media_type = value.partition(b";")[0].strip().lower()
            is_json = media_type == b"application/json" or media_type.endswith(b"+json")
        elif size in (12, 17) and value and (lower := name.lower()) in SESSION_HEADERS:
            sessions.setdefault(lower, value)
    for name in SESSION_HEADERS:
        if name in sessions:
            return is_json, sessions[name].decode("latin-1")
    return is_json, None


def _load(body: bytes) -> dict[str, Any]:
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        fields = _load_leniently(body, error)
    if not isinstance(fields, dict):
        raise MalformedBody(f"the body is {_kind(fields)}; a JSON object is expected")
    return fields


def _load_leniently(body: bytes, error: orjson.JSONDecodeError) -> Any:
    """What orjson refuses but the engines' own parser takes: NaN, lone surrogates, other encodings, a BOM."""
    try:
        return json.loads(body)
    except RecursionError:
        raise MalformedBody("the body is nested too deeply; a JSON object is expected") from None
    except ValueError:  # also UnicodeDecodeError, and integers of thousands of digits
        raise MalformedBody(f"the body is not valid JSON: {error}; a JSON object is expected") from None


def _model(fields: Mapping[str, Any]) -> str | None:
    model = fields.get("model")
    if model is None or isinstance(model, str):
        return model
    raise MalformedBody(f"model is {_kind(model)}; a string is expected", "model")


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, (int, float)):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, list) else "an object"


def _namespace(model: str | None, fields: Mapping[str, Any], prompt: Prompt) -> dict[str, str]:
    namespace = {"domain": prompt.domain}
    if model is not None:
        namespace["model"] = model
    for name, part in _NAMESPACE_FIELDS:
        if value := fields.get(name):
            if isinstance(value, list):  # SGLang takes a list of adapters, one per prompt of a batch
                value = "\0".join(each for each in value if isinstance(each, str))
            if isinstance(value, str):
                namespace[part] = value
    return namespace


def _session_id(fields: Mapping[str, Any]) -> str | None:
    for outer, inner in SESSION_FIELDS:
        value = fields.get(outer)
        if value and inner is not None:
            value = value.get(inner) if isinstance(value, dict) else None
        if value and isinstance(value, (str, int)) and value is not True:
            return str(value)
    return None


def _is_true(value: Any) -> bool:
    """As the engines' lax validation reads it."""
    if value is True or value is None or value is False:
        return value is True
    return value == 1 or (isinstance(value, str) and value.lower() in _TRUTHY)
