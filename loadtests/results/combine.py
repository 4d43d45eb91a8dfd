"""From runs to rows: means over seeds, bootstrap intervals, differences paired by seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import msgspec
import numpy as np

from kvroute.loadtests.results.figures import Facts, figures, latencies
from kvroute.loadtests.results.little import NotClaimed, little
from kvroute.loadtests.results.measured import Limits, Measured
from kvroute.loadtests.results.rows import Bounds, Paired, Row, Series
from kvroute.loadtests.results.series import series

RESAMPLES = 10_000
WARM_UP = 0.1
OF_THE_MACHINE = frozenset({"decision_us"})
"""Figures that differ when a run is made again; the others of a simulation do not."""


@dataclass(frozen=True, slots=True)
class Result:
    """One run of one seed."""

    figures: Mapping[str, float]
    little_reason: str | None = None
    series: Series | None = None


def result(
    measured: Sequence[Measured],
    facts: Facts,
    limits: Limits,
    warm_up: int = 0,
    with_series: bool = False,
) -> Result:
    """Of all requests of a run in order of arrival; the first `warm_up` do not count.

    ValueError when none is left.
    """
    counted = measured[warm_up:]
    times = latencies(counted)
    made = figures(counted, facts, limits, times)
    law = little(counted)
    return Result(
        made,
        law.reason if isinstance(law, NotClaimed) else None,
        series(measured, counted, facts, times) if with_series else None,
    )


def intervals(values: Sequence[Sequence[float]], seed: int = 0) -> list[Bounds | None]:
    """95 % bootstrap interval of the mean of each column (rows are seeds, columns figures).

    None for fewer than two seeds, or where a value is not finite.
    """
    table = np.asarray(values, dtype=np.float64)
    seeds, columns = table.shape
    known = np.asarray(np.isfinite(table).all(axis=0))
    if seeds < 2 or not known.any():
        return [None] * columns
    draws = np.random.default_rng(seed).multinomial(seeds, [1 / seeds] * seeds, RESAMPLES)
    low, high = np.quantile(draws @ table[:, known] / seeds, (0.025, 0.975), axis=0)
    bounds = iter(zip(low.tolist(), high.tolist(), strict=True))
    return [next(bounds) if one else None for one in known]


def make_row(
    results: Sequence[Result],
    limits: Limits,
    about: Mapping[str, Any],
    against: tuple[str, Sequence[Result]] | None = None,
) -> Row:
    """Of one policy, a result per seed. `about` says what they are of: policy, speed, workers, trace.

    `against` is another policy's name and its results over the same seeds.
    """
    names = list(results[0].figures)
    table = [[one.figures[name] for name in names] for one in results]
    data: dict[str, Any] = {}
    for name, mean in zip(names, _means(table), strict=True):
        place, dot, inner = name.partition(".")
        if dot:
            data.setdefault(place, {})[inner] = mean
        else:
            data[place] = mean
    return msgspec.convert(
        {
            **about,
            **data,
            "seeds": len(results),
            "limits": {"ttft_s": limits.ttft_s, "tpot_s": limits.tpot_s},
            "ci95": dict(zip(names, _unless(_is_repeated(results), table), strict=True)),
            "little_reason": next((one.little_reason for one in results if one.little_reason), None),
            "paired": None if against is None else paired(results, *against),
            "series": results[0].series or Series(),
        },
        Row,
        from_attributes=True,
    )


def paired(results: Sequence[Result], name: str, others: Sequence[Result]) -> Paired:
    """Differences to another policy."""
    names = list(results[0].figures)
    table = [
        [mine.figures[name] - theirs.figures[name] for name in names]
        for mine, theirs in zip(results, others, strict=True)
    ]
    bounds_of = _unless(_is_repeated(results) and _is_repeated(others), table)
    return Paired(
        name,
        {
            name: (mean, *(bounds or (None, None)))
            for name, mean, bounds in zip(names, _means(table), bounds_of, strict=True)
        },
    )


def _unless(is_repeated: bool, table: Sequence[Sequence[float]]) -> list[Bounds | None]:
    """`intervals`, but none of one run made again and again: its width of 0 would pass for certainty."""
    return intervals(table[:1] if is_repeated else table)


def _is_repeated(results: Sequence[Result]) -> bool:
    """Whether every seed came to the very same, as where nothing about the requests is drawn."""
    names = [name for name in results[0].figures if name not in OF_THE_MACHINE]
    table = np.array([[one.figures[name] for name in names] for one in results])
    return bool(np.array_equal(table, np.broadcast_to(table[0], table.shape), equal_nan=True))


def _means(table: Sequence[Sequence[float]]) -> list[float | None]:
    """None where a value is not finite."""
    means = [sum(column) / len(column) for column in zip(*table, strict=True)]
    return [mean if isfinite(mean) else None for mean in means]
