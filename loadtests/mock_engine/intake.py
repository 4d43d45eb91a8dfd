"""From the bytes of a generation request to a call whose prompts are tokens with their block keys."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import orjson

from kvroute.loadtests.mock_engine.block_keys import block_keys, root_key
from kvroute.loadtests.mock_engine.dialects.base import Body, Call, Defaults, Dialect, Part
from kvroute.loadtests.mock_engine.faults import CLEAN, FAULT_HEADER, FaultError, Faults, parse_header
from kvroute.loadtests.mock_engine.kv_hints import NO_HINTS, KvHints, read_hints
from kvroute.loadtests.mock_engine.options import MockOptions
from kvroute.loadtests.mock_engine.pd.fields import NO_PD, PdFields, read_pd_fields
from kvroute.loadtests.mock_engine.tokens import Words, plain_words, wide_words
from kvroute.loadtests.mock_engine.wire import ApiError, Request, invalid

_MEMO_BODIES = 1024
_MEMO_BODY_BYTES = 32 * 1024


@dataclass(frozen=True, slots=True)
class Reading:
    """A request as understood, or why it was not."""

    words: Words
    call: Call | None = None
    """A pattern: each request answers a copy of its own."""
    error: ApiError | None = None
    id: str | None = None
    """What the body calls itself."""
    hints: KvHints = NO_HINTS
    pd: PdFields = NO_PD


class Intake:
    """Of one engine incarnation: its keys start from `hash_seed`. Bodies seen before are not read again."""

    def __init__(self, options: MockOptions, hash_seed: int, adapters: dict[str, str]) -> None:
        self._options = options
        self._hash_seed = hash_seed
        self._adapters = adapters
        self._memo: dict[tuple[str, bytes, int, bool], Reading] = {}

    def forget(self) -> None:
        """The models served have changed."""
        self._memo.clear()

    def read(self, dialect: Dialect, body: bytes, faults: Faults) -> Reading:
        """Understand a body; errors are part of the answer."""
        key = (dialect.path, body, faults.n, faults.unicode)
        reading = self._memo.get(key)
        if reading is None:
            reading = self._read(dialect, body, faults)
            if len(body) <= _MEMO_BODY_BYTES:
                if len(self._memo) >= _MEMO_BODIES:
                    self._memo.clear()
                self._memo[key] = reading
        return reading

    def _read(self, dialect: Dialect, body: bytes, faults: Faults) -> Reading:
        words = (wide_words if faults.unicode else plain_words)(self._options.seed)
        try:
            fields = _parsed(body)
        except ApiError as error:
            return Reading(words, error=error)
        given = fields.get(dialect.id_field)
        id = given if isinstance(given, str) else None
        pd = read_pd_fields(fields)
        try:
            call = self._call(dialect, fields, faults, words)
            return Reading(words, call=call, id=id, hints=read_hints(fields), pd=pd)
        except ApiError as error:
            return Reading(words, error=error, id=id, pd=pd)

    def spoil(self, call: Call, index: int, words: Words) -> None:
        """Give one answer of a call another text, before any of it was sent."""
        part = call.parts[index]
        part.is_wrong = True
        part.start = words.elsewhere(part.start)
        self._fill(part, words, root_key(self._hash_seed, call.lora, call.salt))
        if part.sequence is not None:
            part.sequence.keys = part.keys

    def _call(self, dialect: Dialect, fields: Body, faults: Faults, words: Words) -> Call:
        options = self._options
        model = fields.get("model") or options.model
        if model != options.model and model not in self._adapters:
            raise ApiError(404, f"The model `{model}` does not exist.", "NotFoundError", "model")
        call = dialect.parse(
            fields, Defaults(options.model, options.max_tokens, options.output_tokens, faults.n)
        )
        call.lora = call.model if call.model in self._adapters else None
        root = root_key(self._hash_seed, call.lora, call.salt)
        for part in call.parts:
            self._prepare(part, words, root)
        call.prompt_tokens = sum(len(part.tokens) for part in call.parts)
        call.output_tokens = sum(part.output_tokens for part in call.parts)
        return call

    def _prepare(self, part: Part, words: Words, root: int) -> None:
        """Choose the output and hash everything the cache may see of it."""
        prompt_tokens = len(part.tokens)
        part.start = words.start(zlib.crc32(part.tokens.tobytes()))
        # A fault may ask for more tokens than the context has room for: those need no KV.
        part.kv_output_tokens = min(part.output_tokens, self._options.max_tokens - prompt_tokens)
        self._fill(part, words, root)

    def _fill(self, part: Part, words: Words, root: int) -> None:
        part.all_tokens = part.tokens + words.tokens(part.start, part.kv_output_tokens - 1)
        part.keys = block_keys(part.all_tokens, self._options.block_size_tokens, root)


def _parsed(body: bytes) -> Body:
    """The JSON object of a request; refused when it is none."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        where = f"('body', {error.pos}): JSON decode error: {error.msg}"
        raise invalid(f"1 validation error:\n  {where}") from error
    if not isinstance(value, dict):
        raise invalid("1 validation error:\n  ('body',): Input should be a valid dictionary")
    return value


def faults_for(request: Request, faults: Faults) -> tuple[Faults, float | None]:
    """The faults of one request, its header over its engine's, and the seconds of a restart it asks for.

    Uses up one of `faults.times`. `FaultError` when the header makes no sense.
    """
    header = request.header(FAULT_HEADER)
    if header is None and faults == CLEAN:
        return CLEAN, None
    if faults.times is not None:
        if faults.times:
            faults.times -= 1
        else:
            faults = CLEAN
    settings: dict[str, Any] = {} if header is None else dict(parse_header(header))
    restart = settings.pop("restart", None)
    try:
        restart_s = None if restart is None else float(restart)
    except ValueError as error:
        raise FaultError(f"fault restart={restart!r}: expected float") from error
    return faults.merged(settings), restart_s
