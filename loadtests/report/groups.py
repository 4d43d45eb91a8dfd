"""Which rows are read together: one fleet on one trace, then one speed, then a policy each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvroute.loadtests.results.rows import Row

UNKNOWN_FLEET = "unknown"


@dataclass(frozen=True, slots=True)
class Entry:
    """A row under the name it has in all of the report, and the place of its colour and marker."""

    label: str
    style: int
    row: Row


@dataclass(frozen=True, slots=True)
class Cell:
    """All policies under one load."""

    speed: float
    entries: tuple[Entry, ...]

    @property
    def offered_per_s(self) -> float | None:
        """Of any of its policies: all get the same requests."""
        return next((e.row.offered_per_s for e in self.entries if e.row.offered_per_s is not None), None)

    @property
    def title(self) -> str:
        rate = "" if self.offered_per_s is None else f", {self.offered_per_s:.3g} requests/s offered"
        return f"Speed {self.speed:g}×{rate}"

    def named(self, policy: str) -> Entry | None:
        """By its label, or by its policy's name."""
        by_label = (entry for entry in self.entries if entry.label == policy)
        return next(by_label, next((e for e in self.entries if e.row.policy == policy), None))


@dataclass(frozen=True, slots=True)
class Group:
    """One fleet on one trace, measured in one way; cells by rising speed."""

    trace: str
    workers: str
    source: str
    cells: tuple[Cell, ...] = field(default=())

    @property
    def title(self) -> str:
        workers = "workers unknown" if self.workers == UNKNOWN_FLEET else f"{self.workers} workers"
        return f"{self.trace}, {workers}, {self.source}"

    @property
    def labels(self) -> dict[str, int]:
        """Label and style of each policy, in order of style."""
        found = {entry.label: entry.style for cell in self.cells for entry in cell.entries}
        return dict(sorted(found.items(), key=lambda item: item[1]))


def group(rows: Sequence[Row]) -> list[Group]:
    """In order of first appearance. A policy keeps its style over all groups."""
    labelled = _labels(rows)
    styles = {label: place for place, label in enumerate(dict.fromkeys(labelled))}
    found: dict[tuple[str, str, str], dict[float, list[Entry]]] = {}
    for label, row in zip(labelled, rows, strict=True):
        key = (row.trace, _fleet(row, rows), row.source)
        found.setdefault(key, {}).setdefault(row.speed, []).append(Entry(label, styles[label], row))
    return [
        Group(
            *key,
            tuple(Cell(speed, tuple(cells[speed])) for speed in sorted(cells)),
        )
        for key, cells in found.items()
    ]


def _fleet(row: Row, rows: Sequence[Row]) -> str:
    """Its workers; where nobody told them, those of the only fleet that it can be."""
    if row.workers != UNKNOWN_FLEET:
        return str(row.workers)
    others = {str(one.workers) for one in rows if (one.trace, one.source) == (row.trace, row.source)} - {
        UNKNOWN_FLEET
    }
    return others.pop() if len(others) == 1 else UNKNOWN_FLEET


def _labels(rows: Sequence[Row]) -> list[str]:
    """The policy with its options; a second row of the same cell gets a number."""
    seen: Counter[tuple[object, ...]] = Counter()
    labels = []
    for row in rows:
        options = ", ".join(f"{name}={value}" for name, value in sorted(row.options.items()))
        label = f"{row.policy} ({options})" if options else row.policy
        place = (row.trace, _fleet(row, rows), row.source, row.speed, label)
        seen[place] += 1
        labels.append(label if seen[place] == 1 else f"{label} #{seen[place]}")
    return labels
