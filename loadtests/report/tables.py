"""The figures of a cell as tables, with their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvroute.loadtests.report.bars import TIER_NAMES, prediction_error, tiers
from kvroute.loadtests.report.groups import Cell, Entry
from kvroute.loadtests.results.rows import Row, Spread

UNKNOWN = "n/a"
INFINITE = "∞"


@dataclass(frozen=True, slots=True)
class Value:
    """One field: the figure, its interval below, and whether it stands out."""

    text: str
    interval: str = ""
    strong: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    label: str
    style: int
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Table:
    caption: str
    columns: tuple[str, ...]
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class Column:
    """A figure by its name in the results, times `scale`."""

    title: str
    figure: str
    scale: float = 1.0
    digits: int = 1


def _table(cell: Cell, caption: str, columns: Sequence[Column]) -> Table:
    lines = tuple(
        Line(entry.label, entry.style, tuple(value(entry.row, column) for column in columns))
        for entry in cell.entries
    )
    return Table(caption, tuple(column.title for column in columns), lines)


def value(row: Row, column: Column) -> Value:
    """With its interval; what is missing is said to be infinite where failures make it so."""
    figure, bounds = row.figure(column.figure), row.ci95.get(column.figure)
    if figure is None:
        return Value(INFINITE if _infinite(row, column.figure) else UNKNOWN)
    shown = _shown(figure, column)
    if bounds is None:
        return Value(shown)
    low, high = (_shown(bound, column) for bound in bounds)
    return Value(shown, "" if low == high else f"{low} – {high}")


def _infinite(row: Row, figure: str) -> bool:
    """A percentile is, that is missing beside a mean: failures are part of it, and not of the mean."""
    field, _, which = figure.partition(".")
    spread = getattr(row, field)
    return isinstance(spread, Spread) and which != "mean" and spread.mean is not None


def _shown(figure: float, column: Column) -> str:
    return f"{column.scale * figure:,.{column.digits}f}".replace(",", "\u202f")


def tables(cell: Cell) -> list[Table]:
    """All of a cell, those without a single figure left out."""
    latencies = [_latency(cell, *latency) for latency in _LATENCIES]
    made = [_goodput(cell), *paired(cell), *latencies, _cache(cell), _load(cell), _predictions(cell)]
    return [
        table for table in made if any(one.text != UNKNOWN for line in table.lines for one in line.values)
    ]


_LATENCIES = (
    ("TTFT, ms", "ttft_ms", 1.0, 0),
    ("TPOT, ms: per request, without those of one token", "tpot_ms", 1.0, 2),
    ("ITL, ms: per gap", "itl_ms", 1.0, 2),
    ("E2E, s", "e2e_ms", 1e-3, 2),
)


def _latency(cell: Cell, caption: str, field: str, scale: float, digits: int) -> Table:
    columns = [Column(which, f"{field}.{which}", scale, digits) for which in ("mean", "p50", "p90", "p99")]
    return _table(cell, caption, columns)


def _goodput(cell: Cell) -> Table:
    limits = dict.fromkeys(limit for entry in cell.entries for limit in entry.row.goodput_by_limit)
    main = next((e.row.limits for e in cell.entries if e.row.limits is not None), None)
    asked = "" if main is None else f": TTFT {main.ttft_s:g} s, TPOT {1e3 * main.tpot_s:g} ms"
    return _table(
        cell,
        f"Goodput, % of all offered requests{asked}; beside it what was lost, and goodput by other limits",
        [
            Column("goodput", "goodput", 100),
            Column("rejected", "rejected", 100, 2),
            Column("failed", "failed", 100, 2),
            *(Column(limit, f"goodput_by_limit.{limit}", 100) for limit in limits),
        ],
    )


def _cache(cell: Cell) -> Table:
    return _table(
        cell,
        "Cache: hit rates in %, of prompt tokens unless said otherwise",
        [
            Column("hits", "token_hit_rate", 100),
            *(Column(TIER_NAMES.get(tier, tier), f"hit_by_tier.{tier}", 100) for tier in tiers(cell)),
            Column("of requests", "request_hit_rate", 100),
            Column("tokens loaded per request", "prefix_loaded_tokens", 1, 0),
            Column("prefill tokens skipped, M", "prefill_tokens_skipped", 1e-6, 2),
            Column("GPU s saved", "gpu_seconds_saved", 1, 0),
        ],
    )


def _load(cell: Cell) -> Table:
    return _table(
        cell,
        "Load and router",
        [
            Column("peak / mean load", "peak_to_mean", 1, 2),
            Column("preemptions", "preemptions", 1, 1),
            Column("retries per request", "retries", 1, 3),
            Column("sent after due, ms p99", "sent_after_ms.p99", 1, 1),
            Column("µs per decision", "decision_us", 1, 1),
            Column("Little’s L / λW", "little", 1, 4),
        ],
    )


def _predictions(cell: Cell) -> Table:
    lines = []
    for entry in cell.entries:
        error = prediction_error(entry.row)
        if error is not None:
            values = (
                f"{100 * error.median_share:.1f}",
                f"{error.p90_ms:.0f}",
                _signed(error.bias_ms, Column("", "", 1, 0)),
                f"{error.pairs}",
            )
            lines.append(Line(entry.label, entry.style, tuple(map(Value, values))))
    columns = ("median error, %", "90 % within, ms", "mean error, ms", "requests")
    return Table("Predicted TTFT against actual, of one seed", columns, tuple(lines))


_PAIRED = (
    (Column("goodput, points", "goodput", 100), True),
    (Column("TTFT mean, ms", "ttft_ms.mean", 1, 0), False),
    (Column("TTFT p99, ms", "ttft_ms.p99", 1, 0), False),
    (Column("TPOT mean, ms", "tpot_ms.mean", 1, 2), False),
    (Column("E2E mean, s", "e2e_ms.mean", 1e-3, 2), False),
    (Column("hits, points", "token_hit_rate", 100), True),
    (Column("peak / mean", "peak_to_mean", 1, 2), False),
)


def paired(cell: Cell) -> list[Table]:
    """A table for each policy that others were paired with."""
    names = dict.fromkeys(e.row.paired.against for e in cell.entries if e.row.paired is not None)
    return [
        Table(
            f"Differences to {against}, paired by seed. ▲ better, ▼ worse: the 95 % interval is without 0",
            tuple(column.title for column, _ in _PAIRED),
            tuple(
                Line(e.label, e.style, tuple(_difference(e, *column) for column in _PAIRED))
                for e in cell.entries
                if e.row.paired is not None and e.row.paired.against == against and e.label != against
            ),
        )
        for against in names
    ]


def _difference(entry: Entry, column: Column, more_is_better: bool) -> Value:
    paired = entry.row.paired
    mean, low, high = paired.figures.get(column.figure, (None,) * 3) if paired else (None,) * 3
    if mean is None:
        return Value(UNKNOWN)
    shown = _signed(mean, column)
    if low is None or high is None:
        return Value(shown)
    interval = f"{_signed(low, column)} to {_signed(high, column)}"
    if low <= 0 <= high:
        return Value(shown, interval)
    return Value(f"{'▲' if (low > 0) == more_is_better else '▼'} {shown}", interval, strong=True)


def _signed(figure: float, column: Column) -> str:
    shown = _shown(abs(figure), column)
    sign = "" if not shown.strip("0.") else "−" if figure < 0 else "+"
    return f"{sign}{shown}"
