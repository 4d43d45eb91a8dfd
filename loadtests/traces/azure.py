"""Azure's LLM inference traces (2023 and 2024): when, and how long; nothing of what was said.

Both have the header TIMESTAMP,ContextTokens,GeneratedTokens. 2023 stamps without a zone and in 100 ns
(2023-11-16 18:17:03.9799600), 2024 in microseconds with one (2024-05-10 00:00:00.009930+00:00).
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import ClassVar

from kvroute.loadtests.traces.lines import BadLine, length, numbered_lines
from kvroute.loadtests.traces.rows import Row

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d{1,9})?(Z|[+-]\d\d:?\d\d)?")


class Azure:
    """One file; every block of it is new."""

    unit: ClassVar[str] = "line"
    stamped: ClassVar[bool] = True
    items = staticmethod(numbered_lines)

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._places: list[int] | None = None
        self._next_id = 0

    def rows(self, item: bytes) -> tuple[Row, ...]:
        cells = [cell.strip().strip('"') for cell in item.decode().split(",")]
        if self._places is None:
            self._places = _places(cells)
            return ()
        if len(cells) <= max(self._places):
            raise BadLine("malformed", f"{len(cells)} cells; {', '.join(COLUMNS)} are expected")
        stamp, context, generated = (cells[place] for place in self._places)
        arrival_s = _seconds(stamp)
        input_tokens = length("ContextTokens", _number("ContextTokens", context))
        output_tokens = length("GeneratedTokens", _number("GeneratedTokens", generated))
        first = self._next_id
        self._next_id += -(-input_tokens // self.block_tokens)
        return (Row(arrival_s, input_tokens, output_tokens, tuple(range(first, self._next_id))),)


def _places(cells: list[str]) -> list[int]:
    lower = [cell.lower() for cell in cells]
    missing = [name for name in COLUMNS if name.lower() not in lower]
    if missing:
        raise BadLine(
            "header", f"no column {', '.join(missing)}; a header with {', '.join(COLUMNS)} is expected"
        )
    return [lower.index(name.lower()) for name in COLUMNS]


def _seconds(stamp: str) -> float:
    """Since 1970; a stamp without a zone is taken for UTC."""
    match = _STAMP.fullmatch(stamp)
    if match is None:
        raise BadLine("time", f"TIMESTAMP: {stamp!r}; a time such as 2024-05-10 00:00:00.009930 is expected")
    whole, fraction, zone = match.groups()
    try:
        at = datetime.fromisoformat(whole + (zone or ""))
    except ValueError as error:
        raise BadLine("time", f"TIMESTAMP: {stamp!r}: {error}") from None
    return (at if zone else at.replace(tzinfo=UTC)).timestamp() + float(fraction or 0)


def _number(field: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise BadLine("malformed", f"{field}: {text!r}; a whole number is expected") from None
