"""A comparison as people read it, and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from statistics import fmean, stdev
from typing import Any

from kvroute.loadtests.plan.show import Report
from kvroute.loadtests.simulator.compare import Comparison, Run, interval
from kvroute.loadtests.simulator.results import Result

_FIGURES: dict[str, Callable[[Result], float]] = {
    "goodput": lambda r: r.goodput,
    "rejected": lambda r: r.rejected / r.offered,
    "ttft_mean_s": lambda r: r.ttft_s.mean,
    "ttft_p50_s": lambda r: r.ttft_s.p50,
    "ttft_p90_s": lambda r: r.ttft_s.p90,
    "ttft_p99_s": lambda r: r.ttft_s.p99,
    "tpot_mean_s": lambda r: r.tpot_s.mean,
    "tpot_p50_s": lambda r: r.tpot_s.p50,
    "tpot_p90_s": lambda r: r.tpot_s.p90,
    "tpot_p99_s": lambda r: r.tpot_s.p99,
    "e2e_mean_s": lambda r: r.e2e_s.mean,
    "e2e_p50_s": lambda r: r.e2e_s.p50,
    "e2e_p90_s": lambda r: r.e2e_s.p90,
    "e2e_p99_s": lambda r: r.e2e_s.p99,
    "hit_tokens": lambda r: r.hit,
    "preemptions": lambda r: float(r.preemptions),
    "held": lambda r: r.held / r.offered,
    "peak_to_mean": lambda r: r.peak_to_mean,
    "in_system_mean": lambda r: r.mean_in_system,
    "little": lambda r: r.little,
}
_COMPARED = ("goodput", "ttft_mean_s", "tpot_mean_s", "e2e_mean_s", "hit_tokens")
_LATENCIES = ("mean", "p50", "p90", "p99")


def make_report(comparison: Comparison, results: dict[Run, Result], baseline: int = 0) -> Report:
    """Means over seeds, and differences to the baseline, paired by seed, with their 95 % intervals."""
    cells = [
        _cell(comparison, results, variant, speedup, baseline)
        for speedup in comparison.speedups
        for variant in range(len(comparison.variants))
    ]
    base, offered = comparison.variants[baseline].policy, cells[0]["offered"]
    limits = comparison.limits
    return Report(
        f"{comparison.setting.workers} workers, {comparison.seeds} seeds, {offered} requests each",
        (
            "policy",
            "speedup",
            "goodput %",
            f"against {base}",
            "TTFT ms mean/p50/p90/p99",
            "TPOT ms",
            "E2E s",
            "hit %",
            "held %",
            "rejected %",
            "preempted",
            "peak/mean",
        ),
        tuple(_row(cell) for cell in cells),
        {"baseline": base, "seeds": comparison.seeds, "cells": cells},
        (
            f"goodput: of all offered, TTFT within {limits.ttft_s:g} s and TPOT within "
            f"{1e3 * limits.tpot_s:g} ms; the first tenth warms up and is not counted",
            "TTFT is time held, queue and prefill, without the network; in brackets a 95 % bootstrap "
            "interval of the mean difference, paired by seed",
            "requests in the system are arrival rate times stay (Little's law) to "
            f"{max(abs(1 - cell['little']) for cell in cells):.1e}",
        ),
    )


def _cell(
    comparison: Comparison, results: dict[Run, Result], variant: int, speedup: float, baseline: int
) -> dict[str, Any]:
    """JSON of one policy at one speedup; what is not finite is null."""
    seeds = range(1, comparison.seeds + 1)
    mine = [results[Run(variant, speedup, seed)] for seed in seeds]
    theirs = [results[Run(baseline, speedup, seed)] for seed in seeds]
    cell: dict[str, Any] = {
        "policy": comparison.variants[variant].policy,
        "options": dict(comparison.variants[variant].options),
        "speedup": speedup,
        "offered": mine[0].offered,
    }
    for name, figure in _FIGURES.items():
        values = [figure(result) for result in mine]
        cell[name] = _finite(fmean(values))
    goodputs = [result.goodput for result in mine]
    cell["goodput_stdev"] = stdev(goodputs) if len(goodputs) > 1 else None
    cell["difference"] = {
        name: _difference([_FIGURES[name](a) - _FIGURES[name](b) for a, b in zip(mine, theirs, strict=True)])
        for name in _COMPARED
    }
    return cell


def _difference(values: Sequence[float]) -> dict[str, Any]:
    bounds = interval(values)
    return {"mean": _finite(fmean(values)), "low": bounds and bounds[0], "high": bounds and bounds[1]}


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None


def _row(cell: dict[str, Any]) -> tuple[str, ...]:
    def show(name: str, factor: float, digits: int) -> str:
        value = cell[name]
        return "inf" if value is None else f"{factor * value:.{digits}f}"

    def spread(latency: str, factor: float, digits: int) -> str:
        return "/".join(show(f"{latency}_{which}_s", factor, digits) for which in _LATENCIES)

    difference = cell["difference"]["goodput"]
    against = f"{100 * difference['mean']:+.1f}"
    if difference["low"] is not None:
        against += f" [{100 * difference['low']:+.1f}, {100 * difference['high']:+.1f}]"
    return (
        cell["policy"],
        f"{cell['speedup']:g}",
        show("goodput", 100, 1),
        against,
        spread("ttft", 1e3, 0),
        spread("tpot", 1e3, 1),
        spread("e2e", 1, 1),
        show("hit_tokens", 100, 1),
        show("held", 100, 1),
        show("rejected", 100, 1),
        show("preemptions", 1, 0),
        show("peak_to_mean", 1, 2),
    )
