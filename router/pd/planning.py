"""Whether a request can be split, told from its route and its body alone; pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
from msgspec import Raw, Struct

from kvroute.router.eligible import Task
from kvroute.router.hints.hints import DIGESTS
from kvroute.router.pd.body import LIMITS, Fields, read_fields
from kvroute.router.pd.connector import Connector
from kvroute.router.request_parser import Request

HARMLESS = frozenset({b"/tokenize", b"/detokenize"})
"""Any other route that is posted to may generate, be it one not known here (`/invocations`) or a known
one in another spelling (`%63ompletions`). An engine that takes nothing whole would hang over it, or end.
"""
GENERATE = b"/generate"
"""SGLang's own route: split only where both legs have the same body."""


class Planned(Struct, frozen=True):
    """A request that may be split, as it goes on: without what a client may not set."""

    request: Request
    fields: Fields | None
    task: Task
    prompts: int | None
    """Length of a list of prompts."""
    why_not: str
    """Why it is not to be split; empty where it may be."""


def plan(request: Request, fields: Fields | None, connector: Connector) -> tuple[Task, str, int | None]:
    """(Task, why it is not split, length of a list of prompts).

    `fields` are the body's; None where it has none that can be changed.
    """
    path = request.target.partition(b"?")[0]
    if request.method != b"POST" or path in HARMLESS:
        return Task.ANSWER, "route", None
    if path not in LIMITS and (path != GENERATE or connector.shortens_prefill):
        return Task.WHOLE, "route", None
    if fields is None or not DIGESTS.isdisjoint(request.fields):
        return Task.WHOLE, "body" if fields is None else "digest", None
    if not _LONE_NAMES.isdisjoint(fields):
        for name in _LONE.keys() & fields.keys():
            if _LONE[name](_value(fields[name])):
                return Task.WHOLE, name, None
    prompts = count_prompts(path, fields)
    if not connector.takes_lists and prompts is not None and prompts > 1:
        return Task.WHOLE, "prompts", prompts
    return Task.SPLIT, "", prompts


def count_prompts(path: bytes, fields: Fields) -> int | None:
    """Length of a list of prompts; None for a single one, be it a list of token ids."""
    names = ("input_ids", "text") if path == GENERATE else ("prompt",) if path == b"/v1/completions" else ()
    for name in names:
        if name in fields and memoryview(fields[name])[0] == ord("["):
            prompts = _value(fields[name])
            if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int):
                return len(prompts)
    return None


def read_body(request: Request) -> Fields | None:
    return read_fields(request.body) if request.body else None


def _value(raw: Raw) -> Any:
    """None for what orjson refuses, such as an integer of more than 64 bits: the engine will too."""
    try:
        return orjson.loads(bytes(raw))
    except orjson.JSONDecodeError:
        return None


def _several(value: Any) -> bool:
    return value not in (None, 1, "1", True)


def _given(value: Any) -> bool:
    return value not in (None, False, 0)


def _asked_for(value: Any) -> bool:
    """Of prompt logprobs: 0 asks for those of the prompt's own tokens."""
    return value is not None and value is not False


_LONE: dict[str, Callable[[Any], bool]] = {
    "n": _several,
    "best_of": _several,
    "echo": _given,
    "prompt_logprobs": _asked_for,
    "use_beam_search": _given,
    "previous_response_id": _given,
    "background": _given,
}
"""What a decode worker cannot go on with, or makes a request more than one sequence: by field, whether its
value asks for it. vLLM hands over the blocks of one sequence per request."""
_LONE_NAMES = frozenset(_LONE)
