"""Blocks and what fits: worked by hand, then what must hold for any length and block."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.policies.costs import paging
from kvroute.policies.costs.architectures import read_config
from kvroute.policies.costs.geometry import KV_DTYPES, Attention, KvGeometry, Layer, State
from tests.policies.costs import published as p

GIB = 2**30
LLAMA = read_config(p.LLAMA_3_8B)
BYTE = Attention(1, 1, 0, KV_DTYPES["int8"])


def made(*layers: Layer) -> KvGeometry:
    return KvGeometry("made", 1, layers)


@pytest.mark.parametrize(
    ("tokens", "blocks", "waste"), [(0, 0, 0), (1, 1, 15), (16, 1, 0), (17, 2, 15), (40, 3, 8)]
)
def test_whole_blocks_and_the_waste_of_the_last(tokens: int, blocks: int, waste: int) -> None:
    assert paging.blocks_of(tokens, 16) == blocks
    assert paging.allocated_tokens(tokens, 16) == blocks * 16
    assert paging.tail_waste_tokens(tokens, 16) == waste


def test_the_mean_waste_is_that_of_all_tails() -> None:
    for block in (1, 16, 64):
        tails = [paging.tail_waste_tokens(tokens, block) for tokens in range(1, block + 1)]
        assert paging.mean_tail_waste_tokens(block) == sum(tails) / block == (block - 1) / 2


def test_wrong_lengths_and_blocks_are_named() -> None:
    with pytest.raises(ValueError, match="tokens: -1 is negative"):
        paging.blocks_of(-1, 16)
    with pytest.raises(ValueError, match="block_tokens: 0 is not above 0"):
        paging.blocks_of(1, 0)


def test_40_gib_are_327680_slots_and_40_requests_of_8192() -> None:
    assert paging.token_slots([LLAMA], 40 * GIB) == 327680
    assert paging.sequences_that_fit([LLAMA], 40 * GIB, 8192, 16) == 40
    assert paging.sequences_that_fit([LLAMA], 40 * GIB, 8193, 16) == 39


def test_slots_grow_where_heads_are_spread_and_not_where_they_are_copied() -> None:
    latent = read_config(p.DEEPSEEK_V3)
    assert paging.token_slots(LLAMA.ranks(tp=8), 40 * GIB) == 8 * 327680
    assert paging.token_slots(latent.ranks(tp=8), 40 * GIB) == paging.token_slots([latent], 40 * GIB)


def test_the_stage_with_the_most_layers_bounds() -> None:
    """32 layers in 3 stages are 11, 11 and 10."""
    assert paging.token_slots(LLAMA.ranks(tp=1, pp=3), 11 * 4096 * 100) == 100


def test_without_attention_there_are_no_slots_but_sequences() -> None:
    recurrent = made(Layer(states=(State(10, 10, 1),)))
    assert paging.token_slots([recurrent], 1000) is None
    assert paging.sequences_that_fit([recurrent], 1000, 10**6, 16) == 10


def test_a_window_keeps_the_blocks_it_touches() -> None:
    """vLLM 0.32: SlidingWindowSpec(sliding_window=1024).max_admission_blocks_per_request(1, ..) is 65."""
    window = made(Layer(Attention(1, 1, 0, KV_DTYPES["int8"], window_tokens=1024)))
    assert paging.paged_bytes(window, 100_000, 16) == 65 * 16
    assert paging.paged_bytes(window, 1024, 16) == 64 * 16


def test_growth_while_decoding() -> None:
    """Blocks of 4 tokens at a byte each, 3 sequences of 6 tokens (2 blocks), memory of 7, 9 or 12 blocks."""
    plain = made(Layer(BYTE))

    def steps(blocks: int, most: int = 100) -> int | None:
        return paging.steps_that_fit([plain], blocks * 4, 3, 6, 4, most)

    assert steps(5) is None
    assert steps(7) == 2
    assert steps(9) == 6
    assert steps(12) == 10
    assert steps(12, most=5) == 5


def test_sequences_within_their_windows_never_yield() -> None:
    window = made(Layer(Attention(1, 1, 0, KV_DTYPES["int8"], window_tokens=9)))
    assert paging.steps_that_fit([window], 3 * 12, 1, 9, 4, 10**6) == 10**6


@given(st.integers(1, 10**6), st.integers(1, 1024))
def test_blocks_cover_the_tokens_and_waste_less_than_one(tokens: int, block: int) -> None:
    allocated = paging.allocated_tokens(tokens, block)
    assert allocated >= tokens
    assert 0 <= paging.tail_waste_tokens(tokens, block) < block
    assert allocated % block == 0


@given(st.integers(1, 10**5), st.integers(1, 128), st.integers(0, 10**9), st.integers(1, 4))
def test_what_fits_fits_and_one_more_does_not(tokens: int, block: int, memory: int, pp: int) -> None:
    ranks = LLAMA.ranks(tp=1, pp=pp)
    count = paging.sequences_that_fit(ranks, memory, tokens, block)
    most = max(paging.paged_bytes(rank, tokens, block) for rank in ranks)
    assert count * most <= memory < (count + 1) * most
    assert paging.sequences_that_fit(ranks, memory, tokens + 1, block) <= count


@given(st.integers(1, 500), st.integers(1, 64), st.integers(1, 9), st.integers(0, 5000), st.integers(0, 300))
def test_steps_are_the_last_that_fit(tokens: int, block: int, count: int, memory: int, most: int) -> None:
    plain = made(Layer(BYTE), Layer(Attention(1, 1, 0, KV_DTYPES["int8"], window_tokens=50)))
    steps = paging.steps_that_fit([plain], memory, count, tokens, block, most)
    taken = [count * paging.paged_bytes(plain, tokens + step, block) for step in range(most + 2)]
    if steps is None:
        assert taken[0] > memory
    else:
        assert taken[steps] <= memory
        assert steps == most or taken[steps + 1] > memory
