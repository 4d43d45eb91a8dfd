"""The table of splits: what is varied, which split is taken, and where it says no."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from kvroute.loadtests.plan.pd import PdPlan, pd_setting, plan_pd, usual_links
from kvroute.policies.costs.links import LINKS
from kvroute.policies.costs.speeds import PRESETS
from kvroute.policies.costs.splitting import judge

QWEN = PRESETS["qwen3-32b-h200-tp2"]
OPTIONS: dict[str, Any] = {
    "prompt_tokens": 8192,
    "output_tokens": 300,
    "rate_per_s": 8.0,
    "workers": 8,
    "prefill_workers": None,
    "pieces": 1,
    "chunk_tokens": 8192,
    "itl_limit_s": None,
}
SETTING = pd_setting(QWEN, LINKS["ib-400g"], **OPTIONS)
PLAN = PdPlan("qwen", SETTING, "ib-400g", usual_links())


def test_the_best_split_is_taken_and_the_verdict_is_that_of_the_model() -> None:
    report, _ = plan_pd(PLAN)
    given = report.data["rows"][0]
    assert (given["prefill_workers"], given["decode_workers"]) == (5, 3)
    verdict = judge(replace(SETTING, prefill_workers=5))
    assert verdict.gain_s is not None
    assert given["gain_ms"] == pytest.approx(verdict.gain_s * 1e3)
    assert report.data["pays"] is given["pays"] is True
    assert report.notes[0].startswith("As given, splitting pays: ITL falls by ")


def test_lengths_rates_and_links_are_varied_one_at_a_time() -> None:
    rows = plan_pd(PLAN)[0].data["rows"]
    varied = {name: [row for row in rows if row["varied"] == name] for name in ("prompt", "rate", "link")}
    assert [row["prompt_tokens"] for row in varied["prompt"]] == [64, 256, 1024, 4096, 8192, 16_384]
    assert {row["rate_per_s"] for row in varied["prompt"]} == {8.0}
    assert {row["prompt_tokens"] for row in varied["rate"] + varied["link"]} == {8192}
    assert [row["bytes_per_s"] for row in varied["link"]] == [
        link.bytes_per_s for link in usual_links().values()
    ]
    reasons = {row["value"]: row["reason"] for row in rows}
    assert reasons["64 tokens"] == "short prompts"
    assert reasons["0.4 /s"] == "low concurrency"
    assert reasons["tcp 4.2 GB/s"] == "slow link"
    assert reasons["16 /s"] == "overload"


def test_a_given_split_is_kept_and_a_better_one_named() -> None:
    plan = replace(PLAN, setting=replace(SETTING, prefill_workers=2), fixed=True)
    report, _ = plan_pd(plan)
    assert {row["prefill_workers"] for row in report.data["rows"]} == {2}
    assert report.data["reason"] == "unbalanced fleet"
    assert (
        report.notes[0] == "As given, splitting does not pay, unbalanced fleet: 5 prefill workers would pay."
    )


def test_what_is_full_has_no_figures() -> None:
    report, plot = plan_pd(replace(PLAN, setting=replace(SETTING, rate_per_s=200.0)))
    given = report.data["rows"][0]
    assert given["whole"] == {"stable": False, "full": "whole workers"}
    assert given["gain_ms"] is None
    assert "whole workers full" in report.rows[0]
    report.to_json()
    assert all(x < 200 for line in plot.series for x in line.xs)


def test_the_plot_marks_where_splitting_begins_to_pay() -> None:
    _, plot = plan_pd(PLAN)
    marks = {text.split(":")[0]: x for x, text in plot.marks}
    assert marks["given"] == 8.0
    line = next(line for line in plot.series if line.name == "roce-100g")
    for rate, gain in zip(line.xs, line.ys, strict=True):
        if rate < 10:
            assert (gain > 0) == (rate >= marks["roce-100g"])
    assert "tcp" not in marks


def test_a_loss_next_to_saturation_does_not_flatten_the_other_lines() -> None:
    _, plot = plan_pd(PLAN)
    gains = [gain for line in plot.series for gain in line.ys]
    assert min(gains) >= -max(gains)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("prompt_tokens", 0, "--prompt: 0 is not usable; 1 to 10000000"),
        ("output_tokens", -1, "--output: -1"),
        ("rate_per_s", 0.0, "--rate: 0 is not usable; a number above 0"),
        ("rate_per_s", math.nan, "--rate: nan"),
        ("workers", 1, "--workers: 1 is not usable; 2 to 1000"),
        ("prefill_workers", 0, "--prefill-workers: 0 is not usable; 1 to 7"),
        ("prefill_workers", 8, "--prefill-workers: 8 is not usable; 1 to 7"),
        ("pieces", 0, "--pieces: 0"),
        ("chunk_tokens", 1, "--chunk: 1 is not usable; 16 to"),
    ],
)
def test_options_that_cannot_be_are_named(option: str, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pd_setting(QWEN, LINKS["tcp"], **{**OPTIONS, option: value})
