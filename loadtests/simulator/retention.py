"""The retention study: what the engines' memory is worth under one policy, beside two bounds.

python -m kvroute.loadtests.simulator.retention --trace FILE --jitter 3s --speed 1 --speed 2 --seeds 2
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Annotated

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvroute.loadtests.results.files import check_writable, write_results
from kvroute.loadtests.results.rows import Row
from kvroute.loadtests.simulator.compare import Comparison, FleetOf, Run, Source, Variant, make_rows
from kvroute.loadtests.simulator.memory import Memory
from kvroute.loadtests.simulator.processes import compare
from kvroute.loadtests.simulator.setting import Setting
from kvroute.loadtests.simulator.sources import sources
from kvroute.policies.costs.links import LINKS
from kvroute.policies.costs.units import parse_seconds

SETTING = Setting()
"""8 workers of Qwen3-32B on H200 TP2, k 1.1, 750,000 KV tokens each."""
_GPU = SETTING.kv_tokens
_THROUGH = Memory(cpu_tokens=_GPU, cpu_write="through")
_BACK = Memory(cpu_tokens=_GPU, cpu_write="back")
_THROUGH_4 = replace(_THROUGH, cpu_tokens=4 * _GPU)
_PEERS = LINKS["ib-400g"]

CONFIGURATIONS: Mapping[str, Memory] = {
    "GPU: lru": Memory(),
    "GPU: lfu": Memory("lfu"),
    "GPU: tiny_lfu": Memory("tiny_lfu"),
    "GPU: value_per_byte": Memory("value_per_byte"),
    "GPU: hazard": Memory("hazard"),
    "GPU: lru, pull from GPUs": Memory(peer_link=_PEERS, pull_from="any"),
    "CPU 1x through": _THROUGH,
    "CPU 1x through, second_access": replace(_THROUGH, cpu_admission="second_access"),
    "CPU 1x back": _BACK,
    "CPU 1x back, router knows nothing": replace(_BACK, tier_news="none"),
    "CPU 1x back, router knows its size": replace(_BACK, tier_news="size"),
    "CPU 1x back, pull": replace(_BACK, peer_link=_PEERS),
    "CPU 2x through": replace(_THROUGH, cpu_tokens=2 * _GPU),
    "CPU 2x back": replace(_BACK, cpu_tokens=2 * _GPU),
    "CPU 4x through": _THROUGH_4,
    "CPU 4x through, router knows nothing": replace(_THROUGH_4, tier_news="none"),
    "CPU 4x through, router knows its size": replace(_THROUGH_4, tier_news="size"),
    "CPU 4x through, pull": replace(_THROUGH_4, peer_link=_PEERS),
    "bound: belady": Memory("belady"),
    "bound: endless": Memory("endless"),
}
"""What is compared; the first is the baseline. Sizes are multiples of the GPU's KV room. The router hears of
the tiers by events unless it is said, and places requests as if there were no pulls.
"""
BASELINE, CLAIRVOYANT = "GPU: lru", "bound: belady"


@dataclass(frozen=True, slots=True)
class Line:
    """One configuration over all cells (trace and speed)."""

    name: str
    goodputs: Sequence[float]
    """By cell."""
    hit: float
    """Mean of the cells, as the goodput; the next two are geometric means of ratios to the baseline."""
    ttft: float
    p99: float

    @property
    def goodput(self) -> float:
        return fmean(self.goodputs)


def study(
    traces: Sequence[tuple[Source, float]],
    names: Sequence[str],
    speeds: Sequence[float],
    seeds: int = 1,
    jobs: int = 1,
    policy: str = "ttft",
    done: Callable[[str], None] | None = None,
) -> list[Row]:
    """A row for each configuration, trace (with its jitter in seconds) and speed; `options` has the name.

    ValueError for a name that is not one of `CONFIGURATIONS`.
    """
    unknown = [name for name in names if name not in CONFIGURATIONS]
    if unknown:
        raise ValueError(f"configuration {unknown[0]!r} is unknown; known: {', '.join(CONFIGURATIONS)}")
    rows: list[Row] = []
    for source, jitter_s in traces:
        fleets = [FleetOf(name, replace(SETTING, memory=CONFIGURATIONS[name])) for name in names]
        comparison = Comparison([source], [Variant(policy)], fleets, speeds, seeds, jitter_s)

        def tell(run: Run, comparison: Comparison = comparison) -> None:
            if done is not None:
                done(comparison.name(run))

        for row in make_rows(comparison, compare(comparison, jobs, tell), {"jitter_s": jitter_s}):
            options = {**row.options, "config": row.workers}
            rows.append(msgspec.structs.replace(row, workers=SETTING.workers, options=options))
    return rows


def lines(rows: Sequence[Row]) -> list[Line]:
    """Of the rows of a study, with its baseline among them."""
    by_name: dict[str, dict[tuple[str, float], Row]] = {}
    for row in rows:
        by_name.setdefault(row.options["config"], {})[row.trace, row.speed] = row
    base = by_name[BASELINE]
    made = []
    for name, cells in by_name.items():
        made.append(
            Line(
                name,
                [row.goodput or 0.0 for row in cells.values()],
                fmean([row.token_hit_rate or 0.0 for row in cells.values()]),
                _ratio(cells, base, "ttft_ms.mean"),
                _ratio(cells, base, "ttft_ms.p99"),
            )
        )
    return made


def _ratio(
    cells: Mapping[tuple[str, float], Row], base: Mapping[tuple[str, float], Row], figure: str
) -> float:
    """Geometric mean over the cells; infinite where one is."""
    logs = []
    for cell, row in cells.items():
        mine, other = row.figure(figure), base[cell].figure(figure)
        if mine is None or other is None:
            return float("inf")
        logs.append(log(mine / other))
    return exp(fmean(logs))


def print_study(rows: Sequence[Row], console: Console) -> None:
    """One line for each configuration."""
    made = lines(rows)
    goodput = {line.name: line.goodput for line in made}
    gap = goodput.get(CLAIRVOYANT, goodput[BASELINE]) - goodput[BASELINE]
    table = Table(box=SIMPLE_HEAD)
    table.add_column("configuration")
    cells = [f"{row.trace.split('_')[0]} x{row.speed:g}" for row in rows if row.options["config"] == BASELINE]
    for name in ("goodput %", "% of gap", "hit", "TTFT", "p99", *cells):
        table.add_column(name, justify="right")
    for line in made:
        share = 100 * (line.goodput - goodput[BASELINE]) / gap if gap else float("nan")
        table.add_row(
            line.name,
            f"{100 * line.goodput:.1f}",
            f"{share:.0f}",
            f"{line.hit:.3f}",
            f"{line.ttft:.2f}",
            f"{line.p99:.2f}",
            *[f"{100 * value:.1f}" for value in line.goodputs],
        )
    console.print(table, highlight=False)
    console.print(
        "goodput: TTFT within 2 s and TPOT within 25 ms, of all offered; mean of the cells; "
        f"{rows[0].seeds} seeds. Gap: from the baseline to the clairvoyant bound. TTFT and p99: geometric "
        "mean of the ratios to the baseline.",
        highlight=False,
    )


def main(
    trace: Annotated[list[Path], typer.Option(help="File of requests; repeat for more.")],
    jitter: Annotated[
        list[str] | None, typer.Option(help="Of each trace in turn, or one for all [default: 0].")
    ] = None,
    speed: Annotated[list[float] | None, typer.Option(help="Repeat for more [default: 1].")] = None,
    config: Annotated[list[str] | None, typer.Option(help="By name; repeat for more [default: all].")] = None,
    policy: Annotated[str, typer.Option()] = "ttft",
    seeds: Annotated[int, typer.Option()] = 1,
    jobs: Annotated[int, typer.Option(help="Processes.")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all rows there.")] = None,
) -> None:
    """Goodput of every configuration of memory, on 8 simulated workers."""
    console, progress = Console(width=200), Console(stderr=True)
    try:
        check_writable(json_file, None, None)
        found = sources(trace, ())
        late_s = [parse_seconds(text, "--jitter", zero_ok=True) for text in jitter or ["0"]]
        if len(late_s) not in (1, len(found)):
            raise ValueError(f"--jitter: {len(late_s)} for {len(found)} traces; one, or one for each")
        late_s *= 1 if len(late_s) == len(found) else len(found)
        names = list(dict.fromkeys([BASELINE, *(config or CONFIGURATIONS)]))
        rows = study(
            list(zip(found, late_s, strict=True)), names, speed or [1.0], seeds, jobs, policy, progress.print
        )
        write_results(rows, json_file, None, None)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    print_study(rows, console)


if __name__ == "__main__":
    typer.run(main)
