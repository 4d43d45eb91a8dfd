"""What routing needs of a request, read once; the body itself is forwarded as it came.

The gateway refuses only what it cannot route on: a body that is not JSON, not an object, or names its
model by something other than a string, on the generation routes, and headers of its own with values it cannot
read. Anything else passes and the engine judges it, an empty body and one of another content type included.
A prompt that gives no keys says why, by one of `parsed_request.NO_KEYS`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

import msgspec
import orjson
from msgspec import Raw, Struct
from msgspec.structs import replace

from kvroute.conductor.keys import BYTES_PER_TOKEN, Namespace
from kvroute.conductor.prompts import ROUTES
from kvroute.conductor.tokens.outcome import Unavailable
from kvroute.conductor.tokens.yielding import let_others_run
from kvroute.router.parsed_request import ParsedRequest, TokenIds, TokenSource
from kvroute.router.request_headers import MAX_PRIORITY, MalformedRequest, read_headers
from kvroute.types import RequestView

SESSION_FIELDS = (
    ("session_id", None),
    ("prompt_cache_key", None),
    ("metadata", "session_id"),
    ("metadata", "user_id"),
    ("user", None),
)
"""Where a session id is looked for after the headers; the first non-empty string (or integer) is taken.
`user` is last: it is the coarsest, and one user may hold many conversations."""
OUTPUT_LIMIT_FIELDS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
"""The first with a positive integer is the request's own limit on its output; SGLang's /generate has
`sampling_params.max_new_tokens` in their place. Any other value is the engine's to judge."""
MAX_OUTPUT_TOKENS = 2**31 - 1
_ASKED_FIELDS = frozenset({*OUTPUT_LIMIT_FIELDS, "sampling_params", "priority"})

_SESSION_ROOTS = frozenset(name for name, _ in SESSION_FIELDS)
NAMESPACE_FIELDS = frozenset({"lora_name", "lora_path", "cache_salt", "extra_key"})
"""Body fields that keep equal prompts apart, beside the model."""
NO_TOKENIZER = Unavailable("no_tokenizer")
OUTLINE_ABOVE_BYTES = 2**20
TOKENISE_UP_TO_BYTES = 4 * 2**20
"""Of models with a tokenizer, bodies are read in full up to here."""
MAX_CACHED_CHARS = 128
"""Longer model names are clients' inventions: their keys are not worth keeping."""
_TRUTHY = frozenset({"true", "1", "yes", "on", "t", "y"})


