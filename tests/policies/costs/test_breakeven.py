"""Fetch against recompute: the published figures, and where the lines cross."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.policies.costs.breakeven import (
    Reuse,
    breakeven_bandwidth,
    breakeven_tokens,
    linear_breakeven_tokens,
    prefill_saved_s,
    value_per_byte,
)
from kvroute.policies.costs.links import LINKS, Link, Overlap, path_s
from kvroute.policies.costs.speeds import PRESETS, Speed
from kvroute.policies.costs.units import parse_bandwidth

GIB = 2**30
QWEN = PRESETS["qwen3-32b-h200-tp2"]
presets = st.sampled_from(sorted(PRESETS)).map(PRESETS.__getitem__)


def a_gib(prefill_saved: float, queue_reuse_s: float = 0.0, queue_cold_s: float = 0.0) -> Reuse:
    """2 ms of lookup, 1 GiB at 20 GiB/s, 40 ms to the GPU and 8 ms of layout, one after another."""
    load_s = path_s([Link(20 * GIB), Link(25 * GIB), 0.008], GIB, overlap=Overlap.SERIAL)
    return Reuse(
        prefill_full_s=prefill_saved + 0.02,
        prefill_suffix_s=0.02,
        load_critical_s=load_s,
        lookup_s=0.002,
        queue_cold_s=queue_cold_s,
        queue_reuse_s=queue_reuse_s,
        first_token_s=0.01,
    )


def test_a_gib_in_100_ms_is_worth_700_ms_of_prefill_but_not_60() -> None:
    assert a_gib(0.700).lookup_s + a_gib(0.700).load_critical_s == pytest.approx(0.100)
    assert a_gib(0.700).worth_it
    assert not a_gib(0.060).worth_it
    assert a_gib(0.700).cold_s == pytest.approx(0.730)
    assert a_gib(0.700).reuse_s == pytest.approx(0.130)


def test_a_cached_prefix_behind_a_long_queue_is_left() -> None:
    assert a_gib(0.700, queue_reuse_s=0.599).worth_it
    assert not a_gib(0.700, queue_reuse_s=0.601).worth_it
    assert a_gib(0.700, queue_reuse_s=0.8, queue_cold_s=0.3).worth_it


@given(*[st.floats(0, 10)] * 7)
def test_worth_it_is_what_the_sums_of_both_ways_say(
    full: float, suffix: float, load: float, lookup: float, cold: float, reuse: float, first: float
) -> None:
    both = Reuse(full, suffix, load, lookup, cold, reuse, first)
    if abs(both.reuse_s - both.cold_s) > 1e-9:
        assert both.worth_it == (both.reuse_s < both.cold_s)


def test_200_gbit_per_s_is_25_gb_and_23_28_gib_per_s() -> None:
    assert parse_bandwidth("200Gbps", "bandwidth") == 25e9
    assert round(25e9 / GIB, 2) == 23.28


def test_the_share_of_the_prompt_is_not_the_share_of_its_prefill() -> None:
    full_s = QWEN.prefill_s(65_536)
    saved_s = prefill_saved_s(QWEN, 32_768, 32_768)
    # Half of the prompt: half of the linear part, but a quarter of the attention.
    attention_s = 1.72e-6 * 65_536**2 / 2 / 1e3
    assert saved_s == pytest.approx(0.04536 * 32_768 / 1e3 + attention_s / 4)
    assert saved_s < 0.79 * (0.5 * full_s)


def test_the_last_token_is_always_computed() -> None:
    with pytest.raises(ValueError, match=r"suffix_tokens: 0 is not above 0"):
        prefill_saved_s(QWEN, 1000, 0)


@given(presets, st.integers(0, 200_000), st.integers(0, 10_000), st.integers(1, 50_000))
def test_a_longer_prefix_never_saves_less(speed: Speed, prefix: int, more: int, suffix: int) -> None:
    saved_s = prefill_saved_s(speed, prefix, suffix)
    assert saved_s >= 0
    assert prefill_saved_s(speed, prefix + more, suffix) >= saved_s * (1 - 1e-12)


def test_the_linear_break_even_of_two_published_settings() -> None:
    # 42 tokens for Qwen3-32B on two H200 (k = 1.1) and 160 for 1.518e-2 ms/token follow together from pulling
    # 128 KiB/token at 49 GB/s, the top of a 400 Gb/s port, behind 2 ms.
    load_token_s = Link(49e9).transfer_s(131_072)
    assert int(linear_breakeven_tokens(0.002, 1.1 * 0.04536e-3, load_token_s)) == 42
    assert round(linear_breakeven_tokens(0.002, 1.518344e-5, load_token_s)) == 160
    # With the model's own 256 KiB/token it is 45.
    assert round(linear_breakeven_tokens(0.002, 1.1 * 0.04536e-3, 2 * load_token_s)) == 45


def test_a_link_slower_than_the_prefill_never_pays_by_length_alone() -> None:
    assert linear_breakeven_tokens(0.002, 1e-5, 1e-5) == math.inf


def test_attention_lets_a_slow_link_pay_for_long_prefixes() -> None:
    # 262144 B at 4.2 GB/s is 0.0624 ms a token against 0.04536: never, but for attention's 1.72e-6 n/2 ms.
    def load_s(tokens: int) -> float:
        return LINKS["tcp"].transfer_s(tokens * 262_144)

    assert linear_breakeven_tokens(0.005, 0.04536e-3, 262_144 / 4.2e9) == math.inf
    tokens = breakeven_tokens(QWEN, load_s, suffix_tokens=512, most_tokens=200_000)
    # Root of 0.86e-6 n^2 - 0.017055 n - 5 = 0 [ms].
    slope = 262_144 / 4.2e6 - 0.04536
    assert tokens == math.ceil((slope + math.sqrt(slope**2 + 4 * 0.86e-6 * 5)) / (2 * 0.86e-6))
    assert breakeven_tokens(QWEN, load_s, suffix_tokens=512, most_tokens=20_000) is None


@given(presets, st.floats(1e9, 2e11), st.floats(0, 0.05), st.integers(1, 4096), st.floats(-0.2, 0.2))
def test_from_the_break_even_on_every_prefix_pays_and_the_one_before_does_not(
    speed: Speed, bytes_per_s: float, latency_s: float, suffix: int, extra_s: float
) -> None:
    link = Link(bytes_per_s, latency_s)

    def pays(tokens: int) -> bool:
        cost_s = link.transfer_s(tokens * speed.kv_bytes_per_token) + extra_s
        return prefill_saved_s(speed, tokens, suffix) - cost_s > 1e-12

    found = breakeven_tokens(
        speed,
        lambda tokens: link.transfer_s(tokens * speed.kv_bytes_per_token),
        suffix_tokens=suffix,
        most_tokens=131_072,
        extra_s=extra_s,
    )
    if found is None:
        assert not pays(131_072)
    else:
        assert all(
            pays(tokens) for tokens in (found + 1, found + 64, 2 * found, 131_072) if tokens <= 131_072
        )
        assert found == 1 or not pays(found - 1)


def test_a_shorter_queue_pays_for_short_and_for_long_prefixes_but_not_for_those_between() -> None:
    # The slow link of above, 1 ms of set-up and 5 ms saved by the queue: short prefixes ride on the queue.
    link = Link(4.2e9, 0.001)

    def gain_s(tokens: int) -> float:
        return prefill_saved_s(QWEN, tokens, 512) - link.transfer_s(tokens * 262_144) + 0.005

    found = breakeven_tokens(
        QWEN,
        lambda tokens: link.transfer_s(tokens * 262_144),
        suffix_tokens=512,
        most_tokens=200_000,
        extra_s=-0.005,
    )
    assert gain_s(100) > 0 > gain_s(10_000)
    assert found is not None
    assert gain_s(found - 1) <= 0 < gain_s(found)


@given(presets, st.floats(1e9, 1e11), st.floats(1.0, 10.0), st.floats(0, 0.05))
def test_more_bandwidth_never_makes_fetching_worse(
    speed: Speed, bytes_per_s: float, factor: float, latency_s: float
) -> None:
    def breakeven(link: Link) -> float:
        found = breakeven_tokens(
            speed,
            lambda tokens: link.transfer_s(tokens * speed.kv_bytes_per_token),
            suffix_tokens=256,
            most_tokens=131_072,
        )
        return math.inf if found is None else found

    assert breakeven(Link(bytes_per_s * factor, latency_s)) <= breakeven(Link(bytes_per_s, latency_s))


def test_the_break_even_bandwidth_spends_all_that_is_saved_beyond_the_fixed_part() -> None:
    assert breakeven_bandwidth(GIB, saved_s=0.100, fixed_s=0.050) == pytest.approx(20 * GIB)
    assert breakeven_bandwidth(GIB, saved_s=0.050, fixed_s=0.050) == math.inf


GPT_OSS = Speed(0, 0, 0.0248, 6.22e-7, 0, 0, 0, kv_tokens=0, kv_bytes_per_token=73_728)
"""gpt-oss-120B on one H200, fitted below. 36 layers x 8 KV heads x (64 + 64) x 2 bytes = 73728 B/token."""
OVERHEAD_S = 0.0258


@pytest.mark.parametrize(
    ("tokens", "pull_ms", "recompute_ms"), [(2048, 35, 78), (8192, 57, 250), (32_768, 165, 1173)]
)
def test_published_pulls_and_recomputations(tokens: int, pull_ms: float, recompute_ms: float) -> None:
    # llm-d, "Pull, Don't Recompute". Four parameters for six figures: 25.8 ms on both ways, 17.9 GB/s from
    # the peer, 0.0248 ms/token and 6.22e-7 ms/token^2 of prefill. Pulls within 5 %, the others within 0.5 %.
    link = Link(17.9e9)
    way = Reuse(
        prefill_full_s=GPT_OSS.prefill_s(tokens),
        prefill_suffix_s=GPT_OSS.prefill_s(1, tokens - 1),
        load_critical_s=link.transfer_s((tokens - 1) * GPT_OSS.kv_bytes_per_token),
        first_token_s=OVERHEAD_S,
    )
    assert way.reuse_s * 1e3 == pytest.approx(pull_ms, rel=0.05)
    assert way.cold_s * 1e3 == pytest.approx(recompute_ms, rel=0.005)
    assert way.worth_it


def test_value_per_byte() -> None:
    # Three reuses of 0.5 s, less 0.3 s of writing and reading, in 1 MiB.
    assert value_per_byte(3, 0.5, 0.3, 2**20) == pytest.approx(1.2 / 2**20)
    assert value_per_byte(0, 0.5, 0.3, 2**20) < 0
    with pytest.raises(ValueError, match="size_bytes: 0"):
        value_per_byte(1, 1, 0, 0)
