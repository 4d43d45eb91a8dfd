"""Blocks of token ids, numbered in the order in which they are first seen."""

from __future__ import annotations

from kvroute.conductor.keys import TOKEN_ID_BYTES, chain_keys


class BlockNumbers:
    """Equal prefixes get equal numbers. 100 bytes for each different block, as long as a file is read."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._numbers: dict[int, int] = {}

    def ids(self, packed_ids: bytes) -> tuple[int, ...]:
        """Of a prompt of packed token ids; one more for a partial block at its end."""
        keys = chain_keys(packed_ids, 0, self.block_tokens)
        rest = packed_ids[len(keys) * self.block_tokens * TOKEN_ID_BYTES :]
        if rest:
            keys += chain_keys(rest, keys[-1] if keys else 0, len(rest) // TOKEN_ID_BYTES)
        numbers = self._numbers
        return tuple([numbers.setdefault(key, len(numbers)) for key in keys])
