"""Trace files: which format one is in, and its rows."""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path

from kvroute.loadtests.traces.azure import COLUMNS, Azure
from kvroute.loadtests.traces.lines import (
    BOM,
    HEAD_BYTES,
    MAX_LINE_BYTES,
    MAX_ROWS,
    BadLine,
    Format,
    NoRequest,
    TraceError,
    open_trace,
)
from kvroute.loadtests.traces.mooncake import FIELDS, Mooncake
from kvroute.loadtests.traces.rows import Row, Rows, Trace
from kvroute.loadtests.traces.sharegpt import Chats, ShareGpt
from kvroute.loadtests.traces.token_ids import PROMPT_FIELDS, TokenIds

BLOCK_TOKENS = 64
"""Of the blocks that are cut where the file does not say: all formats but Mooncake's."""
BAD_LINES = ("stop", "skip")
FORMATS: dict[str, Callable[[int | None, Chats], Format]] = {
    "mooncake": lambda block_tokens, _: Mooncake(*() if block_tokens is None else (block_tokens,)),
    "token_ids": lambda block_tokens, _: TokenIds(block_tokens or BLOCK_TOKENS),
    "sharegpt": lambda block_tokens, chats: ShareGpt(block_tokens or BLOCK_TOKENS, chats),
    "azure": lambda block_tokens, _: Azure(block_tokens or BLOCK_TOKENS),
}
_TRIED = (
    f"mooncake (JSONL with {', '.join(FIELDS)}), token_ids (JSONL with one of {', '.join(PROMPT_FIELDS)}), "
    f"sharegpt (JSON with conversations), azure (CSV with {', '.join(COLUMNS)})"
)
_KEY = re.compile(rb'"(\w+)"\s*:')


def read_trace(
    path: Path,
    format: str = "auto",
    bad_lines: str = "stop",
    block_tokens: int | None = None,
    chats: Chats = Chats(),  # noqa: B008 - frozen
) -> Trace:
    """The requests of a file, in order of arrival; times count from the first.

    `format` is one of `FORMATS`, or "auto" for what the file's beginning looks like. A line that does not
    fit stops the reading, or with `bad_lines` "skip" is counted in `Trace.skipped` by reason. `block_tokens`
    is what a hash id of a Mooncake file stands for (512), elsewhere what blocks are cut to (64).
    `TraceError`, a ValueError, names file, line and field.
    """
    if bad_lines not in BAD_LINES:
        raise ValueError(f"bad_lines must be {' or '.join(BAD_LINES)}, got {bad_lines!r}")
    if format != "auto" and format not in FORMATS:
        raise ValueError(f"unknown trace format {format!r}; known: auto, {', '.join(FORMATS)}")
    if block_tokens is not None and not 1 <= block_tokens <= 2**16:
        raise ValueError(f"block_tokens must be from 1 to {2**16}, got {block_tokens}")
    try:
        with open_trace(path) as file:
            head = file.peek(HEAD_BYTES)[:HEAD_BYTES]
            name = _detected(path, head) if format == "auto" else format
            reader = FORMATS[name](block_tokens, chats)
            rows, skipped = _read(path, reader, file, skip=bad_lines == "skip")
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(path, f": {error}") from None
    return _trace(path, reader, rows, skipped)


def _read(path: Path, reader: Format, file: BufferedReader, skip: bool) -> tuple[Rows, Counter[str]]:
    rows, skipped = Rows(), Counter[str]()
    try:
        for number, item in reader.items(file):
            try:
                for row in _rows(reader, item):
                    rows.add(row)
            except BadLine as bad:
                if not (skip or isinstance(bad, NoRequest)):
                    raise TraceError(path, f", {reader.unit} {number}: {bad}") from None
                skipped[bad.reason] += 1
            if len(rows) > MAX_ROWS:
                raise TraceError(path, f": more than {MAX_ROWS} requests")
    except BadLine as bad:  # of the file as a whole
        raise TraceError(path, str(bad)) from None
    return rows, skipped


def _rows(reader: Format, item: bytes) -> list[Row]:
    if len(item) > MAX_LINE_BYTES:
        raise BadLine("too_long", f"longer than {MAX_LINE_BYTES} bytes")
    try:
        item.decode()
    except UnicodeDecodeError as error:
        raise BadLine("encoding", f"not UTF-8 text: {error.reason} at byte {error.start}") from None
    return list(reader.rows(item))


def _trace(path: Path, reader: Format, rows: Rows, skipped: Counter[str]) -> Trace:
    if not rows:
        left_out = ", ".join(f"{count} {reason}" for reason, count in skipped.items())
        raise TraceError(
            path, ": no requests; " + (f"all were skipped: {left_out}" if left_out else "the file is empty")
        )
    unsorted = rows.sort()
    rows.shift(rows[0].arrival_s)
    return Trace(path.name, reader.block_tokens, rows, dict(skipped), unsorted if reader.stamped else 0)


def _detected(path: Path, head: bytes) -> str:
    """The format by the file's first bytes, for a table by its name too."""
    start = head.removeprefix(BOM).lstrip()
    if not start:
        raise TraceError(path, ": no requests; the file is empty")
    if start.startswith(b"["):
        return "sharegpt"
    if start.startswith(b"{"):
        keys = {key.decode() for key in _KEY.findall(start)}
        if keys & set(PROMPT_FIELDS):
            return "token_ids"
        if "conversations" in keys:
            return "sharegpt"
        if keys & set(FIELDS):
            return "mooncake"
    first, _, _ = start.partition(b"\n")
    if b"contexttokens" in first.lower() or path.name.removesuffix(".gz").endswith(".csv"):
        return "azure"
    if first.startswith(b"\x1f\x8b"):
        raise TraceError(path, ": compressed; a name that ends in .gz is expected for that")
    raise TraceError(path, f": its format is none of those known; tried: {_TRIED}")
