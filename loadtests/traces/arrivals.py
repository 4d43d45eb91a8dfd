"""From the rows of a trace to requests that arrive: jitter, speed and block size."""

from __future__ import annotations

from itertools import accumulate
from random import Random

from msgspec import Struct

from kvroute.loadtests.traces.rows import Trace
from kvroute.loadtests.traces.workloads import SessionRow
from kvroute.types import KeyMode, PromptKeys, RequestView

PROCESSES = ("trace", "poisson", "gamma")
GAMMA_SHAPE = 0.25


class Arrival(Struct, frozen=True):
    """One request, and when it comes."""

    arrival_s: float
    view: RequestView
    keys: PromptKeys
    output_tokens: int


def arrivals(
    trace: Trace,
    block_tokens: int,
    speedup: float = 1.0,
    jitter_s: float = 0.0,
    seed: int = 0,
    process: str = "trace",
) -> list[Arrival]:
    """All rows in order of arrival, `speedup` times faster; each up to `jitter_s` (of the trace) later.

    Traces are often stamped by a coarse tick: without jitter a tick's requests would come as one burst.
    A `process` other than "trace" keeps the rows' order and mean rate, and draws the gaps: "poisson"
    exponential ones, "gamma" bursty ones (coefficient of variation 2). Blocks smaller than the trace's are
    made by cutting each into equal parts. ValueError for what is not understood.
    """
    if not 0 < speedup < float("inf"):
        raise ValueError(f"speedup must be positive, got {speedup}")
    if not 0 <= jitter_s < float("inf"):
        raise ValueError(f"jitter_s must be 0 or more, got {jitter_s}")
    parts, rest = divmod(trace.block_tokens, block_tokens)
    if rest or not parts:
        raise ValueError(
            f"block_tokens must divide the trace's blocks of {trace.block_tokens} tokens, got {block_tokens}"
        )
    made = []
    for row, arrival_s in zip(trace.rows, _times(trace, jitter_s, Random(seed), process), strict=True):
        blocks = row.input_tokens // block_tokens
        if parts == 1:
            keys = row.block_ids[:blocks]
        else:
            keys = tuple([id_ * parts + part for id_ in row.block_ids for part in range(parts)][:blocks])
        made.append(
            Arrival(
                arrival_s / speedup,
                RequestView(
                    session_id=row.session_id if isinstance(row, SessionRow) else None,
                    prompt_tokens=row.input_tokens,
                    stream=True,
                ),
                PromptKeys(KeyMode.TOKENS, keys, block_tokens, row.input_tokens),
                max(row.output_tokens, 1),
            )
        )
    made.sort(key=lambda arrival: arrival.arrival_s)
    return made


def _times(trace: Trace, jitter_s: float, source: Random, process: str) -> list[float]:
    """Of every row, in seconds at the trace's own rate."""
    if process == "trace":
        return [row.arrival_s + jitter_s * source.random() for row in trace.rows]
    if process not in PROCESSES:
        raise ValueError(f"unknown arrivals {process!r}; known: {', '.join(PROCESSES)}")
    first_s, last_s = trace.rows[0].arrival_s, trace.rows[-1].arrival_s
    mean_s = (last_s - first_s) / max(len(trace.rows) - 1, 1)
    shape = 1.0 if process == "poisson" else GAMMA_SHAPE
    if not mean_s:
        return [0.0] * len(trace.rows)
    return list(accumulate(source.gammavariate(shape, mean_s / shape) for _ in trace.rows))
