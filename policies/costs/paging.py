"""Blocks: what a paged allocator takes for sequences, and how many of them fit.

A sequence of S tokens takes ceil(S / b) blocks of b tokens. `rank` is always the geometry of one rank and
`memory_bytes` the memory for KV on that rank: it is the fullest rank that says no.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvroute.policies.costs.geometry import Attention, KvGeometry


def blocks_of(tokens: int, block_tokens: int) -> int:
    """ceil(S / b). ValueError if negative, or if a block has no tokens."""
    if tokens < 0:
        raise ValueError(f"tokens: {tokens} is negative; 0 or more is expected")
    if block_tokens < 1:
        raise ValueError(f"block_tokens: {block_tokens} is not above 0; 1 or more is expected")
    return -(-tokens // block_tokens)


def allocated_tokens(tokens: int, block_tokens: int) -> int:
    return blocks_of(tokens, block_tokens) * block_tokens


def tail_waste_tokens(tokens: int, block_tokens: int) -> int:
    return allocated_tokens(tokens, block_tokens) - tokens


def mean_tail_waste_tokens(block_tokens: int) -> float:
    """Of one sequence, if lengths fall evenly into the last block."""
    return (block_tokens - 1) / 2


def paged_bytes(rank: KvGeometry, tokens: int, block_tokens: int) -> int:
    """What one sequence takes on this rank, tail waste included.

    A window layer keeps the blocks its window touches: it may begin within a block, so one more than the
    window fills (vLLM 0.32, `SlidingWindowSpec`; what it holds for a prefill's tokens in flight is not
    counted). States take what they are; engines pad them to a page.
    """
    attention = (layer.attention for layer in rank.layers if layer.attention)
    kept = sum(_kept_blocks(layer, tokens, block_tokens) * layer.bytes_per_token for layer in attention)
    return kept * block_tokens + (rank.state_bytes if tokens else 0)


def _kept_blocks(layer: Attention, tokens: int, block_tokens: int) -> int:
    blocks = blocks_of(tokens, block_tokens)
    if layer.window_tokens is None:
        return blocks
    return min(blocks, blocks_of(layer.window_tokens - 1, block_tokens) + 1)


def token_slots(ranks: Sequence[KvGeometry], memory_bytes: int) -> int | None:
    """Tokens that fit when each costs `bytes_per_token`; None if the model keeps nothing per token.

    The stage with the most bytes per token bounds all. This is not a number of requests: each takes whole
    blocks and grows. With windows it is a lower bound, for window layers soon stop growing.
    """
    per_token = max(rank.bytes_per_token for rank in ranks)
    return memory_bytes // per_token if per_token else None


def sequences_that_fit(ranks: Sequence[KvGeometry], memory_bytes: int, tokens: int, block_tokens: int) -> int:
    """Sequences of `tokens` each that fit at the same time, in whole blocks, on the fullest stage."""
    most = max(paged_bytes(rank, tokens, block_tokens) for rank in ranks)
    return memory_bytes // most if most else 0


def steps_that_fit(
    ranks: Sequence[KvGeometry],
    memory_bytes: int,
    sequences: int,
    tokens: int,
    block_tokens: int,
    most_steps: int,
) -> int | None:
    """Decode steps, up to `most_steps`, that `sequences` of `tokens` make together before one must yield.

    None if they do not even fit at the start.
    """

    def fit(steps: int) -> bool:
        return sequences <= sequences_that_fit(ranks, memory_bytes, tokens + steps, block_tokens)

    return _last_that(fit, most_steps) if fit(0) else None


def _last_that(holds: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` for which `holds`, which is true at 0 and never again once false."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low
