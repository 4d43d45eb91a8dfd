"""Goodput against offered load, and the distributions of latencies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvroute.loadtests.report.drawing import INK, Picture, colour, line_style, new_figure, plain_logs, short
from kvroute.loadtests.report.groups import Cell, Group


@dataclass(frozen=True, slots=True)
class Point:
    """One policy at one speed. `offered` is requests per second, or the speed where no row tells them."""

    speed: float
    offered: float
    goodput: float
    interval: tuple[float, float] | None

    @property
    def good(self) -> float:
        """Good requests per second."""
        return self.offered * self.goodput


def points(group: Group, label: str) -> list[Point]:
    """Of one policy, by rising speed; only where goodput was measured."""
    return [
        Point(cell.speed, _offered(group, cell), entry.row.goodput, entry.row.ci95.get("goodput"))
        for cell in group.cells
        for entry in cell.entries
        if entry.label == label and entry.row.goodput is not None
    ]


def _offered(group: Group, cell: Cell) -> float:
    rates = [each.offered_per_s for each in group.cells]
    return cell.speed if None in rates or cell.offered_per_s is None else cell.offered_per_s


def knee(curve: list[Point]) -> Point | None:
    """The load with the most good requests per second, if a higher one was measured and yields less."""
    if len(curve) < 2:
        return None
    best = max(curve, key=lambda point: point.good)
    return None if best is curve[-1] else best


def _unit(group: Group) -> str:
    known = all(cell.offered_per_s is not None for cell in group.cells)
    return "requests/s" if known else "speed"


def goodput_pictures(group: Group, name: str) -> list[Picture]:
    """The share of good requests over the load, and good requests per second; of one load, the shares."""
    if len(group.cells) == 1:
        return [_one_load(group, f"{name}-goodput")]
    return [_shares(group, f"{name}-goodput"), _per_second(group, f"{name}-good-per-s")]


def _shares(group: Group, name: str) -> Picture:
    figure, (axes,) = new_figure(3.4)
    for label, style in group.labels.items():
        curve = points(group, label)
        xs, ys = [p.offered for p in curve], [100 * p.goodput for p in curve]
        axes.plot(xs, ys, label=short(label), **line_style(style))
        for point in curve:
            if point.interval is not None:
                bounds = [100 * bound for bound in point.interval]
                axes.plot([point.offered] * 2, bounds, color=colour(style), linewidth=1.2, marker="_")
    axes.set(xlabel=f"offered, {_unit(group)}", ylabel="good, % of offered", ylim=(0, 102))
    return Picture(
        name,
        f"Goodput against offered load: {group.title}",
        "Share of offered requests that keep all limits, a line per policy; bars are 95 % intervals.",
        figure,
    )


def _per_second(group: Group, name: str) -> Picture:
    figure, (axes,) = new_figure(3.4)
    reach = max(_offered(group, cell) for cell in group.cells)
    axes.plot((0, reach), (0, reach), color=INK, linewidth=0.8, linestyle=":")
    for label, style in group.labels.items():
        curve = points(group, label)
        axes.plot([p.offered for p in curve], [p.good for p in curve], **line_style(style))
        at = knee(curve)
        if at is not None:
            ring: dict[str, Any] = {"markerfacecolor": "none", "markeredgecolor": INK, "markeredgewidth": 1.4}
            axes.plot([at.offered], [at.good], "o", markersize=12, gid=f"knee-{style}", **ring)
    lowest = min(_offered(group, cell) for cell in group.cells)
    axes.set(xlabel=f"offered, {_unit(group)}", ylabel=f"good, {_unit(group)}", ylim=(0, None))
    axes.set_xlim(0.9 * lowest, 1.03 * reach)
    return Picture(
        name,
        f"The knee, ringed where it was passed: {group.title}",
        "Good requests per second over the offered load. The dotted line is all of them. "
        "A ring is the load past which more yields less; a policy without one has not reached it here.",
        figure,
    )


def _one_load(group: Group, name: str) -> Picture:
    entries = group.cells[0].entries[::-1]
    figure, (axes,) = new_figure(1 + 0.27 * len(entries))
    for place, entry in enumerate(entries):
        interval, style = entry.row.ci95.get("goodput"), entry.style
        if interval is not None:
            axes.plot(
                [100 * x for x in interval], [place] * 2, color=colour(style), marker="|", linewidth=1.4
            )
        if entry.row.goodput is None:
            axes.text(0.02, place, "not measured", va="center", transform=axes.get_yaxis_transform())
        else:
            axes.plot([100 * entry.row.goodput], [place], **line_style(style))
    axes.set_yticks(range(len(entries)), [short(entry.label, 20) for entry in entries])
    axes.set(xlabel="good, % of offered", ylim=(-0.6, len(entries) - 0.4))
    return Picture(
        name,
        f"Goodput at one load: {group.title}",
        "Share of offered requests that keep all limits, a line per policy, with 95 % intervals.",
        figure,
    )


def distribution_pictures(cell: Cell, name: str) -> list[Picture]:
    """CDFs of TTFT and ITL, of those policies that have them."""
    found = [
        _distribution(cell, name, "ttft_ms", "TTFT, s", "ttft_s"),
        _distribution(cell, name, "itl_ms", "ITL, s", "tpot_s"),
    ]
    return [picture for picture in found if picture is not None]


def _distribution(cell: Cell, name: str, field: str, label: str, limit: str) -> Picture | None:
    figure, (axes,) = new_figure(3.2)
    least, most = float("inf"), 0.0
    for entry in cell.entries:
        quantiles = getattr(entry.row.series, field)
        # What is infinite (a failure) has no place on the axis: the curve ends below 100 %.
        steps = [
            (ms / 1e3, 100 * place / max(len(quantiles) - 1, 1))
            for place, ms in enumerate(quantiles)
            if ms is not None and ms > 0
        ]
        if steps:
            xs, ys = zip(*steps, strict=True)
            axes.plot(xs, ys, **line_style(entry.style), markevery=(entry.style * 3 % 20, 25))
            least, most = min(least, xs[0]), max(most, xs[-1])
    if not most:
        return None
    limits = {getattr(e.row.limits, limit) for e in cell.entries if e.row.limits is not None}
    for at in sorted(limits):
        axes.axvline(at, color=INK, linewidth=1, linestyle=":")
    axes.set(
        xscale="log",
        xlabel=label,
        ylabel="% of requests" if field == "ttft_ms" else "% of gaps",
        ylim=(0, 102),
    )
    plain_logs(axes.xaxis)
    axes.set_xlim(max(least, most / 1e5), most * 1.1)
    short_name = label.partition(",")[0]
    return Picture(
        f"{name}-{field.partition('_')[0]}",
        f"{short_name}, cumulative: {cell.title}",
        f"Share that has come by a time, on a logarithmic axis; one seed. The dotted line is the limit of "
        f"{'TTFT' if field == 'ttft_ms' else 'TPOT, the mean of a request’s gaps'}. "
        "A curve that ends below 100 % has failures.",
        figure,
    )
