"""From the rows of a trace to requests that arrive: jitter, speed, length and block size."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import accumulate, repeat
from random import Random

from msgspec import Struct

from kvroute.loadtests.traces.cuts import Cut
from kvroute.loadtests.traces.rows import Row, Trace
from kvroute.types import KeyMode, PromptKeys, RequestView

PROCESSES = ("trace", "poisson", "gamma")
GAMMA_SHAPE = 0.25


class Arrival(Struct, frozen=True, gc=False):
    """One request, and when it comes."""

    arrival_s: float
    view: RequestView
    keys: PromptKeys
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    """As the trace has them, the last one perhaps partial: what a prompt is made from."""


def arriving(
    trace: Trace,
    block_tokens: int,
    speedup: float = 1.0,
    jitter_s: float = 0.0,
    seed: int = 0,
    process: str = "trace",
    scale: float = 1.0,
) -> Iterator[Arrival]:
    """All rows in order of arrival, `speedup` times faster; each up to `jitter_s` (of the trace) later.

    Traces are often stamped by a coarse tick: without jitter a tick's requests would come as one burst.
    A `process` other than "trace" keeps the rows' order and mean rate, and draws the gaps: "poisson"
    exponential ones, "gamma" bursty ones (coefficient of variation 2). Blocks smaller than the trace's are
    made by cutting each into parts; `scale` multiplies lengths of prompts and answers, and keeps who shares
    what (`cuts.Cut`). Holds no more than the rows of one jitter window.
    ValueError, at once, for what is not understood.
    """
    if not 0 < speedup < float("inf"):
        raise ValueError(f"speedup must be positive, got {speedup}")
    if not 0 <= jitter_s < float("inf"):
        raise ValueError(f"jitter_s must be 0 or more, got {jitter_s}")
    if process not in PROCESSES:
        raise ValueError(f"unknown arrivals {process!r}; known: {', '.join(PROCESSES)}")
    cut = Cut(trace.block_tokens, block_tokens, scale)
    source = Random(seed)
    timed = _jittered(trace, jitter_s, source) if process == "trace" else _drawn(trace, source, process)
    return (_arrival(row, at_s / speedup, cut) for at_s, row in timed)


def arrivals(
    trace: Trace,
    block_tokens: int,
    speedup: float = 1.0,
    jitter_s: float = 0.0,
    seed: int = 0,
    process: str = "trace",
    scale: float = 1.0,
) -> list[Arrival]:
    """`arriving`, all at once: for some ten thousand requests, 40 bytes for each block."""
    return list(arriving(trace, block_tokens, speedup, jitter_s, seed, process, scale))


def _arrival(row: Row, arrival_s: float, cut: Cut) -> Arrival:
    tokens = cut.length(row.input_tokens)
    return Arrival(
        arrival_s,
        RequestView(session_id=row.session_id, prompt_tokens=tokens, stream=True),
        PromptKeys(KeyMode.TOKENS, cut.full(row.block_ids, tokens), cut.block_tokens, tokens),
        cut.length(row.output_tokens),
        row.block_ids,
    )


def _jittered(trace: Trace, jitter_s: float, source: Random) -> Iterator[tuple[float, Row]]:
    """Every row when it comes. One waits until no later row can come before it."""
    waiting: list[tuple[float, int, Row]] = []
    for number, row in enumerate(trace.rows):
        while waiting and waiting[0][0] <= row.arrival_s:
            at_s, _, due = heappop(waiting)
            yield at_s, due
        heappush(waiting, (row.arrival_s + jitter_s * source.random(), number, row))
    while waiting:
        at_s, _, due = heappop(waiting)
        yield at_s, due


def _drawn(trace: Trace, source: Random, process: str) -> Iterator[tuple[float, Row]]:
    first_s, last_s = trace.rows[0].arrival_s, trace.rows[-1].arrival_s
    mean_s = (last_s - first_s) / max(len(trace.rows) - 1, 1)
    shape = 1.0 if process == "poisson" else GAMMA_SHAPE
    gaps = (source.gammavariate(shape, mean_s / shape) if mean_s else 0.0 for _ in repeat(None))
    return zip(accumulate(gaps), trace.rows, strict=False)
