"""Results as people read them: a line for each row, only the columns in which something is to be seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvroute.loadtests.results.rows import Row, Spread

Show = Callable[[Row], str]


def print_results(rows: Sequence[Row], console: Console, notes: Sequence[str] = ()) -> None:
    """The table, and what its figures mean. What is infinite is "inf", what nobody measured "-"."""
    table = Table(box=SIMPLE_HEAD)
    columns = _columns(rows)
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*[show(row) for show in columns.values()])
    console.print(table, highlight=False, markup=False)
    for note in (*_notes(rows), *notes):
        console.print(note, highlight=False, markup=False)


def _columns(rows: Sequence[Row]) -> dict[str, Show]:
    columns: dict[str, Show] = {"policy": _policy}
    if len({row.trace for row in rows}) > 1:
        columns["trace"] = lambda row: row.trace
    if len({row.workers for row in rows}) > 1:
        columns["workers"] = lambda row: str(row.workers)
    columns["speed"] = lambda row: f"{row.speed:g}"
    columns["goodput %"] = lambda row: _mean(row, "goodput", 100, 1)
    against = {row.paired.against for row in rows if row.paired is not None}
    if against:
        columns[f"against {', '.join(sorted(against))}"] = _against
    columns["TTFT ms mean/p50/p90/p99"] = lambda row: _spread(row, row.ttft_ms, 1, 0)
    columns["TPOT ms"] = lambda row: _spread(row, row.tpot_ms, 1, 1)
    columns["E2E s"] = lambda row: _spread(row, row.e2e_ms, 1e-3, 1)
    columns["hit %"] = lambda row: _mean(row, "token_hit_rate", 100, 1)
    optional: dict[str, tuple[str, float, int]] = {
        "rejected %": ("rejected", 100, 1),
        "failed %": ("failed", 100, 1),
        "preempted": ("preemptions", 1, 0),
    }
    for name, (figure, factor, digits) in optional.items():
        if any(row.figure(figure) for row in rows):
            columns[name] = _figure(figure, factor, digits)
    columns["peak/mean"] = _figure("peak_to_mean", 1, 2)
    if any(row.decision_us is not None for row in rows):
        columns["us/decision"] = _figure("decision_us", 1, 0)
    return columns


def _notes(rows: Sequence[Row]) -> list[str]:
    first = rows[0]
    notes = []
    if first.limits is not None:
        notes.append(
            f"goodput: of all offered requests, TTFT within {first.limits.ttft_s:g} s and TPOT within "
            f"{1e3 * first.limits.tpot_s:g} ms; {first.offered or 0:.0f} requests count, {first.seeds} seeds"
        )
    if "ttft_includes" in first.setting:
        notes.append(f"TTFT is {first.setting['ttft_includes']}")
    notes.append("in brackets: 95 % bootstrap interval of the mean over seeds, of differences seed by seed")
    notes.append(
        "means of latencies are of the requests that were served; in percentiles failures are infinite"
    )
    told = [row.little for row in rows if row.little is not None]
    if told:
        off = max(abs(1 - one) for one in told)
        notes.append(f"requests inside are arrival rate times stay (Little's law) to {off:.1%}")
    if len(told) < len(rows):
        reason = next((row.little_reason for row in rows if row.little_reason), "nobody measured")
        notes.append(f"Little's law is not claimed for {len(rows) - len(told)} of {len(rows)} rows: {reason}")
    return notes


def _policy(row: Row) -> str:
    options = ", ".join(f"{name}={value}" for name, value in row.options.items())
    return f"{row.policy} ({options})" if options else row.policy


def _mean(row: Row, name: str, factor: float, digits: int) -> str:
    """With its interval, where that is one."""
    value = _number(row.figure(name), factor, digits)
    bounds = row.ci95.get(name)
    if bounds is None or bounds[0] == bounds[1]:
        return value
    low, high = (f"{factor * bound:.{digits}f}" for bound in bounds)
    return f"{value} [{low}, {high}]"


def _against(row: Row) -> str:
    if row.paired is None:
        return ""
    mean, low, high = row.paired.figures.get("goodput", (None, None, None))
    if mean is None:
        return "-"
    bounds = "" if low is None or high is None else f" [{100 * low:+.1f}, {100 * high:+.1f}]"
    return f"{100 * mean:+.1f}{bounds}"


def _spread(row: Row, spread: Spread, factor: float, digits: int) -> str:
    """Only failures make a latency infinite."""
    unknown = "inf" if row.rejected or row.failed else "-"
    values = (spread.mean, spread.p50, spread.p90, spread.p99)
    return "/".join(unknown if value is None else f"{factor * value:.{digits}f}" for value in values)


def _figure(name: str, factor: float, digits: int) -> Show:
    return lambda row: _number(row.figure(name), factor, digits)


def _number(value: float | None, factor: float, digits: int) -> str:
    return "-" if value is None else f"{factor * value:.{digits}f}"
