"""What a group was measured with, as its rows tell."""

from __future__ import annotations

import shlex
from collections.abc import Callable

from kvroute.loadtests.report.drawing import short
from kvroute.loadtests.report.groups import Entry, Group
from kvroute.loadtests.results.rows import Row

UNRECORDED = "not recorded"
MAX_VALUES = 12
MAX_NAMES = 4
MAX_LETTERS = 400


def facts(group: Group) -> list[tuple[str, list[str]]]:
    """A title and its values each. Where rows differ, a value is told with the policies that have it."""
    told = {
        "TTFT includes": _set("ttft_includes"),
        "Command": _set("command"),
        "Seeds": lambda row: f"{row.seeds}",
        "Requests that count, per seed": lambda row: None if row.offered is None else f"{row.offered:.0f}",
        "Warm-up, not counted": _warm_up,
        "Limits of goodput": _limits,
    }
    reasons = {entry.row.little_reason: None for cell in group.cells for entry in cell.entries}
    rest = dict.fromkeys(name for cell in group.cells for entry in cell.entries for name in entry.row.setting)
    return [
        *((title, _distinct(group, tell)) for title, tell in told.items()),
        *(
            [("Little’s law is not claimed", [reason for reason in reasons if reason])]
            if any(reasons)
            else []
        ),
        *((name, _distinct(group, _set(name))) for name in rest if name not in ("ttft_includes", "command")),
    ]


def _distinct(group: Group, tell: Callable[[Row], str | None]) -> list[str]:
    found: dict[str, list[Entry]] = {}
    for cell in group.cells:
        for entry in cell.entries:
            found.setdefault(tell(entry.row) or UNRECORDED, []).append(entry)
    if len(found) == 1:
        return list(found)
    values = [f"{value} ({_names(entries)})" for value, entries in found.items()]
    more = len(values) - MAX_VALUES
    return values[:MAX_VALUES] + ([f"and {more} more"] if more > 0 else [])


def _names(entries: list[Entry]) -> str:
    labels = list(dict.fromkeys(short(entry.label) for entry in entries))
    return ", ".join(labels[:MAX_NAMES]) + (
        f" and {len(labels) - MAX_NAMES} more" if len(labels) > MAX_NAMES else ""
    )


def _set(name: str) -> Callable[[Row], str | None]:
    """Of the row's setting, which is in the words of whoever made the row."""

    def tell(row: Row) -> str | None:
        value = row.setting.get(name)
        if name == "command" and isinstance(value, list):
            return shlex.join(map(str, value))
        return None if value is None else short(_text(value), MAX_LETTERS)

    return tell


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(one)}" for name, one in value.items()) or "none"
    if isinstance(value, list):
        return "; ".join(map(_text, value)) or "none"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _warm_up(row: Row) -> str | None:
    return None if row.warm_up is None else f"the first {100 * row.warm_up:.3g} % of the requests"


def _limits(row: Row) -> str | None:
    limits = row.limits
    return None if limits is None else f"TTFT {limits.ttft_s:g} s, TPOT {1e3 * limits.tpot_s:g} ms"
