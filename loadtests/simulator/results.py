"""What a run came to: latencies, goodput, hits and load, without the warm-up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvroute.loadtests.simulator.simulation import Record, Simulation

WARM_UP = 0.1
"""Share of the requests, the first to arrive, that are not counted."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request must keep to be a good one; TPOT is undefined, and kept, for a single token."""

    ttft_s: float = 2.0
    tpot_s: float = 0.025

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one latency; failures count as infinite in the percentiles, not in the mean."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Result:
    """One policy, one list of arrivals. Seconds, and shares of 1."""

    offered: int
    rejected: int
    goodput: float
    """Requests that keep every limit, of all offered."""
    ttft_s: Spread
    """From the arrival: held time, queue and prefill; no network."""
    tpot_s: Spread
    e2e_s: Spread
    hit: float
    """Prompt tokens found in the engines' caches, of all prompt tokens that were run."""
    prefill_tokens: int
    preemptions: int
    peak_to_mean: float
    """Requests of the worker that was sent most, to the mean."""
    held: int
    """Requests whose worker was not chosen on arrival."""
    mean_in_system: float
    """Measured over all of the run, warm-up too: time average of the requests inside."""
    little: float
    """Arrival rate times mean stay, over `mean_in_system`: 1, by Little's law."""
    duration_s: float


def summarize(
    simulation: Simulation,
    records: Sequence[Record],
    limits: Limits | None = None,
    warm_up: float = WARM_UP,
) -> Result:
    """The figures of a finished run."""
    if not records:
        raise ValueError("there were no requests")
    limits = limits or Limits()
    counted = records[int(len(records) * warm_up) :]
    token_s = simulation.setting.token_overhead_s
    rows = [_times(record, token_s) for record in counted]
    times = np.array(rows, dtype=np.float64)
    ttft, tpot, e2e = times[:, 0], times[:, 1], times[:, 2]
    good = (ttft <= limits.ttft_s) & ~(tpot > limits.tpot_s)
    run = [record for record in counted if record.end_s is not None]
    prompt_tokens = sum(record.arrival.view.prompt_tokens for record in run)
    sent = np.bincount([record.worker for record in run], minlength=len(simulation.engines))
    duration_s = simulation.now_s - records[0].arrival.arrival_s
    inside_s = simulation.running_integral_s
    return Result(
        offered=len(counted),
        rejected=len(counted) - len(run),
        goodput=float(good.mean()),
        ttft_s=_spread(ttft),
        tpot_s=_spread(tpot[~np.isnan(tpot)]),
        e2e_s=_spread(e2e),
        hit=sum(record.cached_tokens for record in run) / max(prompt_tokens, 1),
        prefill_tokens=sum(engine.scheduler.totals.prefill_tokens for engine in simulation.engines),
        preemptions=sum(engine.scheduler.totals.preemptions for engine in simulation.engines),
        peak_to_mean=float(sent.max() / sent.mean()) if run else 0.0,
        held=sum(
            record.placed_s is not None and record.placed_s > record.arrival.arrival_s for record in counted
        ),
        mean_in_system=inside_s / duration_s if duration_s else 0.0,
        little=simulation.stays_s / inside_s if inside_s else 1.0,
        duration_s=duration_s,
    )


def _times(record: Record, token_s: float) -> tuple[float, float, float]:
    """TTFT, TPOT, E2E; infinite for a failure, TPOT not a number for one token."""
    if record.first_s is None or record.end_s is None:
        return float("inf"), float("inf"), float("inf")
    more = record.arrival.output_tokens - 1
    arrival_s = record.arrival.arrival_s
    tpot_s = (record.end_s - record.first_s) / more + token_s if more else float("nan")
    return record.first_s - arrival_s, tpot_s, record.end_s - arrival_s + token_s * more


def _spread(values: NDArray[np.float64]) -> Spread:
    if not len(values):
        return Spread(*[float("nan")] * 4)
    finite = values[np.isfinite(values)]
    mean = float(finite.mean()) if len(finite) else float("inf")
    ranked = np.sort(values)
    last = len(ranked) - 1
    at = [float(ranked[round(share * last)]) for share in (0.5, 0.9, 0.99)]
    return Spread(mean, *at)
