"""The chats that a plan looks at when it is given no trace."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from random import Random

from kvroute.loadtests.traces.rows import Row, Trace

BLOCK_TOKENS = 16


def generated(seed: int = 0, sessions: int = 60) -> Trace:
    """Chats of one to six turns on four system prompts, half of them about a document; a third as many long
    prompts that never return. The same rows for the same seed.
    """
    source, fresh = Random(seed), count()
    systems = [[next(fresh) for _ in range(1500 // BLOCK_TOKENS)] for _ in range(4)]
    rows: list[Row] = []
    for _ in range(sessions):
        rows += _chat(source, fresh, source.choice(systems))
    for _ in range(sessions // 3):
        tokens = source.randrange(8_000, 40_000)
        blocks = -(-tokens // BLOCK_TOKENS)
        ids = tuple(next(fresh) for _ in range(blocks))
        rows.append(Row(source.uniform(0, 900), tokens, source.randrange(50, 400), ids))
    return Trace("generated", BLOCK_TOKENS, tuple(sorted(rows, key=lambda row: row.arrival_s)))


def _chat(source: Random, fresh: Iterator[int], system: list[int]) -> Iterator[Row]:
    """Every turn repeats all that was said before it, answers too."""
    full_ids = list(system)
    tokens = len(system) * BLOCK_TOKENS + source.choice((0, source.randrange(2_000, 12_000)))
    arrival_s = source.uniform(0, 600)
    for _ in range(source.randrange(1, 7)):
        tokens += source.randrange(30, 300)
        while len(full_ids) < tokens // BLOCK_TOKENS:
            full_ids.append(next(fresh))
        tail = (next(fresh),) if tokens % BLOCK_TOKENS else ()
        output_tokens = source.randrange(50, 600)
        yield Row(arrival_s, tokens, output_tokens, (*full_ids, *tail))
        tokens += output_tokens
        arrival_s += source.expovariate(1 / 60)
