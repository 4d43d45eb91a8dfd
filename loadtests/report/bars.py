"""Hit rate by tier, stacked, and predictions held against what came."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvroute.loadtests.report.drawing import INK, TIERS, Picture, colour, new_figure, plain_logs, short
from kvroute.loadtests.report.groups import Cell, Entry
from kvroute.loadtests.results.rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TIER_ORDER = ("gpu", "cpu", "disk", "peer")
TIER_NAMES = {"gpu": "GPU", "cpu": "CPU"}
DRAWN_POINTS = 150
MAX_PANELS = 12
Floats = NDArray[np.float64]


def tiers(cell: Cell) -> list[str]:
    """Of any policy, from the fastest; unknown ones last."""
    found = set(chain.from_iterable(entry.row.hit_by_tier for entry in cell.entries))
    return [tier for tier in TIER_ORDER if tier in found] + sorted(found.difference(TIER_ORDER))


def hit_picture(cell: Cell, name: str) -> Picture | None:
    """None where no policy has a hit rate."""
    entries = cell.entries[::-1]
    if all(entry.row.token_hit_rate is None and not entry.row.hit_by_tier for entry in entries):
        return None
    shown = tiers(cell)
    figure, (axes,) = new_figure(1.3 + 0.27 * len(entries))
    ends = [0.0] * len(entries)
    for rank, tier in enumerate(shown):
        widths = [100 * (entry.row.hit_by_tier.get(tier) or 0) for entry in entries]
        fill: dict[str, Any] = {"color": TIERS[rank % len(TIERS)], "edgecolor": INK, "linewidth": 0.6}
        axes.barh(range(len(entries)), widths, left=ends, label=TIER_NAMES.get(tier, short(tier, 12)), **fill)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    for place, entry in enumerate(entries):
        _end_of_bar(axes, place, ends[place], entry.row)
    axes.set_yticks(range(len(entries)), [short(entry.label, 20) for entry in entries])
    axes.set(xlabel="% of prompt tokens", xlim=(0, max(10.0, 1.2 * max(ends + _totals(entries)))))
    axes.grid(visible=False, axis="y")
    if shown:
        figure.legend(loc="outside upper center", ncols=4, frameon=False, handlelength=1.2, columnspacing=1)
    text = "Prompt tokens found in a cache, of all prompt tokens, by the tier that had them."
    return Picture(f"{name}-hits", f"Hit rate by tier: {cell.title}", text, figure, by_policy=False)


def _totals(entries: tuple[Entry, ...]) -> list[float]:
    return [100 * entry.row.token_hit_rate for entry in entries if entry.row.token_hit_rate is not None]


def _end_of_bar(axes: Axes, place: int, end: float, row: Row) -> None:
    known = any(share is not None for share in row.hit_by_tier.values())
    total = end if known else row.token_hit_rate and 100 * row.token_hit_rate
    if total is None:
        axes.text(0.5, place, "not measured", va="center")
        return
    if not known:
        axes.barh([place], [total], facecolor="none", edgecolor=INK, hatch="///", linewidth=0.6)
    axes.text(total + 0.5, place, f"{total:.1f}" if known else f"{total:.1f} (tier unknown)", va="center")


@dataclass(frozen=True, slots=True)
class Error:
    """Of predicted against actual TTFT, over the pairs that a row has."""

    pairs: int
    median_share: float
    """Median of |predicted - actual| / actual."""
    p90_ms: float
    """90 % of predictions were off by at most so much."""
    bias_ms: float
    """Mean of predicted - actual."""


def prediction_error(row: Row) -> Error | None:
    """None without predictions."""
    pairs = _pairs(row)
    if not len(pairs):
        return None
    off = pairs[:, 0] - pairs[:, 1]
    size = np.abs(off)
    return Error(
        len(pairs), float(np.median(size / pairs[:, 1])), float(np.quantile(size, 0.9)), float(off.mean())
    )


def _pairs(row: Row) -> Floats:
    """Predicted and actual, ms; those of failures are left out."""
    found = [
        (predicted, actual)
        for predicted, actual in row.series.predicted_ms
        if predicted is not None and actual is not None and actual > 0
    ]
    return np.array(found, dtype=np.float64).reshape(-1, 2)


def _dots(axes: Axes, xs: Floats, ys: Floats, paint: str) -> None:
    """As one path of lines with no length and round ends: a tenth of the size of as many markers."""
    gaps = np.full(len(xs), np.nan)
    across, up = (np.stack([values, values, gaps], axis=1).ravel() for values in (xs, ys))
    (line,) = axes.plot(across, up, color=paint, linewidth=3, solid_capstyle="round", alpha=0.7)
    line.get_path().should_simplify = False  # that drops lines with no length


def prediction_picture(cell: Cell, name: str) -> Picture | None:
    """A panel per policy that predicts; None where none does."""
    found = [(entry, _pairs(entry.row) / 1e3) for entry in cell.entries]
    drawn = [(entry, pairs) for entry, pairs in found if len(pairs)][:MAX_PANELS]
    if not drawn:
        return None
    columns = 1 if len(drawn) == 1 else 2
    lines = -(-len(drawn) // columns)
    figure, panels = new_figure(0.3 + 3.0 / columns**0.7 * lines, lines, columns, sharex=True, sharey=True)
    ends = np.concatenate([pairs.ravel() for _, pairs in drawn])
    least, most = max(float(ends.min()), float(ends.max()) / 1e4, 1e-4), float(ends.max())
    for axes, (entry, pairs) in zip(panels, drawn, strict=False):
        few = np.clip(pairs[:: -(-len(pairs) // DRAWN_POINTS)], least, None)
        axes.plot((least, most), (least, most), color=INK, linewidth=1, linestyle=":")
        _dots(axes, few[:, 1], few[:, 0], colour(entry.style))
        error = prediction_error(entry.row)
        share = "" if error is None else f": {100 * error.median_share:.0f} %"
        axes.set_title(short(entry.label, 30 // columns) + share, loc="left")
        axes.set(xscale="log", yscale="log")
        plain_logs(axes.xaxis)
        plain_logs(axes.yaxis)
    for axes in panels[len(drawn) :]:
        axes.set_axis_off()
    for axes in panels[: len(drawn) : columns]:
        axes.set_ylabel("predicted, s")
    for axes in panels[: len(drawn)][-columns:]:
        axes.set_xlabel("actual, s")
        axes.tick_params(labelbottom=True)
    return Picture(
        f"{name}-predicted",
        f"Predicted against actual TTFT: {cell.title}",
        "From the choice of a worker to the first token, one seed. A prediction on the dotted line is right. "
        "Beside the name, the median error; more in the table.",
        figure,
        by_policy=False,
    )
