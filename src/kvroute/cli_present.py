"""What every `kvroute plan` command has in common: how its report is shown, and whose fault an error is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvroute.loadtests.plan.show import Plot, Report

AsJson = Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")]
PlotFile = Annotated[Path | None, typer.Option("--plot", help="Draw the figures into this PNG file.")]

WIDTH = 200


def present(plan: Callable[[], tuple[Report, Plot | None]], as_json: bool, plot_file: Path | None) -> Report:
    """Make the plan, show it and return it. A ValueError is the user's fault: one line, exit status 2."""
    from rich.console import Console

    from kvroute.loadtests.plan.show import print_report, save_plot

    try:
        report, plot = plan()
        if plot is not None and plot_file is not None:
            save_plot(plot, plot_file)
    except ValueError as error:
        typer.echo(f"kvroute: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(report.to_json())
    else:
        # A pipe or file has no width: long lines rather than figures folded into 80 columns.
        print_report(report, Console(width=None if sys.stdout.isatty() else WIDTH))
    return report
