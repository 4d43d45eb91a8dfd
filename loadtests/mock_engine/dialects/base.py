"""What every generation API has in common: a parsed call, and a script that says it in that API's words."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from kvroute.loadtests.mock_engine.sequences import Sequence
from kvroute.loadtests.mock_engine.tokens import Words
from kvroute.loadtests.mock_engine.wire import invalid, rejected

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Defaults:
    """What an engine fills in or enforces."""

    model: str
    max_tokens: int
    """Longest prompt plus output."""
    output_tokens: int
    forced_tokens: int
    """Output length whatever was asked; 0 leaves it to the request."""


@dataclass(slots=True)
class Part:
    """One prompt of a call and its answer."""

    tokens: array[int]
    output_tokens: int = 1
    finish_reason: str = "stop"
    start: int = 0
    """Where in the words its output begins."""
    kv_output_tokens: int = 1
    """Output the scheduler is asked for."""
    all_tokens: array[int] = field(default_factory=lambda: array("I"))
    """Prompt and output, as far as they are ever cached."""
    keys: list[int] = field(default_factory=list)
    """Of the full blocks of `all_tokens`."""
    sequence: Sequence | None = None
    """Once queued."""
    is_wrong: bool = False
    """Generated over KV of something else."""

    def copy(self) -> Part:
        """For another request of the same text."""
        return Part(
            self.tokens,
            self.output_tokens,
            self.finish_reason,
            self.start,
            self.kv_output_tokens,
            self.all_tokens,
            self.keys,
        )


@dataclass(slots=True)
class Call:
    """A generation request, understood."""

    model: str
    parts: list[Part]
    stream: bool = False
    include_usage: bool = False
    tool: str | None = None
    """Function to call, when the answer is a tool call."""
    tool_argument: str = "input"
    tool_finish: str = "stop"
    salt: str | None = None
    lora: str | None = None
    batch: bool = False
    """The prompts came as a list, so the answers do."""
    id: str = ""
    created: int = 0
    cached_tokens_lie: int | None = None
    """Reported in place of the truth."""
    prompt_tokens: int = 0
    """Of all prompts."""
    output_tokens: int = 0
    """Of all answers."""
    kv_transfer_params: Body | None = None
    """For the decode engine; only an answer that is not streamed has a place for them."""

    def copy(self, id: str, cached_tokens_lie: int | None) -> Call:
        """For one request of that body."""
        return Call(
            self.model,
            [part.copy() for part in self.parts],
            self.stream,
            self.include_usage,
            self.tool,
            self.tool_argument,
            self.tool_finish,
            self.salt,
            self.lora,
            self.batch,
            id,
            int(time.time()),
            cached_tokens_lie,
            self.prompt_tokens,
            self.output_tokens,
        )

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed, as reported."""
        if self.cached_tokens_lie is not None:
            return self.cached_tokens_lie
        return sum(part.sequence.cached_tokens or 0 for part in self.parts if part.sequence)

    def handoff(self) -> Body:
        """Fields for the decode engine, if there are any."""
        return {} if self.kv_transfer_params is None else {"kv_transfer_params": self.kv_transfer_params}

    def usage(self) -> Body:
        """In OpenAI's shape."""
        prompt, output = self.prompt_tokens, self.output_tokens
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + output,
            "completion_tokens": output,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Script(Protocol):
    """The answer to one call. Events are bytes with their blank line, several at once where they travel
    together."""

    words: Words

    def plain(self) -> bytes:
        """The body of an answer that is not streamed."""

    def opening(self) -> bytes:
        """Events before the first token."""

    def token(self, part: int, index: int) -> bytes:
        """The event of token `index` of a part, from 0."""

    def uniform(self) -> tuple[bytes, bytes] | None:
        """What stands before and after the word in every event but the first and last of a lone answer; None
        when events differ in more."""

    def closing(self) -> bytes:
        """Events after the last token."""

    def error(self, message: str) -> bytes:
        """Events of a failure in mid-stream."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one path is parsed and answered."""

    path: str
    parse: Callable[[Body, Defaults], Call]
    """`ApiError` refuses."""
    script: Callable[[Call, Words], Script]
    id_prefix: str
    """Before the request's id, in what the body calls itself."""
    id_field: str = "request_id"
    """Body field that names the request when no header does."""


class ScriptBase:
    """Plain SSE around JSON, as OpenAI's older APIs have it."""

    def __init__(self, call: Call, words: Words) -> None:
        self.call = call
        self.words = words

    def text(self, part: Part) -> str:
        """The whole answer."""
        return self.words.text(part.start, part.output_tokens).decode()

    def uniform(self) -> tuple[bytes, bytes] | None:
        return None

    def closing(self) -> bytes:
        return b"data: [DONE]\n\n"

    def error(self, message: str) -> bytes:
        body = {"message": message, "type": "InternalServerError", "param": None, "code": 500}
        return sse({"error": body}) + b"data: [DONE]\n\n"


def sse(value: Any, event: str | None = None) -> bytes:
    """One server-sent event."""
    data = b"data: " + orjson.dumps(value) + b"\n\n"
    return data if event is None else b"event: %b\n%b" % (event.encode(), data)


def field_of(body: Body, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
    """A field, or its default when absent or null; refused when of another type."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise invalid(f"1 validation error:\n  {name}: Input should be a valid {kind}", name)
    return value


def check_stream_options(body: Body) -> tuple[bool, bool]:
    """(stream, include_usage)"""
    stream = bool(field_of(body, "stream", bool, False))
    options = field_of(body, "stream_options", dict)
    if options and not stream:
        raise invalid("Stream options can only be defined when `stream=True`.", "stream_options")
    return stream, bool(stream and options and options.get("include_usage"))


def plan_output(
    part: Part, defaults: Defaults, limit: int | None, least: int = 0, ends_itself: bool = False
) -> None:
    """Decide how long an answer gets and why it ends; refuse what cannot fit.

    A limit is used up, as with ignore_eos, so that load is what the client says it is; an answer that
    `ends_itself` or has no limit stops at the engine's usual length.
    """
    room = defaults.max_tokens - len(part.tokens)
    if not part.tokens:
        raise rejected("The decoder prompt cannot be empty")
    if room < 1 or (limit or 0) > room:
        raise rejected(
            f"This model's maximum context length is {defaults.max_tokens} tokens. However, you requested "
            f"{limit or 1} output tokens and your prompt contains {len(part.tokens)} input tokens.",
            "max_tokens",
        )
    if limit is not None and limit < 1:
        raise rejected(f"max_tokens must be at least 1, got {limit}.", "max_tokens")
    if least < 0 or (limit is not None and least > limit):
        raise rejected(
            f"min_tokens must be less than or equal to max_tokens={limit}, got {least}.", "min_tokens"
        )
    natural = defaults.forced_tokens or max(defaults.output_tokens, least)
    if limit is None or (ends_itself and natural < limit):
        part.output_tokens, part.finish_reason = min(natural, room), "stop"
    else:
        part.output_tokens, part.finish_reason = limit, "length"
    if defaults.forced_tokens:
        part.output_tokens = defaults.forced_tokens
