"""Requests inside each worker, as intervals of time: who did most, and how many when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvroute.loadtests.results.measured import Measured


def stays(served: Sequence[Measured]) -> Iterator[tuple[str, float, float]]:
    """(worker, from, to): one for each request, two where another worker prefilled it than decoded it."""
    for one in served:
        if one.sent_s is None or one.end_s is None or not one.worker:
            continue
        if one.first_s is not None and one.prefill_worker not in {"", one.worker}:
            yield one.prefill_worker, one.sent_s, one.first_s
            yield one.worker, one.first_s, one.end_s
        else:
            yield one.worker, one.sent_s, one.end_s


def workers_of(served: Sequence[Measured], groups: Sequence[Sequence[str]]) -> list[str]:
    """Those of the groups in their order, or else those that are seen, by name."""
    known = [id_ for group in groups for id_ in group]
    return known or sorted({worker for worker, _, _ in stays(served)})


def peak_to_mean(served: Sequence[Measured], groups: Sequence[Sequence[str]]) -> float:
    """Time average of requests inside the fullest worker to the mean of its group: of the worst group.

    Not a number where no worker is known by name.
    """
    inside_s: dict[str, float] = {}
    for worker, begin_s, end_s in stays(served):
        inside_s[worker] = inside_s.get(worker, 0.0) + end_s - begin_s
    worst = float("nan")
    for group in groups or [sorted(inside_s)]:
        times = [inside_s.get(worker, 0.0) for worker in group]
        if sum(times):
            worst = float(np.nanmax([worst, max(times) * len(times) / sum(times)]))
    return worst


def inside(served: Sequence[Measured], workers: Sequence[str], at_s: Sequence[float]) -> list[list[int]]:
    """Per worker, the number inside at each of the moments."""
    begins: dict[str, list[float]] = {worker: [] for worker in workers}
    ends: dict[str, list[float]] = {worker: [] for worker in workers}
    for worker, begin_s, end_s in stays(served):
        if worker in begins:
            begins[worker].append(begin_s)
            ends[worker].append(end_s)
    return [
        (
            np.searchsorted(np.sort(begins[worker]), at_s, side="right")
            - np.searchsorted(np.sort(ends[worker]), at_s, side="right")
        ).tolist()
        for worker in workers
    ]
