"""What workers had to do over time: requests inside each, and a stretch of single requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvroute.loadtests.report.bars import MAX_PANELS
from kvroute.loadtests.report.drawing import INK, SERIES, Picture, new_figure, short
from kvroute.loadtests.report.groups import Cell, Entry

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_SPANS = 300
MAX_WORKERS = 64
MAX_MOMENTS = 120
LEVELS = 24
"""Of colour: more are not told apart, and cost bytes."""
Floats = NDArray[np.float64]
Span = tuple[str | int, float, float | None, float | None, float | None]
Box = tuple[float, float, float]  # from, to, lane


def load_picture(cell: Cell, name: str) -> Picture | None:
    """A strip per policy, a line of it per worker, on one scale of colours; None where none has it."""
    from matplotlib import colormaps

    loads = [(entry, entry.row.series.load) for entry in cell.entries]
    drawn = [(entry, load) for entry, load in loads if load.at_s and load.requests][:MAX_PANELS]
    if not drawn:
        return None
    grids = [_shrunk(np.array(load.requests, dtype=np.float64)) for _, load in drawn]
    most = max(float(np.nanmax(grid)) if np.isfinite(grid).any() else 0.0 for grid in grids)
    colours = colormaps["cividis"].resampled(LEVELS)
    figure, panels = new_figure(0.9 + 0.72 * len(drawn), len(drawn), sharex=True)
    for axes, (entry, load), grid in zip(panels, drawn, grids, strict=True):
        extent = (load.at_s[0], max(load.at_s[-1], load.at_s[0] + 1e-3), len(load.requests) - 0.5, -0.5)
        look: dict[str, Any] = {"cmap": colours, "vmin": 0, "vmax": max(most, 1), "interpolation": "none"}
        image = axes.imshow(grid, aspect="auto", extent=extent, **look)
        axes.set_title(short(entry.label), loc="left", pad=2)
        axes.set_yticks([0, len(load.requests) - 1] if len(load.requests) > 1 else [0])
        axes.grid(visible=False)
    panels[-1].set_xlabel("s since the run began")
    bar = figure.colorbar(image, ax=panels, location="bottom", label="requests inside", aspect=40, pad=0.01)
    bar.outline.set_visible(False)
    return Picture(
        f"{name}-load",
        f"Load of each worker over time: {cell.title}",
        "A line per worker, brighter where more requests are inside: a bright one has more than the others. "
        f"One seed, all policies on one scale up to {most:.0f} requests.",
        figure,
        by_policy=False,
    )


def _shrunk(grid: Floats) -> Floats:
    """Workers by moments, of neighbours the mean over time and the fullest worker."""
    moments = -(-grid.shape[1] // MAX_MOMENTS)
    workers = -(-grid.shape[0] // MAX_WORKERS)
    grid = np.stack(
        [grid[:, at : at + moments].mean(axis=1) for at in range(0, grid.shape[1], moments)], axis=1
    )
    return np.stack([grid[at : at + workers].max(axis=0) for at in range(0, len(grid), workers)])


def gantt_picture(cell: Cell, entry: Entry, name: str) -> Picture | None:
    """Requests of one stretch, those of a worker on lanes of its own; None where the row has none."""
    stretch = entry.row.series.gantt
    if not stretch.spans:
        return None
    spans = sorted(stretch.spans, key=lambda span: span[1])[:MAX_SPANS]
    workers = sorted({span[0] for span in spans}, key=lambda worker: (isinstance(worker, str), worker))
    phases: dict[str, list[Box]] = {"waits": [], "prefill": [], "decode": [], "waits or prefill": []}
    ticks, lane, unfinished = [], 0, 0
    for worker in workers[:MAX_WORKERS]:
        mine = [span for span in spans if span[0] == worker]
        used = _lay(mine, lane, stretch.to_s, phases)
        unfinished += sum(span[4] is None for span in mine)
        ticks.append((lane + used / 2 - 0.5, lane - 0.75, _name(entry, worker)))
        lane += used + 1
    figure, (axes,) = new_figure(float(np.clip(1.2 + 0.045 * lane, 2.5, 8)))
    for boxes, (label, paint) in zip(phases.values(), _PAINT.items(), strict=True):
        if boxes:
            _boxes(axes, boxes, label, paint)
    axes.set_yticks([tick[0] for tick in ticks], [short(tick[2], 10) for tick in ticks])
    for _, edge, _ in ticks[1:]:
        axes.axhline(edge, color=INK, linewidth=0.4)
    axes.set(xlim=(stretch.from_s, stretch.to_s), ylim=(lane - 0.5, -0.75), xlabel="s since the run began")
    axes.set_ylabel("worker")
    axes.grid(visible=False, axis="y")
    figure.legend(loc="outside upper center", ncols=4, frameon=False, handlelength=1.2, columnspacing=1)
    left_out = len(stretch.spans) - len(spans)
    notes = (f" {unfinished} of them did not end." if unfinished else "") + (
        f" {left_out} later ones are not drawn." if left_out else ""
    )
    return Picture(
        f"{name}-gantt-{entry.style}",
        f"Requests of one stretch, {short(entry.label)}: {cell.title}",
        f"Each of {len(spans)} lines is a request: it waits, is prefilled, decodes.{notes} One seed.",
        figure,
        by_policy=False,
    )


def _name(entry: Entry, worker: str | int) -> str:
    """By its place among the workers, if their ids are known."""
    ids = entry.row.series.load.workers
    return ids[worker] if isinstance(worker, int) and 0 <= worker < len(ids) else str(worker)


_PAINT = {"waits": "#d4d7dc", "prefill": SERIES[1], "decode": SERIES[0], "waits or prefill": SERIES[4]}


def _lay(spans: Sequence[Span], lane: int, to_s: float, phases: dict[str, list[Box]]) -> int:
    """Give each request the first free lane from `lane` on, and add its phases; the number of lanes used."""
    free_at: list[float] = []
    for _, arrival, start, first, end in spans:
        last = to_s if end is None else end
        place = next((i for i, free in enumerate(free_at) if free <= arrival), len(free_at))
        free_at[place : place + 1] = [last]
        y = float(lane + place)
        came = last if first is None else first
        if start is None:
            phases["waits or prefill"].append((arrival, came, y))
        else:
            phases["waits"].append((arrival, start, y))
            phases["prefill"].append((start, came, y))
        if first is not None:
            phases["decode"].append((first, last, y))
    return len(free_at)


def _boxes(axes: Axes, boxes: Sequence[Box], label: str, paint: str) -> None:
    """As one path: a fraction of the size of as many rectangles."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    corners = [
        ((left, y - 0.4), (right, y - 0.4), (right, y + 0.4), (left, y + 0.4), (left, y - 0.4))
        for left, right, y in boxes
    ]
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    path = Path(np.array(corners).reshape(-1, 2), codes * len(boxes))
    axes.add_patch(PathPatch(path, facecolor=paint, edgecolor="none", label=label))
