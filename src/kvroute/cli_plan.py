"""`kvroute plan`: the cost model as a person uses it. Options in, one report out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvroute.loadtests.plan.show import Plot, Report

app = typer.Typer(no_args_is_help=True, help="Size a fleet and see what its KV cache is worth.")

AsJson = Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")]
PlotFile = Annotated[Path | None, typer.Option("--plot", help="Draw the figures into this PNG file.")]


def present(plan: Callable[[], tuple[Report, Plot | None]], as_json: bool, plot_file: Path | None) -> None:
    """Make the plan and show it. A ValueError of the plan is the user's: one line, exit status 2."""
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
        print_report(report, Console())
