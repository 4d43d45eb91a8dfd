"""How every plan is shown: one table with notes, the same figures as JSON, and a plot as PNG."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Report:
    """`rows` are shown as they are; `data` is what --json prints (JSON values with units in the keys)."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    data: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    def to_json(self) -> str:
        """ValueError if a figure is not finite: JSON has no NaN."""
        return json.dumps(self.data, indent=2, allow_nan=False)


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a plot: as many ys as xs."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]


@dataclass(frozen=True, slots=True)
class Plot:
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log_x: bool = False
    log_y: bool = False
    marks: tuple[tuple[float, str], ...] = field(default=())  # (x, text): a vertical line each


def print_report(report: Report, console: Console) -> None:
    """The table, the first column to the left and figures to the right; then the notes, a line each."""
    # Not the table's own title, which is folded to the width of the table.
    console.print(report.title, style="bold", highlight=False, markup=False)
    table = Table(box=SIMPLE_HEAD)
    for index, column in enumerate(report.columns):
        table.add_column(column, justify="right" if index else "left", overflow="fold")
    for row in report.rows:
        table.add_row(*row)
    console.print(table, highlight=False, markup=False)
    for note in report.notes:
        console.print(note, highlight=False, markup=False)


def save_plot(plot: Plot, path: Path) -> None:
    """Draw `plot` as a PNG. ValueError if the file is not named .png or cannot be written."""
    # Half a second to import, and only for those who ask for a picture. `Figure` instead of pyplot:
    # no global state and no display.
    from matplotlib.figure import Figure

    if path.suffix.lower() != ".png":
        raise ValueError(f"--plot: {path} is not named .png; a PNG file is what is written")
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for series in plot.series:
        axes.plot(series.xs, series.ys, label=series.name)
    for x, text in plot.marks:
        axes.axvline(x, color="grey", linestyle="--", linewidth=1)
        axes.annotate(text, (x, 0.98), xycoords=("data", "axes fraction"), rotation=90, va="top", ha="right")
    axes.set(title=plot.title, xlabel=plot.x_label, ylabel=plot.y_label)
    axes.set_xscale("log" if plot.log_x else "linear")
    axes.set_yscale("log" if plot.log_y else "linear")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise ValueError(f"--plot: {path}: {error.strerror}") from None
