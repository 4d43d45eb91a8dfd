"""How large the chunks should be in which KV is stored, named and fetched.

Small chunks reuse more of a shared prefix and leave less of a prompt's tail unstored; each costs a key, an
RPC, metadata and a completion. Large chunks spread those costs and lose what does not fill them. A chunk is
whole engine pages, since that is what an engine can hand over.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvroute.policies.costs.breakeven import Prefill
from kvroute.policies.costs.links import Link, Overlap, Stage, path_s

Prompt = tuple[int, Sequence[int]]
"""Tokens of a prompt, and its chained block ids: an id stands for all tokens up to its block's end."""


@dataclass(frozen=True, slots=True)
class Store:
    """A store without bounds, and the way from it to the GPU."""

    link: Link
    bytes_per_token: int
    object_s: float = 50e-6
    """Of each object read, whatever its size: key, RPC, completion. The link's latency is once per prompt."""
    metadata_bytes: int = 256
    """Kept for each object."""
    after: tuple[Stage, ...] = ()
    """Further stages of a load: CPU to GPU, layout."""
    overlap: Overlap = Overlap.PIPELINED

    def load_s(self, tokens: int, chunks: int) -> float:
        """Seconds to fetch so many tokens in so many chunks, alone; 0 for none."""
        if not chunks:
            return 0.0
        per_chunk = replace(self.link, latency_s=self.object_s)
        way_s = path_s(
            (per_chunk, *self.after), tokens * self.bytes_per_token, overlap=self.overlap, chunks=chunks
        )
        return self.link.latency_s + way_s


@dataclass(frozen=True, slots=True)
class ChunkFigures:
    """A chunk size over all prompts of a trace in order, each stored after it was served."""

    chunk_tokens: int
    prompts: int
    input_tokens: int
    usable_tokens: int
    """Of prefixes found in the store, in whole chunks."""
    tail_tokens: int
    """At the ends of prompts, too few for a chunk: never stored."""
    objects: int
    stored_bytes: int
    metadata_bytes: int
    hashes: int
    """Keys computed: every full chunk of every prompt."""
    rpcs: int
    """One lookup for each prompt, one call for each chunk read or written."""
    loads: int
    """Prompts for which fetching beat computing; the others' prefixes were computed again."""
    load_mean_s: float
    """Of those loads."""
    ttft_mean_s: float
    """Load and prefill, alone: no queue, no network of the client."""
    ttft_p99_s: float


def check_chunk(chunk_tokens: int, page_tokens: int) -> None:
    """ValueError unless a chunk is whole pages of the engine."""
    if page_tokens < 1:
        raise ValueError(f"page: {page_tokens} is not above 0; the engine's tokens per page are expected")
    if chunk_tokens < page_tokens or chunk_tokens % page_tokens:
        below = chunk_tokens // page_tokens * page_tokens
        near = f"{below} or {below + page_tokens}" if below else f"{page_tokens}"
        raise ValueError(
            f"chunk: {chunk_tokens} tokens are not whole pages of {page_tokens} tokens; a multiple of "
            f"{page_tokens} is expected, such as {near}"
        )


class StoredPrefixes:
    """Which chunks are stored, each with all chunks before it. One number for each block of a trace.

    In each block of the trace the last stored chunk's end is kept, since whatever ends in a block is named by
    the block's id and the place.
    """

    def __init__(self, chunk_tokens: int, block_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._block_tokens = block_tokens
        self._stored_to: dict[int, int] = {}

    def match(self, prompt: Prompt) -> int:
        """Leading tokens that are stored, in whole chunks and without the prompt's last token."""
        tokens, block_ids = prompt
        found = 0
        for index, block_id in enumerate(block_ids):
            end = self._last_end(index, tokens - 1)
            if end <= index * self._block_tokens:
                continue  # No chunk ends in this block: the next one decides.
            stored_to = min(self._stored_to.get(block_id, 0), end)
            found = max(found, stored_to)
            if stored_to < end:
                break
        return found

    def store(self, prompt: Prompt) -> int:
        """Store all full chunks; returns how many were new."""
        tokens, block_ids = prompt
        new = 0
        for index, block_id in enumerate(block_ids):
            start, end = index * self._block_tokens, self._last_end(index, tokens)
            before = max(start, self._stored_to.get(block_id, start))
            if end > before:
                self._stored_to[block_id] = end
                new += end // self._chunk_tokens - before // self._chunk_tokens
        return new

    def _last_end(self, block_index: int, tokens: int) -> int:
        """Where the last chunk ends that ends in this block or before it."""
        reach = min((block_index + 1) * self._block_tokens, tokens)
        return reach // self._chunk_tokens * self._chunk_tokens


def shared_tokens(prompts: Iterable[Prompt], block_tokens: int) -> int:
    """Tokens that prompts share with earlier ones, as far as the trace tells: what no chunk size exceeds."""
    stored = StoredPrefixes(1, block_tokens)
    shared = 0
    for prompt in prompts:
        shared += stored.match(prompt)
        stored.store(prompt)
    return shared


def chunk_figures(
    prompts: Iterable[Prompt], block_tokens: int, chunk_tokens: int, store: Store, speed: Prefill
) -> ChunkFigures:
    """Play the prompts through a store of such chunks. ValueError if there are none.

    `block_tokens` is the trace's resolution: sharing within a block is not seen, so for smaller chunks what
    is usable is a lower bound.
    """
    stored = StoredPrefixes(chunk_tokens, block_tokens)
    input_tokens = usable = tail = objects = hashes = reads = 0
    loads_s, ttfts_s = [], []
    for prompt in prompts:
        tokens = prompt[0]
        found = stored.match(prompt)
        load_s = store.load_s(found, found // chunk_tokens)
        cold_s, fetched_s = speed.prefill_s(tokens), load_s + speed.prefill_s(tokens - found, found)
        if found and fetched_s < cold_s:
            loads_s.append(load_s)
            reads += found // chunk_tokens
        ttfts_s.append(min(cold_s, fetched_s))
        input_tokens += tokens
        usable += found
        tail += tokens % chunk_tokens
        hashes += tokens // chunk_tokens
        objects += stored.store(prompt)
    if not ttfts_s:
        raise ValueError("prompts: none; at least one is expected")
    return ChunkFigures(
        chunk_tokens=chunk_tokens,
        prompts=len(ttfts_s),
        input_tokens=input_tokens,
        usable_tokens=usable,
        tail_tokens=tail,
        objects=objects,
        stored_bytes=objects * chunk_tokens * store.bytes_per_token,
        metadata_bytes=objects * store.metadata_bytes,
        hashes=hashes,
        rpcs=len(ttfts_s) + reads + objects,
        loads=len(loads_s),
        load_mean_s=sum(loads_s) / max(1, len(loads_s)),
        ttft_mean_s=sum(ttfts_s) / len(ttfts_s),
        ttft_p99_s=sorted(ttfts_s)[math.ceil(0.99 * len(ttfts_s)) - 1],
    )
