"""Chained block keys, as an engine hashes them for itself: they differ from engine to engine."""

from __future__ import annotations

from array import array
from struct import Struct

import xxhash


def root_key(hash_seed: int, lora: str | None, salt: str | None) -> int:
    """Where the chain of a prompt starts; adapter and salt are tagged, so equal names stay apart."""
    root = hash_seed
    if lora is not None:
        root = xxhash.xxh3_64_intdigest(b"lora\0" + lora.encode(), root)
    if salt is not None:
        root = xxhash.xxh3_64_intdigest(b"salt\0" + salt.encode(), root)
    return root


def block_keys(tokens: array[int], block_tokens: int, root: int) -> list[int]:
    """64-bit keys of the full blocks of `tokens`, each over its own tokens and everything before."""
    size = block_tokens * tokens.itemsize
    whole = len(tokens) // block_tokens * size
    digest = xxhash.xxh3_64_intdigest
    view = memoryview(tokens.tobytes())[:whole]
    return [root := digest(block, root) for (block,) in Struct(f"{size}s").iter_unpack(view)]