def parse_request(
    target: bytes, headers: Mapping[bytes, bytes], body: bytes, tokens: TokenSource | None = None
) -> ParsedRequest:
    """Read one request; `headers` by lower-case name. Raises `MalformedRequest` (see above) alone."""
    path = target.partition(b"?")[0]
    route = ROUTES.get(path)
    is_json = _is_json(headers.get(b"content-type"))
    said, priority = read_headers(headers)
    no_keys = "route" if route is None else "empty" if not body else None
    if is_json is False or not body or (route is None and not is_json):
        return ParsedRequest(said, no_keys=no_keys or "content_type")
    if len(body) > (OUTLINE_ABOVE_BYTES if tokens is None else TOKENISE_UP_TO_BYTES):
        return _parse_outline(route is not None, said, priority, body)
    if route is None:
        return _parse_other(said, body)
    fields = _load(body)
    let_others_run()
    model = _model(fields)
    made = NO_TOKENIZER if tokens is None else tokens(model, path, fields)
    if isinstance(made, TokenIds):
        request = ParsedRequest(_view(said, priority, model, fields, 0))
        take_tokens(request, made, fields)
        return request
    prompt = route.prompt(fields)
    return ParsedRequest(
        _view(said, priority, model, fields, -(-len(prompt.data) // BYTES_PER_TOKEN)),
        prompt.no_keys,
        None if made is None else made.reason,
        0 if made is None else made.predicted_tokens or 0,
        fields if made is None else None,
        prompt.data,
        _root=_root(model, fields, prompt.domain),
    )


def _view(
    said: RequestView, priority: int | None, model: str | None, fields: Mapping[str, Any], prompt_tokens: int
) -> RequestView:
    """Headers, body and length of the prompt in one; what headers say counts before the body."""
    limit = None
    if not _ASKED_FIELDS.isdisjoint(fields):
        limit = _output_limit(fields)
        if priority is None:
            priority = _asked_priority(fields.get("priority"))
    return RequestView(
        model,
        said.session_id or _session_id(fields),
        prompt_tokens,
        _is_true(fields.get("stream")),
        said.tenant,
        priority or 0,
        limit,
        said.ttft_limit_s,
        said.itl_limit_s,
        said.e2e_limit_s,
        said.continues,
    )


def _output_limit(fields: Mapping[str, Any]) -> int | None:
    for name in OUTPUT_LIMIT_FIELDS:
        value = fields.get(name)
        if type(value) is int and 0 < value <= MAX_OUTPUT_TOKENS:
            return value
    sampling = fields.get("sampling_params")
    if isinstance(sampling, dict):
        value = sampling.get("max_new_tokens")
        if type(value) is int and 0 < value <= MAX_OUTPUT_TOKENS:
            return value
    return None


def _asked_priority(value: Any) -> int | None:
    return value if type(value) is int and -MAX_PRIORITY <= value <= MAX_PRIORITY else None


def take_tokens(request: ParsedRequest, made: TokenIds | Unavailable, fields: Mapping[str, Any]) -> None:
    """Give a request the tokens of its prompt, or the reason why it has none."""
    if isinstance(made, TokenIds):
        request.take_tokens(made.prompts, _root(made.model, fields, "ids", made.adapter))
    else:
        request.no_tokens = made.reason


class _Outline(Struct):
    """The fields of a large body that routing needs, as the slices of JSON that they are."""

    model: str | None = None
    stream: Raw = Raw(b"false")
    max_completion_tokens: Raw = Raw()
    max_tokens: Raw = Raw()
    max_output_tokens: Raw = Raw()
    sampling_params: Raw = Raw()
    priority: Raw = Raw()
    tools: Raw = Raw()
    system: Raw = Raw()
    instructions: Raw = Raw()
    messages: Raw = Raw()
    input: Raw = Raw()
    prompt: Raw = Raw()
    text: Raw = Raw()
    input_ids: Raw = Raw()
    lora_name: Raw = Raw()
    lora_path: Raw = Raw()
    cache_salt: Raw = Raw()
    extra_key: Raw = Raw()


_SMALL_FIELDS = ("stream", "priority", *OUTPUT_LIMIT_FIELDS, "sampling_params")
MAX_SMALL_FIELD_BYTES = 16 * 2**10
_PROMPT_FIELDS = ("tools", "system", "instructions", "input_ids", "messages", "input", "prompt", "text")
_decode_outline = msgspec.json.Decoder(_Outline).decode


def _parse_outline(
    is_prompt_route: bool, said: RequestView, priority: int | None, body: bytes
) -> ParsedRequest:
    """Read a large body without making objects of it: a megabyte of `{},` would become a hundred.

    Its keys are of the JSON as it stands, which a client that goes on with a chat writes the same way again;
    they do not match those of a smaller body of the same text.
    """
    try:
        outline = _decode_outline(body)
    except msgspec.ValidationError as error:
        field = "model" if "$.model" in str(error) else None
        raise MalformedRequest(f"the body is not usable: {error}", field) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedRequest(f"the body is not valid JSON: {error}; a JSON object is expected") from None
    prompt = b"".join(bytes(getattr(outline, name)) for name in _PROMPT_FIELDS)
    extras = (outline.lora_name, outline.lora_path, outline.cache_salt, outline.extra_key)
    salt = b"\0".join(map(bytes, extras)).decode("utf-8", "replace")
    prompt_tokens = -(-len(prompt) // BYTES_PER_TOKEN)
    view = _view(said, priority, outline.model, _asked(outline), prompt_tokens)
    no_keys = "route" if not is_prompt_route else None if prompt else "empty"
    root = Namespace(model=outline.model, cache_salt=salt).root("json")
    return ParsedRequest(view, no_keys, "too_long", _prompt=prompt, _root=root)


def _asked(outline: _Outline) -> dict[str, Any]:
    """The small fields of a large body; one whose value is long or cannot be read is left out."""
    asked: dict[str, Any] = {}
    for name in _SMALL_FIELDS:
        raw = bytes(getattr(outline, name))
        if 0 < len(raw) <= MAX_SMALL_FIELD_BYTES:
            with suppress(orjson.JSONDecodeError):
                asked[name] = orjson.loads(raw)
    return asked


def _parse_other(said: RequestView, body: bytes) -> ParsedRequest:
    """A JSON route the table does not know: its model and stream flag if they are there, never a refusal."""
    try:
        fields = _load(body)
    except MalformedRequest:
        return ParsedRequest(said, no_keys="route")
    model = fields.get("model")
    view = replace(
        said,
        model=model if isinstance(model, str) else None,
        session_id=said.session_id or _session_id(fields),
        stream=_is_true(fields.get("stream")),
    )
    return ParsedRequest(view, no_keys="route")


def _is_json(content_type: bytes | None) -> bool | None:
    """Whether the content is JSON; None when the header does not say."""
    if content_type is None or content_type == b"application/json":
        return content_type is not None or None
    media_type = content_type.partition(b";")[0].strip().lower()
    return media_type == b"application/json" or media_type.endswith(b"+json")


def _load(body: bytes) -> dict[str, Any]:
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        fields = _load_leniently(body, error)
    if not isinstance(fields, dict):
        raise MalformedRequest(f"the body is {_kind(fields)}; a JSON object is expected")
    return fields


def _load_leniently(body: bytes, error: orjson.JSONDecodeError) -> Any:
    """What orjson refuses but the engines' own parser takes: NaN, lone surrogates, other encodings, a BOM."""
    try:
        return json.loads(body)
    except RecursionError:
        raise MalformedRequest("the body is nested too deeply; a JSON object is expected") from None
    except ValueError:  # also UnicodeDecodeError, and integers of thousands of digits
        raise MalformedRequest(f"the body is not valid JSON: {error}; a JSON object is expected") from None


def _model(fields: Mapping[str, Any]) -> str | None:
    model = fields.get("model")
    if model is None or isinstance(model, str):
        return model
    raise MalformedRequest(f"model is {_kind(model)}; a string is expected", "model")


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


def _root(model: str | None, fields: Mapping[str, Any], domain: str, adapter: str | None = None) -> int:
    """Root of the key chain of one prompt; an adapter is a model's own name, or stands in the body."""
    if NAMESPACE_FIELDS.isdisjoint(fields):
        if model is None or len(model) <= MAX_CACHED_CHARS:
            return _root_of_model(model, domain, adapter)
        return Namespace(model=model, adapter=adapter).root(domain)
    return Namespace(
        model=model,
        adapter=adapter
        or _namespace_part(fields.get("lora_name"))
        or _namespace_part(fields.get("lora_path")),
        cache_salt=_namespace_part(fields.get("cache_salt")),
        extra_key=_namespace_part(fields.get("extra_key")),
    ).root(domain)


@lru_cache(maxsize=1024)
def _root_of_model(model: str | None, domain: str, adapter: str | None) -> int:
    return Namespace(model=model, adapter=adapter).root(domain)


def _namespace_part(value: Any) -> str | None:
    # SGLang takes a list of adapters, one per prompt of a batch.
    if isinstance(value, list):
        value = "\0".join(v for v in value if isinstance(v, str))
    return value if isinstance(value, str) and value else None


def _session_id(fields: Mapping[str, Any]) -> str | None:
    if _SESSION_ROOTS.isdisjoint(fields):
        return None
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
