"""From what was played to rows of results, and to what must be said beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite
from typing import Any

import numpy as np

from kvroute.loadtests.replay.gaps import Gaps
from kvroute.loadtests.replay.player import AT_LIMIT, Played
from kvroute.loadtests.results.combine import Result, make_row
from kvroute.loadtests.results.figures import Facts, Ranked, figures, latencies
from kvroute.loadtests.results.little import NotClaimed, little
from kvroute.loadtests.results.measured import Limits, Measured
from kvroute.loadtests.results.rows import Row
from kvroute.loadtests.results.series import series

TTFT_INCLUDES = (
    "from when a request was due until this client read its first token: how late it was sent, network, "
    "tokenising, lookup, queueing, prefill and KV transfer"
)
LAG_BOUND_S = 0.02
"""Of the 99th percentile: beyond it this client was too slow for its own schedule."""


@dataclass(frozen=True, slots=True)
class Lag:
    """How late requests were sent, in milliseconds."""

    mean: float
    p50: float
    p99: float
    max: float

    @classmethod
    def of(cls, lags_s: Sequence[float]) -> Lag:
        """Zeros without any."""
        lags_ms = np.array(lags_s or [0.0]) * 1e3
        p50, p99 = np.quantile(lags_ms, (0.5, 0.99), method="nearest")
        return cls(*(round(float(one), 3) for one in (lags_ms.mean(), p50, p99, lags_ms.max())))


@dataclass(frozen=True, slots=True)
class Counted:
    """One latency of the requests that count, in milliseconds. Failures are infinite in the percentiles,
    then None, and not part of the mean.
    """

    mean: float | None
    p50: float | None
    p99: float | None

    @classmethod
    def of(cls, values_s: Sequence[float]) -> Counted:
        """By nearest rank."""
        ranked = Ranked.of(values_s)
        found_ms = (one * 1e3 for one in (ranked.mean, *ranked.at((0.5, 0.99))))
        return cls(*(round(one, 3) if isfinite(one) else None for one in found_ms))

    def __str__(self) -> str:
        return "/".join("inf" if one is None else f"{one:.1f}" for one in (self.mean, self.p50, self.p99))


def from_sending(rounds: Sequence[Played], warm_up: int) -> dict[str, Counted]:
    """TTFT and E2E from when a request was sent, not from when it was due, of all rounds together.

    aiperf counts so (0.13: from before the connection is taken; `RequestRecord.start_perf_ns`), and so do
    the benchmarks of vLLM and SGLang. A client that is late does not see it in these.
    """
    made = [one for played in rounds for one in _counted(played, warm_up)]
    lags_s = [0.0 if one.sent_s is None else one.sent_s - one.arrival_s for one in made]
    return {
        "ttft": Counted.of([one.ttft_s - lag_s for one, lag_s in zip(made, lags_s, strict=True)]),
        "e2e": Counted.of([one.e2e_s - lag_s for one, lag_s in zip(made, lags_s, strict=True)]),
    }


def _counted(played: Played, warm_up: int) -> list[Measured]:
    """In order of arrival, without the first `warm_up`, or with them where there are no others."""
    requests = sorted(played.requests, key=lambda made: made.arrival_s)
    return requests[warm_up:] or requests


def result(played: Played, limits: Limits, warm_up: int, first: bool) -> Result:
    """Figures of one run without its first `warm_up` requests, or with them where there are no others.

    The `first` run gets the curves too. ValueError when there was no request.
    """
    counted = _counted(played, warm_up)
    times = replace(latencies(counted), itl=_itl(counted, played.gaps))
    facts, law = Facts(), little(counted)
    return Result(
        figures(counted, facts, limits, times),
        law.reason if isinstance(law, NotClaimed) else None,
        series(_counted(played, 0), counted, facts, times) if first else None,
    )


def _itl(counted: Sequence[Measured], gaps: Gaps) -> Ranked:
    """Every gap as measured, those of failures infinite."""
    values, counts = gaps.table()
    failed = sum(one.output_tokens - 1 for one in counted if one.failure is not None)
    if failed:
        values, counts = [*values, float("inf")], [*counts, failed]
    return Ranked.of(values, counts)


def row(
    name: str,
    rounds: Sequence[Played],
    limits: Limits,
    about: dict[str, Any],
    warm_up: int,
    against: tuple[str, Sequence[Result]] | None = None,
) -> tuple[Row, Sequence[Result]]:
    """Of one target over all rounds, and the figures of each.

    `about` has speed, trace, warm_up and setting.
    """
    results = [result(played, limits, warm_up, not number) for number, played in enumerate(rounds)]
    workers = {made.worker for played in rounds for made in played.requests if made.worker}
    requests = [made for played in rounds for made in played.requests]
    setting = {
        **about["setting"],
        "ttft_includes": TTFT_INCLUDES,
        "lag_ms": asdict(Lag.of(lags_s(rounds))),
        "from_sending_ms": {name: asdict(one) for name, one in from_sending(rounds, warm_up).items()},
        "failures": dict(Counter(made.failure for made in requests if made.failure is not None)),
        "most_in_flight": max(played.most_in_flight for played in rounds),
        "other_length": sum(played.other_length for played in rounds),
        "rounds": [_round(one) for one in results],
    }
    made = {
        **about,
        "policy": name,
        "workers": len(workers) or "unknown",
        "source": "live",
        "setting": setting,
    }
    return make_row(results, limits, made, against), results


def lags_s(rounds: Sequence[Played]) -> list[float]:
    """Of all requests that were sent."""
    return [lag_s for played in rounds for lag_s in played.lags_s]


_SHOWN = ("ttft_ms.mean", "ttft_ms.p50", "ttft_ms.p99", "tpot_ms.p50", "goodput", "token_hit_rate", "failed")


def _round(one: Result) -> dict[str, float | None]:
    """What rounds are compared by."""
    return {name: round(value, 4) if isfinite(value := one.figures[name]) else None for name in _SHOWN}


def notes(name: str, rounds: Sequence[Played], warm_up: int) -> list[str]:
    """What must be known of a target's figures: the schedule, failures, what was not as asked."""
    lag, sent = Lag.of(lags_s(rounds)), from_sending(rounds, warm_up)
    said = [
        f"{name}: sent {lag.mean:.1f} ms late on average, p50 {lag.p50:.1f}, p99 {lag.p99:.1f}, max "
        f"{lag.max:.1f}; at most {max(played.most_in_flight for played in rounds)} in flight",
        f"{name}: from sending, as most clients count, mean/p50/p99: TTFT {sent['ttft']} ms, "
        f"E2E {sent['e2e']} ms",
    ]
    if lag.p99 > LAG_BOUND_S * 1e3:
        said.append(
            f"{name}: warning: the p99 is over {LAG_BOUND_S * 1e3:g} ms: this client was too slow for its "
            "own schedule, and its figures are the client's too; try --jobs, or another machine"
        )
    failures = Counter(made.failure for played in rounds for made in played.requests if made.failure)
    if failures:
        said.append(
            f"{name}: failed: " + ", ".join(f"{why} {count}" for why, count in failures.most_common())
        )
    if AT_LIMIT in failures:
        said.append(
            f"{name}: warning: {failures[AT_LIMIT]} requests were not sent: --max-in-flight was reached"
        )
    other = sum(played.other_length for played in rounds)
    if other:
        said.append(f"{name}: warning: {other} answers were not of the length that was asked for")
    cut = sum(played.cut for played in rounds)
    if cut:
        said.append(f"{name}: stopped: {cut} requests were under way, and are in no figure")
    return said
