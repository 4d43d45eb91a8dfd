"""JSONL that holds each prompt's token ids: from serving logs, simulators and benchmarks.

A line has a time (`timestamp` or `arrival_time` in seconds, or `arrival_time_ns`), the prompt's ids under
one of `PROMPT_FIELDS`, an output length under one of `OUTPUT_FIELDS`, and perhaps a `session_id`.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from kvroute.conductor.keys import pack_ids
from kvroute.loadtests.traces.lines import BadLine, length, numbered_lines, time_s
from kvroute.loadtests.traces.numbering import BlockNumbers
from kvroute.loadtests.traces.rows import Row

TIME_FIELDS = {"timestamp": 1.0, "arrival_time": 1.0, "arrival_time_ns": 1e9}
"""And how many of each make a second."""
PROMPT_FIELDS = ("input_tok_ids", "token_ids", "prompt_token_ids")
OUTPUT_FIELDS = ("output_toks", "output_length", "output_tokens")


class _Line(msgspec.Struct, gc=False):
    timestamp: float | None = None
    arrival_time: float | None = None
    arrival_time_ns: float | None = None
    input_toks: int | None = None
    input_tok_ids: list[int] | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    output_toks: int | None = None
    output_length: int | None = None
    output_tokens: int | None = None
    session_id: str | int | None = None


class TokenIds:
    """One file; blocks are cut from the ids."""

    unit: ClassVar[str] = "line"
    stamped: ClassVar[bool] = True
    items = staticmethod(numbered_lines)

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._decode = msgspec.json.Decoder(_Line).decode
        self._numbers = BlockNumbers(block_tokens)

    def rows(self, item: bytes) -> tuple[Row]:
        try:
            read = self._decode(item)
        except (msgspec.DecodeError, RecursionError) as error:
            raise BadLine("malformed", str(error)) from None
        time_field = _given(read, tuple(TIME_FIELDS))
        arrival_s = time_s(time_field, getattr(read, time_field), TIME_FIELDS[time_field])
        output_field = _given(read, OUTPUT_FIELDS)
        output_tokens = length(output_field, getattr(read, output_field))
        prompt_field = _given(read, PROMPT_FIELDS)
        ids = getattr(read, prompt_field)
        if read.input_toks not in (None, len(ids)):
            raise BadLine("length", f"input_toks: {read.input_toks} for {len(ids)} ids in {prompt_field}")
        input_tokens = length(prompt_field, len(ids))
        try:
            packed = pack_ids(ids)
        except ValueError as error:
            raise BadLine("token_ids", f"{prompt_field}: {error}") from None
        session = None if read.session_id is None else str(read.session_id)
        return (Row(arrival_s, input_tokens, output_tokens, self._numbers.ids(packed), session),)


def _given(line: _Line, fields: tuple[str, ...]) -> str:
    """The first of these fields that the line has."""
    for name in fields:
        if getattr(line, name) is not None:
            return name
    raise BadLine("malformed", f"{fields[0]}: missing; one of {', '.join(fields)} is expected")
