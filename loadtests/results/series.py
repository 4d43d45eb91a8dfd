"""What plots are drawn from: curves of one run, bounded in size however long it was."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import numpy as np

from kvroute.loadtests.results.figures import Facts, Latencies, Ranked
from kvroute.loadtests.results.load import inside, workers_of
from kvroute.loadtests.results.measured import Measured
from kvroute.loadtests.results.packed import those
from kvroute.loadtests.results.rows import Gantt, Load, Series, Span

MOMENTS = 200
MAX_COUNTS = 20_000
"""Moments times workers."""
GANTT_S = 30.0
MAX_SPANS = 400
MAX_PREDICTED = 500


def series(
    measured: Sequence[Measured], counted: Sequence[Measured], facts: Facts, times: Latencies
) -> Series:
    """Curves of a run: load over all of it, the rest of those that count."""
    served = those(measured, lambda one: one.failure is None and one.end_s is not None)
    load = _load(served, facts)
    return Series(
        _quantiles(times.ttft), _quantiles(times.itl), load, _gantt(served, load), _predicted(counted)
    )


def _quantiles(ranked: Ranked) -> list[float | None]:
    return [_ms(value) if isfinite(value) else None for value in ranked.at(np.linspace(0, 1, 101))]


def _load(served: Sequence[Measured], facts: Facts) -> Load:
    workers = workers_of(served, facts.groups)
    if not served or not workers:
        return Load(workers=workers)
    moments = max(2, min(MOMENTS, MAX_COUNTS // len(workers)))
    last_s = max(one.end_s for one in served if one.end_s is not None)
    at_s = [round(float(moment), 3) for moment in np.linspace(served[0].arrival_s, last_s, moments)]
    return Load(at_s, inside(served, workers, at_s), workers)


def _gantt(served: Sequence[Measured], load: Load) -> Gantt:
    """All requests of as many workers as `MAX_SPANS` allows, the first ones; of one at least."""
    if not load.at_s:
        return Gantt()
    totals = np.array(load.requests, dtype=np.int64).sum(axis=0)
    from_s = max(load.at_s[0], load.at_s[int(totals.argmax())] - GANTT_S / 2)
    to_s = from_s + GANTT_S
    spans: dict[str, list[Span]] = {worker: [] for worker in load.workers}
    for one in served:
        if one.worker in spans and one.arrival_s < to_s and one.end_s is not None and one.end_s >= from_s:
            place = load.workers.index(one.worker)
            times = (_s(one.start_s), _s(one.first_s), _s(one.end_s))
            spans[one.worker].append((place, round(one.arrival_s, 4), *times))
    shown: list[Span] = []
    for worker in load.workers:
        if shown and len(shown) + len(spans[worker]) > MAX_SPANS:
            break
        shown += spans[worker][:MAX_SPANS]
    return Gantt(round(from_s, 3), round(to_s, 3), sorted(shown, key=lambda span: span[1]))


def _predicted(counted: Sequence[Measured]) -> list[tuple[float, float]]:
    """Evenly picked."""
    pairs = [
        (_ms(one.predicted_ttft_s), _ms(one.first_s - one.sent_s))
        for one in counted
        if one.predicted_ttft_s is not None and one.first_s is not None and one.sent_s is not None
    ]
    if len(pairs) <= MAX_PREDICTED:
        return pairs
    return [pairs[int(place)] for place in np.linspace(0, len(pairs) - 1, MAX_PREDICTED)]


def _s(time_s: float | None) -> float | None:
    return None if time_s is None else round(time_s, 4)


def _ms(time_s: float) -> float:
    return round(time_s * 1e3, 3)
