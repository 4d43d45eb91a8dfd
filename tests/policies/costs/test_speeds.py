"""Steps and prefills of the presets, by the published coefficients."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.policies.costs.speeds import PRESETS

QWEN = PRESETS["qwen3-32b-h200-tp2"]
names = st.sampled_from(sorted(PRESETS))


def test_a_prefill_is_linear_with_a_quadratic_part_and_a_floor() -> None:
    # 7.90 + 0.04536 x 8192 ms, and 1.72e-6 x 8192 x 4096 of attention.
    assert QWEN.prefill_s(8192) == pytest.approx((7.90 + 371.58912 + 57.71362) / 1e3)
    # After 10000 cached tokens, 100 new ones: the floor of 13.64 ms and 1.72e-6 x 100 x 10050.
    assert QWEN.prefill_s(100, 10_000) == pytest.approx((13.64 + 1.7286) / 1e3)


def test_the_marginal_prefill_has_neither_floor_nor_base() -> None:
    assert QWEN.marginal_prefill_s(100, 10_000) == pytest.approx((4.536 + 1.7286) / 1e3)
    assert QWEN.marginal_prefill_s(0, 10_000) == 0


def test_a_decode_step_counts_sequences_and_their_context() -> None:
    # 10.80 + 0.0233 x 20 + 3.01e-5 x 160000
    assert QWEN.decode_s(20, 160_000) == pytest.approx((10.80 + 0.466 + 4.816) / 1e3)


def test_a_mixed_step_takes_the_slower_of_its_parts_and_both_contexts() -> None:
    # Prefill rules: 7.90 + 0.04536 x 8212 > 11.266.
    mixed_s = QWEN.step_s(8192, 8192 * 4096, 20, 160_000)
    assert mixed_s == pytest.approx((7.90 + 0.04536 * 8212 + 57.71362 + 4.816) / 1e3)
    # The floor of 13.64 ms rules over 7.90 + 0.04536 x 36 and 11.266.
    assert QWEN.step_s(16, 0, 20, 0) == pytest.approx(0.01364)
    # 200 sequences decode in 15.46 ms: more than the floor, less than 7.90 + 0.04536 x 201 = 17.02.
    assert QWEN.step_s(1, 0, 200, 0) == pytest.approx(0.01701736)


def test_a_calibrated_speed_scales_every_step_and_adds_to_it() -> None:
    slow = QWEN.calibrated(scale=1.1, offset_ms=2.0)
    assert slow.decode_s(20, 160_000) == pytest.approx(1.1 * QWEN.decode_s(20, 160_000) + 0.002)
    assert slow.step_s(512, 0, 4, 0) == pytest.approx(1.1 * QWEN.step_s(512, 0, 4, 0) + 0.002)


@pytest.mark.parametrize(
    ("name", "decode_ms", "prefill_1k_ms", "kv_tokens", "bytes_per_token"),
    [
        ("llama-3.1-8b-h100-tp1", 6.4402, 22.0945, 432_992, 131_072),
        ("llama-3.1-8b-h200-tp1", 4.9707, 21.845, 882_732, 131_072),
        ("qwen3-32b-h100-tp2", 13.6357, 55.13, 301_810, 262_144),
        ("qwen3-32b-h200-tp2", 10.8233, 54.12, 751_550, 262_144),
        ("llama-3-70b-h100-tp8", 10.0233, 45.707, 1_338_649, 327_680),
        ("llama-3-70b-h200-tp4", 12.2907, 66.035, 1_173_601, 327_680),
        ("llama-3-70b-a100-tp8", 17.4876, 114.04, 1_338_649, 327_680),
    ],
)
def test_each_preset_is_its_row(
    name: str, decode_ms: float, prefill_1k_ms: float, kv_tokens: int, bytes_per_token: int
) -> None:
    # One sequence without context: d0 + d1. A thousand tokens: a + 1000 b + 500000 c.
    speed = PRESETS[name]
    assert speed.decode_s(1, 0) * 1e3 == pytest.approx(decode_ms, abs=1e-4)
    assert speed.prefill_s(1000) * 1e3 == pytest.approx(prefill_1k_ms, abs=1e-4)
    assert (speed.kv_tokens, speed.kv_bytes_per_token) == (kv_tokens, bytes_per_token)


def test_the_presets_are_these() -> None:
    assert len(PRESETS) == 7


@given(names, st.integers(0, 100_000), st.integers(0, 100_000), st.integers(0, 10_000))
def test_more_tokens_never_take_less_and_a_cached_one_never_more_than_a_new_one(
    name: str, new: int, cached: int, more: int
) -> None:
    speed = PRESETS[name]
    assert speed.prefill_s(new + more, cached) >= speed.prefill_s(new, cached)
    assert speed.prefill_s(new, cached + more) >= speed.prefill_s(new, cached)
    assert speed.prefill_s(new + more, cached) >= speed.prefill_s(new, cached + more) * (1 - 1e-12)


@given(names, st.integers(0, 100_000), st.integers(0, 50_000), st.integers(1, 50_000))
def test_a_prefill_in_two_parts_costs_its_attention_once(
    name: str, cached: int, first: int, second: int
) -> None:
    speed = PRESETS[name]
    whole_s = speed.marginal_prefill_s(first + second, cached)
    parts_s = speed.marginal_prefill_s(first, cached) + speed.marginal_prefill_s(second, cached + first)
    assert whole_s == pytest.approx(parts_s)
