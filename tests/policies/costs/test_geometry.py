"""Bytes per token, sequence and rank: the worked figures first, then what must hold for any model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.policies.costs.geometry import KV_DTYPES, Attention, KvGeometry, Layer, State, stage_layers

BF16 = KV_DTYPES["bf16"]


def model(*layers: Layer, query_heads: int = 32) -> KvGeometry:
    return KvGeometry("made", query_heads, layers)


def uniform(layers: int = 32, kv_heads: int = 8, dim: int = 128, query_heads: int = 32) -> KvGeometry:
    return model(*[Layer(Attention(kv_heads, dim, dim, BF16))] * layers, query_heads=query_heads)


def test_the_worked_figures() -> None:
    """L=32, Hkv=8, d=128 in bf16: 2 x 32 x 8 x 128 x 2."""
    kept = uniform()
    assert kept.bytes_per_token == 131072
    assert kept.sequence_bytes(8192) == 2**30
    assert kept.sequence_bytes(32768) == 4 * 2**30
    assert 64 * kept.sequence_bytes(8192) == 64 * 2**30
    assert kept.rank(tp=8).sequence_bytes(8192) == 128 * 2**20


def test_k_and_v_count_for_themselves() -> None:
    assert model(Layer(Attention(4, 192, 128, BF16))).bytes_per_token == 4 * (192 + 128) * 2


def test_layers_that_differ_are_summed() -> None:
    mixed = model(Layer(Attention(8, 128, 128, BF16)), Layer(Attention(2, 64, 64, KV_DTYPES["fp8"])), Layer())
    assert mixed.bytes_per_token == 8 * 256 * 2 + 2 * 128


@pytest.mark.parametrize(
    ("name", "row_bytes"),
    [
        ("fp32", 1024),
        ("bf16", 512),
        ("fp8", 256),
        ("int8", 256),
        # vLLM 0.32: TritonAttentionBackend.customize_spec gives pages of 16 tokens x 8 heads x these.
        ("int8_per_token_head", 33792 // 128),
        ("fp8_per_token_head", 33792 // 128),
        ("int4_per_token_head", 17408 // 128),
    ],
)
def test_quantised_with_their_scales(name: str, row_bytes: int) -> None:
    """One head of 128 + 128 elements."""
    assert Attention(1, 128, 128, KV_DTYPES[name]).bytes_per_token == row_bytes


def test_a_latent_has_both_scales_too() -> None:
    """vLLM 0.32: MLACommonBackend.customize_spec, 576 elements in int8 with scales are 584 bytes."""
    assert Attention(1, 576, 0, KV_DTYPES["int8_per_token_head"]).bytes_per_token == 584


def test_a_window_layer_stops_growing() -> None:
    kept = model(Layer(Attention(1, 64, 64, BF16, window_tokens=100)), Layer(Attention(1, 64, 64, BF16)))
    assert kept.bytes_per_token == 512
    assert kept.growth_bytes_per_token == 256
    assert kept.sequence_bytes(100) == 100 * 512
    assert kept.sequence_bytes(101) - kept.sequence_bytes(100) == 256
    assert kept.windows_tokens == (100,)


def test_a_state_is_per_sequence_not_per_token() -> None:
    kept = model(Layer(states=(State(64, 3, 2), State(8, 256, 4))))
    assert kept.bytes_per_token == 0
    assert kept.sequence_bytes(1) == kept.sequence_bytes(10**6) == 64 * 3 * 2 + 8 * 256 * 4
    assert kept.sequence_bytes(0) == 0


@pytest.mark.parametrize(
    ("kv_heads", "tp", "on_rank"), [(8, 2, 4), (8, 8, 1), (2, 8, 1), (1, 8, 1), (8, 16, 1)]
)
def test_heads_are_spread_and_copied_when_there_are_too_few(kv_heads: int, tp: int, on_rank: int) -> None:
    rank = uniform(kv_heads=kv_heads, query_heads=64).rank(tp)
    assert rank.bytes_per_token == 32 * on_rank * 256 * 2


@pytest.mark.parametrize(
    ("kept", "tp", "problem"),
    [
        (uniform(), 3, "tp: 3 does not divide the 32 attention heads"),
        (uniform(kv_heads=10, query_heads=40), 8, "tp: 8 neither divides the 10 KV heads nor is a multiple"),
        (model(Layer(states=(State(6, 1, 2),)), query_heads=0), 4, "tp: 4 does not divide the 6 channels"),
        (uniform(), 0, "tp: 0 is not above 0"),
        (uniform(), -8, "tp: -8 is not above 0"),
    ],
)
def test_a_split_that_cannot_be_is_named(kept: KvGeometry, tp: int, problem: str) -> None:
    with pytest.raises(ValueError, match="expected") as error:
        kept.rank(tp)
    assert problem in str(error.value)


def test_groups_of_a_state_are_copied_when_there_are_too_few() -> None:
    """vLLM 0.32, `extra_groups_for_head_shards`: one group and four ranks are four groups."""
    state = State(channels=64, values=3, element_bytes=2, groups=1, group_channels=256)
    assert state.sequence_bytes == (64 + 256) * 6
    assert state.on_rank(4).sequence_bytes == (64 + 4 * 256) // 4 * 6


@pytest.mark.parametrize(
    ("layers", "pp", "counts"),
    [
        # vLLM 0.32: get_pp_indices.
        (32, 4, (8, 8, 8, 8)),
        (61, 8, (7, 7, 8, 8, 8, 8, 8, 7)),
        (61, 4, (15, 15, 16, 15)),
        (7, 3, (2, 3, 2)),
        (80, 3, (27, 27, 26)),
        (27, 2, (14, 13)),
        (48, 5, (9, 10, 10, 10, 9)),
    ],
)
def test_stages_have_the_layers_that_the_engine_gives_them(
    layers: int, pp: int, counts: tuple[int, ...]
) -> None:
    assert stage_layers(layers, pp) == counts


def test_a_stage_keeps_its_own_layers() -> None:
    """Windows in the first half only: the stages differ, and their sum is the model."""
    local, whole = Layer(Attention(8, 128, 128, BF16, 64)), Layer(Attention(8, 128, 128, BF16))
    stages = model(local, local, whole, whole).ranks(tp=1, pp=2)
    assert [stage.growth_bytes_per_token for stage in stages] == [0, 8192]
    assert [stage.bytes_per_token for stage in stages] == [8192, 8192]


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="pp: 33 stages for 32 layers"):
        uniform().ranks(tp=1, pp=33)


def test_negative_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="tokens: -1 is negative"):
        uniform().sequence_bytes(-1)


HEADS = st.sampled_from((1, 2, 4, 8, 16))
WINDOWS = st.none() | st.integers(1, 5000)
LAYERS = st.builds(
    Layer,
    st.none()
    | st.builds(
        Attention,
        HEADS,
        st.integers(1, 256),
        st.integers(0, 256),
        st.sampled_from(list(KV_DTYPES.values())),
        WINDOWS,
    ),
    st.lists(
        st.builds(
            State, st.sampled_from((16, 32, 96)), st.integers(1, 64), st.sampled_from((2, 4)), HEADS, HEADS
        ),
        max_size=2,
    ).map(tuple),
)
MODELS = st.lists(LAYERS, min_size=1, max_size=12).map(lambda layers: model(*layers, query_heads=16))
TOKENS = st.integers(0, 20_000)


@given(MODELS, TOKENS, TOKENS)
def test_longer_is_never_smaller(kept: KvGeometry, a: int, b: int) -> None:
    low, high = sorted((a, b))
    assert kept.sequence_bytes(low) <= kept.sequence_bytes(high)
    assert kept.sequence_bytes(high) <= high * kept.bytes_per_token + kept.state_bytes


@given(MODELS, LAYERS, TOKENS)
def test_one_more_layer_is_never_smaller(kept: KvGeometry, layer: Layer, tokens: int) -> None:
    more = model(*kept.layers, layer)
    assert more.sequence_bytes(tokens) >= kept.sequence_bytes(tokens)


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 256))
def test_more_heads_cost_in_proportion(few: int, factor: int, dim: int) -> None:
    one, many = Attention(few, dim, dim, BF16), Attention(few * factor, dim, dim, BF16)
    assert many.bytes_per_token == factor * one.bytes_per_token


@given(MODELS, TOKENS, st.sampled_from((1, 2, 4, 8, 16)), st.integers(1, 12))
def test_all_ranks_keep_at_least_the_model_and_one_rank_at_most(
    kept: KvGeometry, tokens: int, tp: int, stages: int
) -> None:
    ranks = kept.ranks(tp, min(stages, len(kept.layers)))
    assert tp * sum(rank.sequence_bytes(tokens) for rank in ranks) >= kept.sequence_bytes(tokens)
    assert sum(len(rank.layers) for rank in ranks) == len(kept.layers)
    assert all(rank.bytes_per_token <= kept.bytes_per_token for rank in ranks)


@given(st.integers(1, 200), st.integers(1, 200))
def test_stages_share_evenly(layers: int, pp: int) -> None:
    if pp <= layers:
        counts = stage_layers(layers, pp)
        assert sum(counts) == layers
        assert max(counts) - min(counts) <= 1
        assert counts[-1] == min(counts)
