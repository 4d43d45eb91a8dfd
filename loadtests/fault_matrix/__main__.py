"""`python -m kvroute.loadtests.fault_matrix --out FILE.md`; status 1 when a cell is bad."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import httpx
import typer
import uvloop
from rich.console import Console
from rich.progress import track

from kvroute.loadtests.fault_matrix.cells import Cell, cells, plan
from kvroute.loadtests.fault_matrix.judging import Outcome
from kvroute.loadtests.fault_matrix.running import LIMIT_S, Result, new_client, right_text, run_cell
from kvroute.loadtests.fault_matrix.table import bad, render
from kvroute.router import logs

AT_A_TIME = 6
CELL_LIMIT_S = 6 * LIMIT_S
"""With start, recovery and end."""


async def run(chosen: Sequence[Cell], console: Console | None = None) -> dict[Cell, Result | str]:
    """All of them, some at a time; progress goes to the console."""
    results: dict[Cell, Result | str] = {}
    gate = asyncio.Semaphore(AT_A_TIME)
    async with new_client() as client:
        right = await right_text(client)

        async def one(cell: Cell) -> None:
            how = plan(cell)
            if isinstance(how, str):
                results[cell] = how
                return
            async with gate:
                results[cell] = await _limited(cell, client, right)

        ending = asyncio.as_completed([one(cell) for cell in chosen])
        for next_one in track(ending, "cells", len(chosen), console=console, disable=console is None):
            await next_one
    return {cell: results[cell] for cell in chosen}


async def _limited(cell: Cell, client: httpx.AsyncClient, right: str) -> Result:
    how = plan(cell)
    assert not isinstance(how, str)
    try:
        async with asyncio.timeout(CELL_LIMIT_S):
            return await run_cell(cell, how, client, right)
    except TimeoutError:
        return Result(Outcome.HANG, 0, CELL_LIMIT_S, 0, 0, 0, ["the cell does not end"])


def main(out: Annotated[Path, typer.Option(help="where the table is written")]) -> None:
    """Run the fault matrix of split requests."""
    logs.configure("critical")
    console = Console(stderr=True)
    results = uvloop.run(run(list(cells()), console))
    out.write_text(render(results))
    for line in bad(results):
        console.print(line, style="red")
    console.print(f"{out} is written")
    sys.exit(1 if bad(results) else 0)


if __name__ == "__main__":
    typer.run(main)
