"""Requests for a plan to look at: a trace file, or a small generated workload."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from operator import attrgetter
from pathlib import Path
from typing import Annotated

import msgspec

FILE_BLOCK_TOKENS = 512
GENERATED_BLOCK_TOKENS = 16
MAX_ROWS = 1_000_000
MAX_LINE_BYTES = 2**20


class _Line(msgspec.Struct):
    """A line of a Mooncake trace (FAST '25 release)."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]
    output_length: Annotated[int, msgspec.Meta(ge=0, le=10_000_000)]
    hash_ids: Annotated[list[int], msgspec.Meta(min_length=1)]


@dataclass(frozen=True, slots=True)
class Row:
    """One request. Block ids are chained: equal ids stand for equal tokens from the prompt's start on."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]
    """One for each block of the prompt, the last one perhaps partial."""


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    block_tokens: int
    rows: tuple[Row, ...]

    @property
    def prompts(self) -> list[tuple[int, tuple[int, ...]]]:
        return [(row.input_tokens, row.block_ids) for row in self.rows]


def read_trace(path: Path) -> Trace:
    """A JSONL file: timestamp in ms, input_length, output_length, hash_ids of 512-token blocks.

    ValueError names the file and line that does not fit.
    """
    decoder = msgspec.json.Decoder(_Line)
    rows: list[Row] = []
    try:
        with path.open("rb") as file:
            for number in count(1):
                line = file.readline(MAX_LINE_BYTES + 1)
                if not line:
                    break
                if line.strip():
                    rows.append(_row(decoder, line, f"--trace: {path}, line {number}"))
                if len(rows) > MAX_ROWS:
                    raise ValueError(f"--trace: {path}: more than {MAX_ROWS} requests")
    except OSError as error:
        raise ValueError(
            f"--trace: {path}: {error.strerror}; the path of a JSONL trace is expected"
        ) from None
    if not rows:
        raise ValueError(f"--trace: {path}: no requests; a line of JSON for each is expected")
    rows.sort(key=attrgetter("arrival_s"))
    return Trace(path.name, FILE_BLOCK_TOKENS, tuple(rows))


def _row(decoder: msgspec.json.Decoder[_Line], line: bytes, place: str) -> Row:
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"{place}: longer than {MAX_LINE_BYTES} bytes")
    try:
        read = decoder.decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(
            f"{place}: {error}; timestamp, input_length, output_length and hash_ids are expected"
        ) from None
    blocks = -(-read.input_length // FILE_BLOCK_TOKENS)
    if len(read.hash_ids) != blocks:
        raise ValueError(
            f"{place}: hash_ids: {len(read.hash_ids)} for {read.input_length} tokens; {blocks} blocks of "
            f"{FILE_BLOCK_TOKENS} tokens are expected"
        )
    return Row(read.timestamp / 1e3, read.input_length, read.output_length, tuple(read.hash_ids))


def generated(seed: int = 0, sessions: int = 60) -> Trace:
    """Chats of one to six turns on four system prompts, half of them about a document; a third as many long
    prompts that never return. The same rows for the same seed.
    """
    source, fresh = random.Random(seed), count()
    systems = [[next(fresh) for _ in range(1500 // GENERATED_BLOCK_TOKENS)] for _ in range(4)]
    rows: list[Row] = []
    for _ in range(sessions):
        rows += _chat(source, fresh, source.choice(systems))
    for _ in range(sessions // 3):
        tokens = source.randrange(8_000, 40_000)
        blocks = -(-tokens // GENERATED_BLOCK_TOKENS)
        ids = tuple(next(fresh) for _ in range(blocks))
        rows.append(Row(source.uniform(0, 900), tokens, source.randrange(50, 400), ids))
    return Trace("generated", GENERATED_BLOCK_TOKENS, tuple(sorted(rows, key=lambda row: row.arrival_s)))


def _chat(source: random.Random, fresh: Iterator[int], system: list[int]) -> Iterator[Row]:
    """Every turn repeats all that was said before it, answers too."""
    full_ids = list(system)
    tokens = len(system) * GENERATED_BLOCK_TOKENS + source.choice((0, source.randrange(2_000, 12_000)))
    arrival_s = source.uniform(0, 600)
    for _ in range(source.randrange(1, 7)):
        tokens += source.randrange(30, 300)
        while len(full_ids) < tokens // GENERATED_BLOCK_TOKENS:
            full_ids.append(next(fresh))
        tail = (next(fresh),) if tokens % GENERATED_BLOCK_TOKENS else ()
        output_tokens = source.randrange(50, 600)
        yield Row(arrival_s, tokens, output_tokens, (*full_ids, *tail))
        tokens += output_tokens
        arrival_s += source.expovariate(1 / 60)
