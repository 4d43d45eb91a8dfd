"""Logs of real engines: what each request asked for, and when its tokens came."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from kvroute.loadtests.results.measured import Measured
from kvroute.loadtests.traces.arrivals import Arrival, arrivals
from kvroute.loadtests.traces.reading import read_trace
from kvroute.loadtests.traces.rows import Row, Rows, Trace

VLLM_BLOCK_TOKENS = 16
MAX_REQUESTS = 1_000_000


@dataclass(frozen=True, slots=True)
class EngineLog:
    """Requests in order of arrival, as they came, and each one's measured times."""

    requests: list[Arrival]
    measured: list[Measured]
    block_tokens: int


class _Timed(msgspec.Struct, gc=False):
    """A line of vLLM's metrics by request: `arrival_time` by the wall clock, the others monotonic seconds."""

    input_toks: int
    output_toks: int
    arrival_time: float
    queued_ts: float
    first_token_ts: float
    last_token_ts: float


def read_vllm_log(prompts: Path, requests: Path, block_tokens: int = VLLM_BLOCK_TOKENS) -> EngineLog:
    """`prompts`: JSONL with token ids; `requests`: JSONL with vLLM's times, line by line the same.

    The two clocks are laid together where the way from arrival to the engine's queue was shortest. Seconds
    count from the first arrival. ValueError names file, line and what was expected.
    """
    trace = read_trace(prompts, "token_ids", block_tokens=block_tokens)
    timed = _read(requests)
    if len(timed) != len(trace.rows):
        raise ValueError(f"{requests}: {len(timed)} lines for the {len(trace.rows)} prompts of {prompts}")
    clocks_s = min(one.queued_ts - one.arrival_time for one in timed)
    begun_s = min(one.arrival_time for one in timed)
    rows, measured = Rows(), []
    for number, row, one in zip(count(1), trace.rows, timed):
        if row.input_tokens != one.input_toks:
            raise ValueError(
                f"{requests}: line {number}: input_toks: {one.input_toks}, "
                f"but the prompt has {row.input_tokens}"
            )
        at_s, zero_s = one.arrival_time - begun_s, begun_s + clocks_s
        rows.add(Row(at_s, row.input_tokens, one.output_toks, row.block_ids))
        measured.append(
            Measured(
                at_s,
                one.input_toks,
                one.output_toks,
                first_s=one.first_token_ts - zero_s,
                end_s=one.last_token_ts - zero_s,
            )
        )
    rows.sort()
    measured.sort(key=lambda one: one.arrival_s)
    sent = Trace(str(prompts), block_tokens, rows)
    return EngineLog(arrivals(sent, block_tokens), measured, block_tokens)


def _read(path: Path) -> list[_Timed]:
    decode: Any = msgspec.json.Decoder(_Timed).decode
    timed = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if number > MAX_REQUESTS:
                raise ValueError(f"{path}: more than {MAX_REQUESTS} lines")
            try:
                timed.append(decode(line))
            except msgspec.DecodeError as error:
                raise ValueError(f"{path}: line {number}: {error}") from None
    if not timed:
        raise ValueError(f"{path}: empty; a line of JSON for every request is expected")
    return timed
