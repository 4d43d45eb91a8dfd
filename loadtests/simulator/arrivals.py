"""From the rows of a trace to requests that arrive: jitter, speed and block size."""

from __future__ import annotations

from random import Random

from msgspec import Struct

from kvroute.loadtests.plan.rows import Trace
from kvroute.loadtests.simulator.workloads import SessionRow
from kvroute.types import KeyMode, PromptKeys, RequestView


class Arrival(Struct, frozen=True):
    """One request, and when it comes."""

    arrival_s: float
    view: RequestView
    keys: PromptKeys
    output_tokens: int


def arrivals(
    trace: Trace, block_tokens: int, speedup: float = 1.0, jitter_s: float = 0.0, seed: int = 0
) -> list[Arrival]:
    """All rows in order of arrival, `speedup` times faster; each up to `jitter_s` (of the trace) later.

    Traces are often stamped by a coarse tick: without jitter a tick's requests would come as one burst.
    Blocks smaller than the trace's are made by cutting each into equal parts.
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
    late = Random(seed).random
    made = []
    for row in trace.rows:
        blocks = row.input_tokens // block_tokens
        if parts == 1:
            keys = row.block_ids[:blocks]
        else:
            keys = tuple([id_ * parts + part for id_ in row.block_ids for part in range(parts)][:blocks])
        made.append(
            Arrival(
                (row.arrival_s + jitter_s * late()) / speedup,
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
