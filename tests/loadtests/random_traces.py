"""Random traces, and what two prompts of one share."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from kvroute.loadtests.traces.cuts import Cut
from kvroute.loadtests.traces.rows import Row, Trace


def random_trace(source: Random, block_tokens: int, requests: int = 12) -> Trace:
    """Prompts that leave each other after any number of blocks, chained as those of real traces."""
    rows: list[Row] = []
    fresh = iter(range(10**6))
    for number in range(requests):
        ids: tuple[int, ...] = ()
        if rows and source.random() < 0.8:
            before = source.choice(rows)
            full = before.input_tokens // block_tokens
            ids = before.block_ids[: source.randrange(full + 1)]
        tokens = len(ids) * block_tokens + source.randrange(1, 5 * block_tokens)
        blocks = -(-tokens // block_tokens)
        ids = (*ids, *(next(fresh) for _ in range(blocks - len(ids))))
        rows.append(Row(float(number), tokens, source.randrange(1, 50), ids))
    return Trace("random", block_tokens, tuple(rows))


def shared(one: Sequence[object], other: Sequence[object]) -> int:
    """How many leading items are equal."""
    for count, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return count
    return min(len(one), len(other))


def in_common(one: Row, other: Row, cut: Cut) -> int:
    """Tokens that their prompts share by the trace."""
    tokens = min(cut.length(one.input_tokens), cut.length(other.input_tokens))
    return min(tokens, cut.edge(shared(one.block_ids, other.block_ids)))
