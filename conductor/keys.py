"""Chained 64-bit routing keys of a prompt's blocks.

    key[i] = xxh3_64(block i, seed = key[i - 1])        key[-1] = namespace_key(...)

Equal keys mean equal prefixes in equal namespaces. A collision costs time, never correctness: the engine
checks its own cache. The keys are the same in every process, on every machine and in every version that
keeps `VERSION`; the tests pin vectors.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache
from struct import Struct

from xxhash import xxh3_64_intdigest

from kvroute.types import KeyMode, PromptKeys

VERSION = b"kvroute/routing-key/1"
BYTES_PER_TOKEN = 4
"""English text is near 4 bytes a token; only proportions matter to whoever compares prompts and matches."""

TOKEN_ID_BYTES = 4


def namespace_key(
    model: str | None = None,
    adapter: str | None = None,
    cache_salt: str | None = None,
    extra_key: str | None = None,
    domain: str = "text",
) -> int:
    """Root of the chain: what must be equal before any block can be.

    Every given part goes in with its own tag and its length, so a LoRA named "x" is not a salt "x", parts
    cannot run into each other, and an empty part is not an absent one. `domain` says what the blocks are
    made of (rendered chat, plain text, token ids).
    """
    packed = [VERSION]
    for tag, part in ((b"d", domain), (b"m", model), (b"a", adapter), (b"s", cache_salt), (b"x", extra_key)):
        if part is not None:
            data = part.encode("utf-8", "surrogatepass")
            packed += (tag, len(data).to_bytes(8, "little"), data)
    return xxh3_64_intdigest(b"".join(packed))


def byte_keys(prompt: bytes, root: int, chunk_bytes: int) -> PromptKeys:
    """Keys of the full chunks of canonical prompt bytes; the tail has none, so a longer prompt extends it.

    Token counts are estimates at `BYTES_PER_TOKEN`.
    """
    return PromptKeys(
        KeyMode.BYTES,
        _chain(prompt, root, chunk_bytes),
        block_tokens=max(1, chunk_bytes // BYTES_PER_TOKEN),
        prompt_tokens=-(-len(prompt) // BYTES_PER_TOKEN),
    )


def token_keys(ids: Sequence[int] | bytes, root: int, block_size_tokens: int) -> PromptKeys:
    """Keys of the full blocks of exact token ids, given as integers or as packed little-endian uint32.

    Raises `ValueError` when an id is not an unsigned 32-bit integer or packed ids end within one.
    """
    packed = ids if isinstance(ids, bytes) else pack_ids(ids)
    if len(packed) % TOKEN_ID_BYTES:
        raise ValueError(f"packed token ids are {len(packed)} bytes, not a multiple of {TOKEN_ID_BYTES}")
    return PromptKeys(
        KeyMode.TOKENS,
        _chain(packed, root, block_size_tokens * TOKEN_ID_BYTES),
        block_tokens=block_size_tokens,
        prompt_tokens=len(packed) // TOKEN_ID_BYTES,
    )


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32; `ValueError` when one does not fit."""
    try:
        packed = array("I", ids)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids must be integers from 0 to 2**32 - 1: {error}") from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


@lru_cache(maxsize=64)
def _blocks(block_bytes: int) -> Struct:
    if block_bytes < 1:
        raise ValueError(f"a block must be at least 1 byte, not {block_bytes}")
    return Struct(f"{block_bytes}s")


def _chain(data: bytes, root: int, block_bytes: int) -> list[int]:
    blocks = _blocks(block_bytes)
    full = memoryview(data)[: len(data) - len(data) % block_bytes]
    key = root
    return [key := xxh3_64_intdigest(block, key) for (block,) in blocks.iter_unpack(full)]
