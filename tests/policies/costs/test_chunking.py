"""Chunk sizes over prompts: what is stored, found and lost, by hand and against a plain rendering."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.policies.costs.chunking import (
    ChunkFigures,
    Prompt,
    Store,
    StoredPrefixes,
    check_chunk,
    chunk_figures,
    shared_tokens,
)
from kvroute.policies.costs.links import Link, Overlap
from kvroute.policies.costs.speeds import Speed

SPEED = Speed(0, 0, 1.0, 0, 0, 0, 0, kv_tokens=0, kv_bytes_per_token=1000)  # a millisecond a token
STORE = Store(Link(1e6, 0.010), bytes_per_token=100, object_s=0.001)  # 0.1 ms a token


def figures(prompts: list[Prompt], chunk_tokens: int, store: Store = STORE) -> ChunkFigures:
    return chunk_figures(prompts, 512, chunk_tokens, store, SPEED)


def test_two_prompts_by_hand() -> None:
    # The second shares two blocks with the first, and of chunks of 768 tokens one.
    result = figures([(1600, [1, 2, 3, 4]), (2000, [1, 2, 5, 6])], 768)
    assert (result.prompts, result.input_tokens) == (2, 3600)
    assert result.usable_tokens == 768
    assert result.tail_tokens == (1600 - 1536) + (2000 - 1536)
    assert result.objects == 2 + 1
    assert result.stored_bytes == 3 * 768 * 100
    assert result.metadata_bytes == 3 * 256
    assert result.hashes == 2 + 2
    assert result.rpcs == 2 + 1 + 3  # lookups, one read, three writes
    assert result.loads == 1
    # 10 ms, then 1 ms for the object and 76.8 ms on the wire.
    assert result.load_mean_s == pytest.approx(0.0878)
    assert result.ttft_mean_s == pytest.approx((1.6 + 0.0878 + 1.232) / 2)
    assert result.ttft_p99_s == pytest.approx(1.6)


def test_what_prompts_share_is_known_to_the_token_where_the_blocks_are_the_same() -> None:
    # Two blocks; then all but the last token of the same prompt; then nothing.
    assert shared_tokens([(1600, [1, 2, 3, 4]), (2000, [1, 2, 5, 6])], 512) == 1024
    assert shared_tokens([(1600, [1, 2, 3, 4]), (1600, [1, 2, 3, 4])], 512) == 1599
    assert shared_tokens([(1600, [1, 2, 3, 4]), (600, [5, 6])], 512) == 0


def test_the_last_token_is_never_taken_from_the_store() -> None:
    # The same prompt again: all its chunks are stored, but the last one holds the token to be computed.
    result = figures([(1024, [1, 2]), (1024, [1, 2])], 256)
    assert result.usable_tokens == 768
    assert result.objects == 4
    assert figures([(1025, [1, 2, 3]), (1025, [1, 2, 3])], 256).usable_tokens == 1024


def test_what_is_slower_to_fetch_is_computed() -> None:
    prompts: list[Prompt] = [(1024, [1, 2]), (1024, [1, 7])]
    slow = figures(prompts, 512, replace(STORE, link=Link(90.0 * 1e3, 0.010)))
    assert (slow.usable_tokens, slow.loads, slow.load_mean_s) == (512, 0, 0)
    assert slow.ttft_mean_s == pytest.approx(1.024)
    assert slow.rpcs == 2 + 0 + 3


def test_many_small_objects_load_longer_than_few_large_ones() -> None:
    small, large = (STORE.load_s(4096, 4096 // chunk) for chunk in (16, 1024))
    assert small - large == pytest.approx((256 - 4) * 0.001)
    assert STORE.load_s(0, 0) == 0


def test_further_stages_overlap_or_not() -> None:
    store = replace(STORE, after=(Link(2e6),))
    # Four chunks of 25.6 ms + 1 ms on the wire, and 12.8 ms each to the GPU.
    assert store.load_s(1024, 4) == pytest.approx(0.010 + 4 * 0.0266 + 0.0128)
    serial = replace(store, overlap=Overlap.SERIAL)
    assert serial.load_s(1024, 4) == pytest.approx(0.010 + 4 * (0.0266 + 0.0128))


@pytest.mark.parametrize(
    ("chunk", "page", "near"), [(24, 16, "16 or 32"), (8, 16, "16"), (0, 16, "16"), (100, 64, "64 or 128")]
)
def test_chunks_of_broken_pages_are_refused(chunk: int, page: int, near: str) -> None:
    with pytest.raises(ValueError, match=rf"chunk: {chunk} tokens are not whole pages.*such as {near}$"):
        check_chunk(chunk, page)


def test_whole_pages_are_accepted_and_a_page_has_tokens() -> None:
    check_chunk(48, 16)
    with pytest.raises(ValueError, match="page: 0 is not above 0"):
        check_chunk(16, 0)


def test_no_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="prompts: none"):
        figures([], 512)


def _prompts(seed: int, block_tokens: int) -> list[tuple[list[int], list[int]]]:
    """Token lists that share prefixes, with the chained ids of their blocks."""
    source, ids = random.Random(seed), {}
    drawn: list[tuple[list[int], list[int]]] = []
    for _ in range(12):
        base = source.choice(drawn)[0] if drawn and source.random() < 0.8 else []
        kept = base[: source.randrange(0, len(base) + 1)]
        tokens = kept + [source.randrange(2) for _ in range(source.randrange(1, 40))]
        ends = [*range(block_tokens, len(tokens), block_tokens), len(tokens)]
        drawn.append((tokens, [ids.setdefault(tuple(tokens[:end]), len(ids)) for end in ends]))
    return drawn


@given(st.integers(0, 2**32), st.integers(1, 12), st.sampled_from([1, 2, 4, 8, 16]))
def test_prefixes_are_found_as_in_a_plain_set_of_chunks(seed: int, chunk_tokens: int, parts: int) -> None:
    # Chunks of whole blocks, for which the trace tells all there is.
    chunk_tokens *= parts
    block_tokens = parts
    stored, plain = StoredPrefixes(chunk_tokens, block_tokens), set()
    for tokens, block_ids in _prompts(seed, block_tokens):
        ends = range(chunk_tokens, len(tokens) + 1, chunk_tokens)
        found = 0
        for end in ends:
            if end == len(tokens) or tuple(tokens[:end]) not in plain:
                break
            found = end
        assert stored.match((len(tokens), block_ids)) == found
        before = len(plain)
        plain.update(tuple(tokens[:end]) for end in ends)
        assert stored.store((len(tokens), block_ids)) == len(plain) - before


@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(2, 5))
def test_a_multiple_of_a_chunk_size_never_finds_more_nor_names_more(
    seed: int, chunk: int, factor: int
) -> None:
    prompts = [(len(tokens), ids) for tokens, ids in _prompts(seed, 8)]
    small, large = (chunk_figures(prompts, 8, size, STORE, SPEED) for size in (chunk, chunk * factor))
    assert large.usable_tokens <= small.usable_tokens
    assert large.objects <= small.objects
    assert large.hashes <= small.hashes
    assert large.tail_tokens >= small.tail_tokens
    assert small.usable_tokens <= shared_tokens(prompts, 8)
