"""`kvroute plan pd`: when prefill and decode on different workers pay, over lengths, load and bandwidth."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from kvroute.loadtests.plan.choices import rate_of, show_bandwidth, whole_number
from kvroute.loadtests.plan.show import Plot, Report, Series
from kvroute.policies.costs.links import LINKS, Link
from kvroute.policies.costs.speeds import Speed
from kvroute.policies.costs.splitting import (
    MODEL_ERROR,
    Saturated,
    Setting,
    Verdict,
    Way,
    best_split,
    judge,
)
from kvroute.policies.costs.units import format_seconds

_PROMPTS = (64, 256, 1024, 4096, 8192, 16_384)
_LOADS = (0.05, 0.25, 0.5, 1.0, 1.25, 1.5, 2.0)
"""Times the given rate."""


def usual_links() -> dict[str, Link]:
    """The networks that a handoff may take."""
    return {name: LINKS[name] for name in ("tcp", "roce-100g", "ib-400g", "ib-8x400g")}


def pd_setting(
    speed: Speed,
    link: Link,
    *,
    prompt_tokens: int,
    output_tokens: int,
    rate_per_s: float,
    workers: int,
    prefill_workers: int | None,
    pieces: int,
    chunk_tokens: int,
    itl_limit_s: float | None,
) -> Setting:
    """ValueError names the option that is wrong. Half of the workers prefill if their number is not given."""
    prefilling = workers // 2 if prefill_workers is None else prefill_workers
    return Setting(
        speed=speed,
        prompt_tokens=whole_number("--prompt", prompt_tokens),
        output_tokens=whole_number("--output", output_tokens),
        rate_per_s=rate_of("--rate", rate_per_s),
        workers=whole_number("--workers", workers, least=2, most=1000),
        prefill_workers=whole_number("--prefill-workers", prefilling, most=workers - 1),
        link=link,
        pieces=whole_number("--pieces", pieces),
        chunk_tokens=whole_number("--chunk", chunk_tokens, least=16),
        itl_limit_s=math.inf if itl_limit_s is None else itl_limit_s,
    )


@dataclass(frozen=True, slots=True)
class PdPlan:
    """`setting` is varied, one thing at a time; its prefill workers only if not `fixed`."""

    preset: str
    setting: Setting
    link_name: str
    links: Mapping[str, Link]
    fixed: bool = False

    def judged(self, setting: Setting) -> tuple[Setting, Verdict]:
        taken = setting if self.fixed else best_split(setting)
        return taken, judge(taken)


def plan_pd(plan: PdPlan) -> tuple[Report, Plot]:
    rows = [_row(plan, varied, value, setting) for varied, value, setting in _variations(plan)]
    given = rows[0]
    data = {
        "preset": plan.preset,
        "prompt_tokens": plan.setting.prompt_tokens,
        "output_tokens": plan.setting.output_tokens,
        "rate_per_s": plan.setting.rate_per_s,
        "workers": plan.setting.workers,
        "link": plan.link_name,
        "pays": given["pays"],
        "reason": given["reason"],
        "detail": given["detail"],
        "rows": rows,
    }
    return _report(plan, data), _plot(plan)


def _variations(plan: PdPlan) -> Iterator[tuple[str, str, Setting]]:
    given = plan.setting
    yield "as given", "", given
    for tokens in _PROMPTS:
        yield "prompt", f"{tokens} tokens", replace(given, prompt_tokens=tokens)
    for load in _LOADS:
        rate = given.rate_per_s * load
        yield "rate", f"{rate:.4g} /s", replace(given, rate_per_s=rate)
    for name, link in plan.links.items():
        yield "link", f"{name} {show_bandwidth(link.bytes_per_s)}", replace(given, link=link)


def _row(plan: PdPlan, varied: str, value: str, setting: Setting) -> dict[str, Any]:
    taken, verdict = plan.judged(setting)
    return {
        "varied": varied,
        "value": value,
        "prompt_tokens": taken.prompt_tokens,
        "rate_per_s": taken.rate_per_s,
        "bytes_per_s": taken.link.bytes_per_s,
        "prefill_workers": taken.prefill_workers,
        "decode_workers": taken.workers - taken.prefill_workers,
        "whole": _way(verdict.whole),
        "split": _way(verdict.split),
        "gain_ms": None if verdict.gain_s is None else verdict.gain_s * 1e3,
        "pays": verdict.pays,
        "reason": verdict.reason.value,
        "detail": verdict.detail,
    }


def _way(way: Way | Saturated) -> dict[str, Any]:
    """Without a steady state no other figure than what is full."""
    if isinstance(way, Saturated):
        return {"stable": False, "full": way.what}
    return {
        "stable": True,
        "ttft_ms": way.ttft_s * 1e3,
        "itl_ms": way.itl_s * 1e3,
        "itl_worst_ms": way.itl_worst_s * 1e3,
        "e2e_ms": way.e2e_s * 1e3,
        "decodes_per_worker": way.residents,
        "prefill_share": way.prefill_share,
        "handoff_ms": way.handoff_s * 1e3,
    }


def _report(plan: PdPlan, data: dict[str, Any]) -> Report:
    columns = ("", "whole (worst), ms", "split", "split, ms", "handoff", "gain", "verdict")
    rows = tuple(
        (
            f"{row['varied']} {row['value']}".rstrip(),
            _show(row["whole"], worst=True),
            f"{row['prefill_workers']}P+{row['decode_workers']}D",
            _show(row["split"], worst=False),
            format_seconds(row["split"]["handoff_ms"] / 1e3) if row["split"]["stable"] else "-",
            "-" if row["gain_ms"] is None else format_seconds(row["gain_ms"] / 1e3),
            row["reason"],
        )
        for row in data["rows"]
    )
    setting = plan.setting
    title = (
        f"Prefill and decode apart: {setting.workers} x {plan.preset}, {setting.prompt_tokens} + "
        f"{setting.output_tokens} tokens, {setting.rate_per_s:g} requests/s, {plan.link_name}"
    )
    verdict = "pays" if data["pays"] else f"does not pay, {data['reason']}"
    notes = (
        f"As given, splitting {verdict}: {data['detail']}.",
        "Whole and split: TTFT + ITL; worst: the gap of a decode beside the longest prefill step. Gain: E2E "
        f"that a request saves by the split; less than {MODEL_ERROR:.0%} of E2E is not called a gain.",
        "An estimate over means: equal workers and requests, Poisson arrivals, M/G/1 waits with constant "
        "service.",
    )
    return Report(title, columns, rows, data, notes)


def _show(way: Mapping[str, Any], *, worst: bool) -> str:
    if not way["stable"]:
        return f"{way['full']} full"
    shown = f"{way['ttft_ms']:.0f} + {way['itl_ms']:.1f}"
    return f"{shown} ({way['itl_worst_ms']:.0f})" if worst else shown


def _plot(plan: PdPlan) -> Plot:
    """Gain over the rate, up to where one of the fleets is full; a line for each link."""
    lines = {
        name: list(_gains(plan, link))
        for name, link in {**plan.links, plan.link_name: plan.setting.link}.items()
    }
    # Next to saturation a gain falls out of all bounds, and would flatten all others.
    least_s = -max([1.0, *(gain for line in lines.values() for _, gain in line)])
    series = []
    for name, line in lines.items():
        shown = [(rate, gain) for rate, gain in line if gain >= least_s]
        series.append(Series(name, [rate for rate, _ in shown], [gain for _, gain in shown]))
    return Plot(
        f"What a split saves: {plan.setting.workers} x {plan.preset}, {plan.setting.prompt_tokens} + "
        f"{plan.setting.output_tokens} tokens",
        "arrivals (requests/s)",
        "E2E saved by splitting (s)",
        tuple(series),
        marks=((plan.setting.rate_per_s, f"given: {plan.setting.rate_per_s:g} /s"), *_crossings(series)),
    )


def _gains(plan: PdPlan, link: Link) -> Iterator[tuple[float, float]]:
    for step in range(1, 61):
        rate = plan.setting.rate_per_s * step / 30
        _, verdict = plan.judged(replace(plan.setting, link=link, rate_per_s=rate))
        if verdict.gain_s is not None:
            yield rate, verdict.gain_s


def _crossings(series: Iterable[Series]) -> Iterator[tuple[float, str]]:
    """Where splitting begins to pay."""
    for line in series:
        points = list(zip(line.xs, line.ys, strict=True))
        for (_, before), (rate, after) in pairwise(points):
            if before <= 0 < after:
                yield rate, f"{line.name}: {rate:.3g} /s"
                break
