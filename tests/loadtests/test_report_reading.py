"""What the report claims, and what its figures are drawn from."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from kvroute.loadtests.report.bars import prediction_error
from kvroute.loadtests.report.curves import knee, points
from kvroute.loadtests.report.groups import Cell, Entry, group
from kvroute.loadtests.report.reading import best_or_open, read_cell, read_group, verdict
from kvroute.loadtests.report.timelines import _lay, _shrunk
from kvroute.loadtests.results.rows import Row


def row(policy: str, goodput: float | None, bounds: tuple[float, float] | None = None, **more: Any) -> Row:
    given = {
        **{"policy": policy, "speed": 1.0, "workers": 8, "goodput": goodput, "token_hit_rate": None},
        **{"ttft_ms": {}, "tpot_ms": {}, "e2e_ms": {}, "rejected": 0.0, "failed": 0.0},
        **{"ci95": {"goodput": bounds}, **more},
    }
    return msgspec.convert(given, Row)


def cell(*given: Row) -> Cell:
    (only,) = group(given)
    return only.cells[0]


def entries(*given: Row) -> tuple[Entry, ...]:
    return cell(*given).entries


def paired(against: str, low: float, high: float) -> dict[str, Any]:
    return {"against": against, "figures": {"goodput": [(low + high) / 2, low, high]}}


def test_apart_intervals_are_a_difference_and_touching_ones_are_none() -> None:
    a, b, c = entries(row("a", 0.8, (0.75, 0.85)), row("b", 0.7, (0.65, 0.74)), row("c", 0.7, (0.65, 0.75)))
    assert verdict(a, b, "goodput").told_apart
    assert verdict(b, a, "goodput").told_apart
    assert not verdict(a, c, "goodput").told_apart


def test_a_paired_interval_decides_before_the_policies_own() -> None:
    wide = (0.5, 0.9)
    a, b = entries(row("a", 0.8, wide, paired=paired("b", 0.01, 0.02)), row("b", 0.78, wide))
    assert verdict(a, b, "goodput", 100).why == "paired by seed, 95 % interval 1 to 2"
    assert verdict(a, b, "goodput").told_apart
    a, b = entries(row("a", 0.9, (0.89, 0.91)), row("b", 0.7, (0.69, 0.71), paired=paired("a", -0.4, 0.01)))
    assert not verdict(a, b, "goodput").told_apart
    assert verdict(a, b, "goodput").why.endswith("which contains 0")


def test_one_seed_claims_nothing() -> None:
    one = cell(row("a", 0.9), row("b", 0.1))
    assert best_or_open(one) == ["a", "b"]
    assert read_cell(one)[0] == (
        "a has the most goodput, 90.0 %. Next is b with 10.0 %, 80.0 points less: without intervals, "
        "so no difference is claimed."
    )


def test_goodput_is_read_with_all_that_is_not_told_apart() -> None:
    four = cell(
        row("a", 0.6, (0.55, 0.65)),
        row("b", 0.8, (0.75, 0.85), paired=paired("a", 0.19, 0.21)),
        row("c", 0.79, (0.74, 0.84)),
        row("d", 0.76, (0.71, 0.81)),
    )
    assert read_cell(four)[0] == (
        "b has the most goodput, 80.0 % (75.0 to 85.0). Next is c with 79.0 % (74.0 to 84.0), 1.0 points "
        "less: the 95 % intervals overlap, so no difference is claimed. Nor is it told apart from d. "
        "Against a: +20.0 points (+19.0 to +21.0, paired by seed)."
    )
    assert best_or_open(four) == ["b", "c", "d"]


def test_failures_are_told_beside_the_mean_that_leaves_them_out() -> None:
    said = read_cell(cell(row("a", 0.5, ttft_ms={"mean": 100.0}, rejected=0.1, failed=0.02), row("b", 0.5)))
    assert "The mean leaves out 12.0 % that were rejected or failed." in " ".join(said)
    assert "Rejected: a 10 %. Failed: a 2 %." in said


def test_the_knee_is_the_load_of_most_good_requests_when_more_was_measured() -> None:
    curve = [(1.0, 10.0, 0.9), (2.0, 20.0, 0.8), (3.0, 30.0, 0.4)]
    rows = [row("a", good, speed=speed, offered_per_s=rate) for speed, rate, good in curve]
    rows += [row("b", 0.9, speed=speed, offered_per_s=rate) for speed, rate, _ in curve]
    rows += [row("c", 1 / speed**2, speed=speed, offered_per_s=rate) for speed, rate, _ in curve]
    (only,) = group(rows)
    at = {label: knee(points(only, label)) for label in "abc"}
    assert (at["a"] and at["a"].offered, at["b"], at["c"] and at["c"].offered) == (20.0, None, 10.0)
    assert read_group(only)[-1].endswith(
        "per second: 20 requests/s for a; not reached by b; at or below 10 requests/s for c."
    )
    assert knee(points(only, "a")[:1]) is None


def test_without_rates_the_load_is_the_speed() -> None:
    (only,) = group([row("a", 0.5, speed=1.0, offered_per_s=10), row("a", 0.4, speed=2.0)])
    assert [point.offered for point in points(only, "a")] == [1.0, 2.0]


def test_error_of_predictions() -> None:
    pairs = [[110.0, 100.0], [150.0, 200.0], [400.0, 400.0], [None, 5.0], [5.0, None], [1.0, 0.0]]
    error = prediction_error(row("a", None, series={"predicted_ms": pairs}))
    assert error is not None
    assert (error.pairs, error.median_share, error.bias_ms) == (3, 0.1, pytest.approx(-40 / 3))
    assert error.p90_ms == pytest.approx(42.0)
    assert prediction_error(row("a", None)) is None


def test_requests_at_once_lie_on_lanes_of_their_own() -> None:
    phases: dict[str, list[Any]] = {"waits": [], "prefill": [], "decode": [], "waits or prefill": []}
    spans = [("w", 0.0, 1.0, 2.0, 5.0), ("w", 1.0, None, 3.0, 4.0), ("w", 4.5, 5.0, 6.0, None)]
    assert _lay(spans, 10, 9.0, phases) == 2
    assert phases == {
        "waits": [(0.0, 1.0, 10.0), (4.5, 5.0, 11.0)],
        "prefill": [(1.0, 2.0, 10.0), (5.0, 6.0, 11.0)],
        "decode": [(2.0, 5.0, 10.0), (3.0, 4.0, 11.0), (6.0, 9.0, 11.0)],
        "waits or prefill": [(1.0, 3.0, 11.0)],
    }


def test_a_thousand_workers_are_drawn_by_the_fullest_of_neighbours() -> None:
    grid = np.zeros((1000, 1000))
    grid[17] = 7.0
    shrunk = _shrunk(grid)
    assert shrunk.shape == (63, 112)
    assert shrunk[1].tolist() == [7.0] * 112
    assert shrunk.sum() == 7.0 * 112
