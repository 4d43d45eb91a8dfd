"""When prefill elsewhere and a handoff beat a worker that does both."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.policies.costs.links import LINKS, Link
from kvroute.policies.costs.speeds import PRESETS, Speed
from kvroute.policies.costs.splitting import (
    Reason,
    Saturated,
    Setting,
    Way,
    best_split,
    judge,
    split_way,
    whole_way,
)

# A step decodes in 10 ms whatever the batch, and a prefill takes 0.1 ms a token: figures to follow by hand.
PLAIN = Speed(0, 0, 0.1, 0, 10, 0, 0, kv_tokens=1_000_000, kv_bytes_per_token=100_000)
HAND = Setting(PLAIN, 1000, 101, 2.0, workers=4, prefill_workers=1, link=Link(10e9, 0.001), second_leg_s=0)
QWEN = Setting(PRESETS["qwen3-32b-h200-tp2"], 8000, 300, 8.0, 8, 5, LINKS["ib-400g"])


def way(result: Way | Saturated) -> Way:
    assert isinstance(result, Way)
    return result


def test_a_split_worked_by_hand() -> None:
    split = way(split_way(HAND))
    # Prefill 100 ms, a fifth of the time busy: waits 0.2 x 0.1 / (2 x 0.8) = 12.5 ms.
    assert split.prefill_share == pytest.approx(0.2)
    # 1008 tokens of 100 kB at 10 GB/s: 10.08 ms and 1 ms of set-up. The prefill side's link has 2 a second.
    wire_s = 0.01008
    link_wait_s = 2 * wire_s * wire_s / (2 * (1 - 2 * wire_s))
    assert split.handoff_s == pytest.approx(0.001 + wire_s + link_wait_s)
    assert split.ttft_s == pytest.approx(0.0125 + 0.1 + split.handoff_s)
    # 2/3 a second stay for 100 steps of 10 ms on each of three.
    assert split.residents == pytest.approx(2 / 3)
    assert split.itl_s == split.itl_worst_s == pytest.approx(0.010)
    assert split.e2e_s == pytest.approx(split.ttft_s + 1.0)


def test_a_whole_worker_by_hand() -> None:
    whole = way(whole_way(HAND))
    # One resident, more or less: its token makes the prefill step 100.1 ms. Half a request a second on each.
    assert whole.itl_worst_s == pytest.approx(0.1001)
    assert whole.prefill_share == pytest.approx(0.05005)
    # Tokens a second: 0.5 from prefill steps, and 100 in the 94.995 % of the time without.
    assert whole.itl_s == pytest.approx(1 / (0.5 + 94.995))
    assert whole.residents == pytest.approx(0.5 * 100 * whole.itl_s)
    assert whole.handoff_s == 0


def test_the_second_leg_is_part_of_the_handoff() -> None:
    two = way(split_way(replace(HAND, second_leg_s=0.0156)))
    assert two.handoff_s - way(split_way(HAND)).handoff_s == pytest.approx(0.0156)
    assert two.ttft_s - way(split_way(HAND)).ttft_s == pytest.approx(0.0156)


def test_decodes_attend_to_the_prompt_and_half_of_the_answer() -> None:
    # 0.01 ms a token: ITL = 10 ms + R x 1050.5 x 0.01 ms and R = 2/3 x 100 x ITL.
    setting = replace(HAND, speed=replace(PLAIN, decode_context_ms=0.01))
    expected_s = 0.010 / (1 - 2 / 3 * 100 * 1050.5 * 0.01e-3)
    assert way(split_way(setting)).itl_s == pytest.approx(expected_s)


def test_a_long_prompt_stalls_decodes_one_chunk_at_a_time() -> None:
    whole = way(whole_way(replace(HAND, prompt_tokens=5000, rate_per_s=0.4, chunk_tokens=1024)))
    assert whole.itl_worst_s == pytest.approx(0.1024, rel=1e-3)
    assert whole.ttft_s == pytest.approx(0.5 + 0.1 * 0.5 * 0.5 / (2 * 0.95), rel=1e-3)


def test_layers_sent_during_the_prefill_shorten_the_handoff() -> None:
    after, during = way(split_way(HAND)), way(split_way(replace(HAND, pieces=32)))
    assert after.handoff_s - during.handoff_s == pytest.approx(0.01008 * 31 / 32)


def test_splitting_pays_where_prefills_stall_many_decodes() -> None:
    verdict = judge(QWEN)
    assert verdict.reason is Reason.PAYS
    assert verdict.gain_s is not None
    assert verdict.gain_s > 1.5
    assert way(verdict.whole).itl_s > 1.5 * way(verdict.split).itl_s


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        (Reason.SHORT_PROMPT, {"prompt_tokens": 128, "rate_per_s": 40.0, "prefill_workers": 1}),
        (Reason.LOW_CONCURRENCY, {"rate_per_s": 0.2, "prefill_workers": 3}),
        (Reason.SLOW_LINK, {"link": LINKS["tcp"], "prefill_workers": 4}),
        (Reason.UNBALANCED, {"prefill_workers": 2}),
        (Reason.UNBALANCED, {"prefill_workers": 7, "output_tokens": 2000, "rate_per_s": 3.0}),
        (Reason.POOLING, {"rate_per_s": 14.0, "prefill_workers": 6}),
        (Reason.OVERLOAD, {"rate_per_s": 30.0}),
        (Reason.LIMIT, {"itl_limit_s": 0.015}),
    ],
)
def test_each_verdict_has_its_reason(reason: Reason, change: dict[str, object]) -> None:
    verdict = judge(replace(QWEN, **change))  # type: ignore[arg-type]
    assert verdict.reason is reason
    assert verdict.pays is (reason is Reason.LIMIT)


def test_prompts_too_short_for_a_handoff_name_a_length_that_is_not() -> None:
    short = replace(QWEN, prompt_tokens=64, prefill_workers=1)
    assert judge(short).detail == "prompts of 1024 tokens would pay"
    assert not judge(best_split(replace(short, prompt_tokens=512))).pays
    assert judge(best_split(replace(short, prompt_tokens=1024))).pays


def test_an_unbalanced_split_names_a_better_one() -> None:
    verdict = judge(replace(QWEN, prefill_workers=2))
    assert verdict.split == Saturated("prefill workers")
    assert verdict.gain_s is None
    assert verdict.detail == "5 prefill workers would pay"
    assert best_split(replace(QWEN, prefill_workers=2)).prefill_workers == 5


def test_a_whole_fleet_that_stalls_too_much_is_rescued_by_a_split_one() -> None:
    # Whole, 70 % prefill slows the decodes until the sequences of 166 answers do not fit; split, 140 stay.
    setting = replace(HAND, prompt_tokens=4000, output_tokens=2000, rate_per_s=7.0, prefill_workers=3)
    verdict = judge(replace(setting, chunk_tokens=256))
    assert verdict.reason is Reason.RESCUES
    assert verdict.whole == Saturated("whole workers")
    assert way(verdict.split).residents == pytest.approx(7 * 1999 * 0.010)


def test_kv_that_does_not_fit_saturates_the_decode_workers() -> None:
    small = replace(HAND, speed=replace(PLAIN, kv_tokens=1100))
    assert split_way(small) == Saturated("decode workers")
    assert isinstance(split_way(replace(HAND, speed=replace(PLAIN, kv_tokens=1101))), Way)


def test_answers_of_one_token_keep_no_decodes_and_can_still_be_too_many() -> None:
    assert way(whole_way(replace(HAND, output_tokens=1))).residents == 0
    assert whole_way(replace(HAND, output_tokens=1, rate_per_s=40.0)) == Saturated("whole workers")
    assert whole_way(replace(HAND, output_tokens=1, speed=replace(PLAIN, kv_tokens=1000))) == Saturated(
        "whole workers"
    )


def test_a_full_link_is_named() -> None:
    assert split_way(replace(HAND, link=Link(0.2e9))) == Saturated("links")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_tokens": 0}, "prompt_tokens: 0 is not above 0"),
        ({"rate_per_s": 0.0}, r"rate_per_s: 0\.0 is not usable"),
        ({"rate_per_s": math.nan}, "rate_per_s: nan is not usable"),
        ({"prefill_workers": 8}, "prefill_workers: 8 of 8 workers leaves none to decode; 1 to 7 is expected"),
    ],
)
def test_settings_that_cannot_be_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(QWEN, **change)  # type: ignore[arg-type]


settings = st.builds(
    Setting,
    speed=st.sampled_from(sorted(PRESETS)).map(PRESETS.__getitem__),
    prompt_tokens=st.integers(1, 40_000),
    output_tokens=st.integers(1, 1000),
    rate_per_s=st.floats(0.05, 20),
    workers=st.integers(4, 8),
    prefill_workers=st.integers(1, 3),
    link=st.builds(Link, st.floats(1e9, 2e11), st.floats(0, 0.01)),
    pieces=st.integers(1, 80),
)


@given(settings, st.floats(1, 10))
def test_more_bandwidth_never_makes_a_split_slower(setting: Setting, factor: float) -> None:
    faster = replace(setting, link=Link(setting.link.bytes_per_s * factor, setting.link.latency_s))
    before, after = split_way(setting), split_way(faster)
    if isinstance(before, Way):
        assert way(after).e2e_s <= before.e2e_s * (1 + 1e-9)


@given(settings, st.floats(1, 3))
def test_more_load_never_makes_either_fleet_faster(setting: Setting, factor: float) -> None:
    busier = replace(setting, rate_per_s=setting.rate_per_s * factor)
    for served in (whole_way, split_way):
        before, after = served(setting), served(busier)
        if isinstance(after, Way):
            assert way(before).e2e_s <= after.e2e_s * (1 + 1e-6)


@given(settings)
def test_residents_follow_littles_law(setting: Setting) -> None:
    split = split_way(setting)
    if isinstance(split, Way):
        rate = setting.rate_per_s / (setting.workers - setting.prefill_workers)
        assert split.residents == pytest.approx(rate * (split.e2e_s - split.ttft_s), rel=1e-3, abs=1e-6)
