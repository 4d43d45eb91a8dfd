"""The bytes of a trace file, in bounded pieces, and what may be wrong with one of them."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator
from io import BufferedReader, FileIO
from itertools import count
from pathlib import Path
from typing import ClassVar, Protocol

from kvroute.loadtests.traces.rows import Row

MAX_ROWS = 1_000_000
MAX_LINE_BYTES = 2**24
"""A prompt of two million token ids."""
MAX_FILE_BYTES = 2**36
"""Unpacked: a compressed file of endless zeros ends somewhere."""
MAX_TOKENS = 10_000_000
HEAD_BYTES = 2**16
BOM = b"\xef\xbb\xbf"


class TraceError(ValueError):
    """A trace cannot be read; the message names file, line, field, what was wrong and what is accepted."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"--trace: {path}{what}")


class BadLine(ValueError):
    """One line does not fit; `reason` is short and one of few, to count by."""

    def __init__(self, reason: str, what: str) -> None:
        super().__init__(what)
        self.reason = reason


class NoRequest(BadLine):
    """A line that fits and holds no request: counted, but no reason to stop."""


class Format(Protocol):
    """How the requests of one file are written. An object reads one file, from its first line on."""

    unit: ClassVar[str]
    """What `items` counts, for messages."""
    stamped: ClassVar[bool]
    """Whether the lines say when they came; else arrivals are drawn."""
    block_tokens: int

    def items(self, file: BufferedReader) -> Iterator[tuple[int, bytes]]:
        """The pieces of the file, numbered from 1; a longer one than `MAX_LINE_BYTES` is cut after that."""
        ...

    def rows(self, item: bytes) -> Iterable[Row]:
        """The requests of one piece, none for a header. Raises `BadLine`."""
        ...


def open_trace(path: Path) -> BufferedReader:
    """The bytes, unpacked if the name ends in .gz. Raises `TraceError` when there is no such file."""
    try:
        if path.is_dir():
            raise TraceError(path, " is a directory; the path of a trace file is expected")
        if path.is_fifo():
            raise TraceError(path, " is a pipe, and a trace is read more than once; write it to a file first")
        if path.suffix == ".gz":
            return BufferedReader(gzip.GzipFile(path), HEAD_BYTES)
        return BufferedReader(FileIO(path), HEAD_BYTES)
    except OSError as error:
        looked = "" if path.is_absolute() else f" (looked for {path.absolute()})"
        raise TraceError(
            path, f": {error.strerror}{looked}; the path of a JSONL, CSV or JSON trace is expected"
        ) from None


def numbered_lines(file: BufferedReader) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, without the byte order mark. Raises `BadLine` for an endless file."""
    read = 0
    for number in count(1):
        line = file.readline(MAX_LINE_BYTES + 1)
        if not line:
            return
        part = line
        while len(part) > MAX_LINE_BYTES and read <= MAX_FILE_BYTES:
            read += len(part)
            part = file.readline(MAX_LINE_BYTES + 1)
        read += len(part)
        if read > MAX_FILE_BYTES:
            raise BadLine("endless", f": longer than {MAX_FILE_BYTES} bytes")
        if number == 1:
            line = line.removeprefix(BOM)
        if len(line) > MAX_LINE_BYTES or line.strip():
            yield number, line


def time_s(field: str, value: float, per_s: float = 1.0) -> float:
    """`value` in seconds, when `per_s` of its units are one. Raises `BadLine`."""
    if not 0 <= value < float("inf"):
        raise BadLine("time", f"{field}: must be 0 or more, got {value}")
    return value / per_s


def length(field: str, value: int) -> int:
    """A number of tokens. Raises `BadLine`."""
    if not 1 <= value <= MAX_TOKENS:
        raise BadLine("length", f"{field}: must be from 1 to {MAX_TOKENS}, got {value}")
    return value
