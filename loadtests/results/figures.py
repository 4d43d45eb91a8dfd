"""The figures of one run. A figure's name is its path in the JSON of results: "goodput", "ttft_ms.p99"."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvroute.loadtests.results.little import NotClaimed, little
from kvroute.loadtests.results.load import peak_to_mean
from kvroute.loadtests.results.measured import Limits, Measured
from kvroute.loadtests.results.packed import those

TIERS = ("gpu", "cpu", "disk", "peer")
SHARES = (0.5, 0.9, 0.99)
LIMITS: dict[str, Limits] = {
    "2 s / 25 ms": Limits(2.0, 0.025),
    "30 s / 100 ms": Limits(30.0, 0.1),
    "30 s / 300 ms": Limits(30.0, 0.3),
    "500 ms + 250 us per uncached token / 25 ms": Limits(0.5, 0.025, 0.00025),
}
"""Goodput is told by each of them, beside the one that was asked for."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Facts:
    """What a run knows besides its requests; None where nobody tells."""

    groups: tuple[tuple[str, ...], ...] = ()
    """Ids of all workers, of those that do the same work together; without, those that are seen."""
    saved_s: Callable[[int, int], float] | None = None
    """Seconds of an engine that so many cached tokens save of a prompt of so many: (prompt, cached)."""
    preemptions: int | None = None
    decision_us: float | None = None
    """CPU microseconds that the router took for one decision, on the average."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """Values in order, each as often as its weight says; infinite ones are the last."""

    values: Floats
    ends: Floats = field(repr=False)
    """Cumulated weights."""

    @classmethod
    def of(cls, values: Sequence[float] | Floats, weights: Sequence[float] | Floats | None = None) -> Ranked:
        given = np.asarray(values, dtype=np.float64)
        weighed = np.ones(len(given)) if weights is None else np.asarray(weights, dtype=np.float64)
        order = np.argsort(given, kind="stable")
        return cls(given[order], np.cumsum(weighed[order]))

    def at(self, shares: Sequence[float] | Floats) -> list[float]:
        """Quantiles by nearest rank; not a number where there are no values."""
        if not len(self.values):
            return [float("nan")] * len(shares)
        ranks = np.round(np.asarray(shares) * (self.ends[-1] - 1))
        places = np.minimum(np.searchsorted(self.ends, ranks, side="right"), len(self.values) - 1)
        return [float(value) for value in self.values[places]]

    @property
    def mean(self) -> float:
        """Of the finite ones; infinite when there are only others."""
        finite = int(np.searchsorted(self.values, np.inf))
        if not finite:
            return float("inf") if len(self.values) else float("nan")
        weights = np.diff(self.ends[:finite], prepend=0.0)
        return float(np.average(self.values[:finite], weights=weights))


@dataclass(frozen=True, slots=True)
class Latencies:
    """Of the requests that count, in seconds; failures are infinite."""

    ttft: Ranked
    """From arrival; what else is in it is up to the run."""
    tpot: Ranked
    """Per request; those of one token have none."""
    itl: Ranked
    """Per gap. Of each request, the longest gap as measured and the others at their mean."""
    e2e: Ranked


def latencies(counted: Sequence[Measured]) -> Latencies:
    """All four."""
    tpot = np.array([one.tpot_s for one in counted])
    gaps, weights = array("d"), array("d")
    for one in counted:
        for gap_s, count in _gaps(one):
            gaps.append(gap_s)
            weights.append(count)
    return Latencies(
        Ranked.of([one.ttft_s for one in counted]),
        Ranked.of(tpot[~np.isnan(tpot)]),
        Ranked.of(np.asarray(gaps), np.asarray(weights)),
        Ranked.of([one.e2e_s for one in counted]),
    )


def _gaps(one: Measured) -> list[tuple[float, int]]:
    """(seconds, how many): of a failure as many infinite ones as were asked for."""
    gaps = one.output_tokens - 1
    if gaps < 1:
        return []
    if one.failure is not None or one.first_s is None or one.end_s is None:
        return [(float("inf"), gaps)]
    total_s, longest_s = one.end_s - one.first_s, one.longest_gap_s
    if longest_s is None or gaps == 1:
        return [(total_s / gaps, gaps)]
    return [(longest_s, 1), (max(total_s - longest_s, 0.0) / (gaps - 1), gaps - 1)]


def figures(counted: Sequence[Measured], facts: Facts, limits: Limits, times: Latencies) -> dict[str, float]:
    """Every figure by name; infinite where failures make it so, not a number where it cannot be told.

    `counted` are the requests after the warm-up, at least one.
    """
    if not counted:
        raise ValueError("no request counts; there must be more than the warm-up takes")
    served = those(counted, lambda one: one.failure is None)
    offered = len(counted)
    rejected = sum(one.rejected for one in counted)
    made = {
        "offered": float(offered),
        "offered_per_s": _per_s(counted),
        "goodput": goodput(counted, limits),
        **{f"goodput_by_limit.{name}": goodput(counted, one) for name, one in LIMITS.items()},
        **_spread("ttft_ms", times.ttft),
        **_spread("tpot_ms", times.tpot),
        **_spread("itl_ms", times.itl),
        **_spread("e2e_ms", times.e2e),
        **_spread(
            "sent_after_ms",
            Ranked.of([one.sent_s - one.arrival_s for one in served if one.sent_s is not None]),
        ),
        **_hits(served, facts),
        "rejected": rejected / offered,
        "failed": (offered - len(served) - rejected) / offered,
        "retries": sum(one.retries for one in counted) / offered,
        "preemptions": _known(facts.preemptions),
        "peak_to_mean": peak_to_mean(served, facts.groups),
        "decision_us": _known(facts.decision_us),
    }
    law = little(counted)
    made["little"] = float("nan") if isinstance(law, NotClaimed) else law
    return made


def goodput(counted: Sequence[Measured], limits: Limits) -> float:
    """Share of all offered requests that kept the limits; who failed or was refused did not."""
    good = 0
    for one in counted:
        allowed_s = limits.ttft_s + limits.ttft_s_per_token * (one.prompt_tokens - one.cached_tokens)
        good += one.ttft_s <= allowed_s and not one.tpot_s > limits.tpot_s
    return good / len(counted)


def _hits(served: Sequence[Measured], facts: Facts) -> Mapping[str, float]:
    prompt_tokens = sum(one.prompt_tokens for one in served)
    tokens = {tier: sum(getattr(one, f"{tier}_tokens") for one in served) for tier in TIERS}
    skipped, requests = sum(tokens.values()), len(served)
    saved_s = float("nan")
    if facts.saved_s is not None:
        saved_s = sum(
            facts.saved_s(one.prompt_tokens, one.cached_tokens) for one in served if one.cached_tokens
        )
    return {
        "token_hit_rate": _ratio(skipped, prompt_tokens),
        "request_hit_rate": _ratio(sum(one.cached_tokens > 0 for one in served), requests),
        **{f"hit_by_tier.{tier}": _ratio(count, prompt_tokens) for tier, count in tokens.items()},
        "prefix_loaded_tokens": _ratio(skipped - tokens["gpu"], requests),
        "prefill_tokens_skipped": float(skipped),
        "gpu_seconds_saved": saved_s,
    }


def _spread(name: str, ranked: Ranked) -> dict[str, float]:
    """In milliseconds."""
    p50, p90, p99 = ranked.at(SHARES)
    return {
        f"{name}.mean": ranked.mean * 1e3,
        f"{name}.p50": p50 * 1e3,
        f"{name}.p90": p90 * 1e3,
        f"{name}.p99": p99 * 1e3,
    }


def _per_s(counted: Sequence[Measured]) -> float:
    span_s = counted[-1].arrival_s - counted[0].arrival_s
    return (len(counted) - 1) / span_s if span_s > 0 else float("nan")


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")


def _known(value: float | None) -> float:
    return float("nan") if value is None else float(value)
