"""`kvroute report`: results as a page to read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    results: Annotated[list[Path], typer.Argument(help="Files of simulate --json or replay --json.")],
    out: Annotated[Path, typer.Option(help="The page, one file that needs nothing else.")] = Path(
        "report.html"
    ),
    png: Annotated[
        Path | None, typer.Option(help="Also every figure as a PNG file into this folder.")
    ] = None,
) -> None:
    """Simulated and live results as one HTML page: what they say, tables and figures."""
    from kvroute.loadtests.report.page import check_places, make_report, write_report
    from kvroute.loadtests.results.files import ResultsError, read_results

    try:
        check_places(out, png)
        made = make_report(read_results(results), [path.name for path in results])
        figures = write_report(made, out, png)
    except ResultsError as error:
        typer.echo(f"kvroute: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(f"{out}: {figures} figures, {out.stat().st_size / 1e6:.1f} MB")
