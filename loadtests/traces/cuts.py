"""A trace's blocks cut anew: to an engine's block size, and for prompts so many times as long.

With block size B and scale S, block i of a trace covers the tokens [floor(i B S), floor((i + 1) B S)) of
the prompts that are sent. Ids are chained, so whoever shares k blocks shares floor(k B S) tokens, and of
blocks of b tokens exactly floor(floor(k B S) / b).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor

MAX_SCALE = 1000.0


class Cut:
    """From blocks of `trace_tokens` to blocks of `block_tokens`, prompts `scale` times as long.

    A new block is known by the last of the trace's blocks that it touches, and by which of that block's it
    is: equal keys if and only if equal prefixes. ValueError unless one block size divides the other evenly.
    """

    def __init__(self, trace_tokens: int, block_tokens: int, scale: float = 1.0) -> None:
        if block_tokens < 1 or trace_tokens % block_tokens:
            raise ValueError(
                f"block_tokens must divide the trace's blocks of {trace_tokens} tokens, got {block_tokens}"
            )
        if not 0 < scale <= MAX_SCALE:
            raise ValueError(f"scale must be above 0 and at most {MAX_SCALE:g}, got {scale}")
        self.trace_tokens = trace_tokens
        self.block_tokens = block_tokens
        self.scale = scale
        self._even = scale == 1
        # Uneven edges may give a block one more, and a partial block at a prompt's end is one more again.
        parts = trace_tokens * scale / block_tokens
        self.parts = floor(parts) if self._even else floor(parts) + 2
        """Of one of the trace's blocks, at most."""
        self._places: list[int] = []
        """Of each new block in a prompt: the last of the trace's blocks that it touches."""
        self._firsts: list[int] = []
        """And the first new block with the same."""

    def edge(self, index: int) -> int:
        """Tokens of a prompt before the trace's block `index`."""
        return floor(index * self.trace_tokens * self.scale)

    def length(self, tokens: int) -> int:
        """Of a prompt or an answer; at least 1."""
        return max(1, floor(tokens * self.scale))

    def full(self, block_ids: Sequence[int], tokens: int) -> tuple[int, ...]:
        """Keys of the full blocks of a prompt that has the trace's `block_ids` and, scaled, `tokens`."""
        blocks, parts = tokens // self.block_tokens, self.parts
        if self._even:
            if parts == 1:
                return tuple(block_ids[:blocks])
            return tuple([id_ * parts + part for id_ in block_ids for part in range(parts)][:blocks])
        self._reach(blocks)
        return tuple(
            [
                block_ids[place] * parts + index - first
                for index, place, first in zip(
                    range(blocks), self._places[:blocks], self._firsts[:blocks], strict=True
                )
            ]
        )

    def all(self, block_ids: Sequence[int], tokens: int) -> tuple[int, ...]:
        """The same, and of the partial block at the end if there is one."""
        keys = self.full(block_ids, tokens)
        blocks, rest = divmod(tokens, self.block_tokens)
        if not rest:
            return keys
        self._reach(blocks + 1)
        place = self._places[blocks]
        while self.edge(place) >= tokens:
            place -= 1
        index = blocks
        while index and self._places[index - 1] >= place:
            index -= 1
        return (*keys, block_ids[place] * self.parts + blocks - index)

    def _reach(self, blocks: int) -> None:
        """Know the places of so many blocks."""
        places, firsts = self._places, self._firsts
        while len(places) < blocks:
            place, end = places[-1] if places else 0, (len(places) + 1) * self.block_tokens
            while self.edge(place + 1) < end:
                place += 1
            firsts.append(firsts[-1] if places and place == places[-1] else len(places))
            places.append(place)
