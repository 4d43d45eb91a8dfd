"""Mooncake's JSONL (the release of its FAST '25 paper): blocks of 512 tokens by chained id."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from kvroute.loadtests.traces.lines import BadLine, length, numbered_lines, time_s
from kvroute.loadtests.traces.rows import Row

BLOCK_TOKENS = 512
MAX_BLOCK_ID = 2**48
"""Parts of a block get numbers of their own, in 64 bits."""
FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


class _Line(msgspec.Struct, gc=False):
    timestamp: float
    """In ms."""
    input_length: int
    output_length: int
    hash_ids: list[int]
    session_id: str | int | None = None
    """Not in the paper's; who wrote the trace may know."""


class Mooncake:
    """One file of `block_tokens` per hash id."""

    unit: ClassVar[str] = "line"
    stamped: ClassVar[bool] = True
    items = staticmethod(numbered_lines)

    def __init__(self, block_tokens: int = BLOCK_TOKENS) -> None:
        self.block_tokens = block_tokens
        self._decode = msgspec.json.Decoder(_Line).decode

    def rows(self, item: bytes) -> tuple[Row]:
        try:
            read = self._decode(item)
        except (msgspec.DecodeError, RecursionError) as error:
            raise BadLine("malformed", f"{error}; {', '.join(FIELDS)} are expected") from None
        arrival_s = time_s("timestamp", read.timestamp, 1e3)
        input_tokens = length("input_length", read.input_length)
        blocks = -(-input_tokens // self.block_tokens)
        if len(read.hash_ids) != blocks:
            raise BadLine(
                "blocks",
                f"hash_ids: {len(read.hash_ids)} for {input_tokens} tokens; {blocks} blocks of "
                f"{self.block_tokens} tokens are expected",
            )
        if min(read.hash_ids) < 0 or max(read.hash_ids) >= MAX_BLOCK_ID:
            raise BadLine("blocks", f"hash_ids: each must be from 0 to {MAX_BLOCK_ID - 1}")
        session = None if read.session_id is None else str(read.session_id)
        return (
            Row(
                arrival_s,
                input_tokens,
                length("output_length", read.output_length),
                tuple(read.hash_ids),
                session,
            ),
        )
