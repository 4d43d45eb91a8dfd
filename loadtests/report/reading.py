"""What the figures say, in sentences. A difference is claimed only where an interval shows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvroute.loadtests.report.curves import knee, points
from kvroute.loadtests.report.groups import Cell, Entry, Group

Bounds = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether one policy is told apart from another, and by what."""

    told_apart: bool
    why: str


def verdict(better: Entry, worse: Entry, figure: str, scale: float = 1.0) -> Verdict:
    """By the interval of their paired difference where one was paired with the other, else by their own.

    Intervals that overlap are no proof of equality either; they only leave the difference open.
    """
    paired = _paired(better, worse, figure)
    if paired is not None:
        low, high = sorted(scale * bound for bound in paired)
        shown = f"paired by seed, 95 % interval {_number(low)} to {_number(high)}"
        return Verdict(low > 0 or high < 0, shown if low > 0 or high < 0 else f"{shown}, which contains 0")
    one, other = better.row.ci95.get(figure), worse.row.ci95.get(figure)
    if one is None or other is None:
        return Verdict(False, "without intervals")
    apart = one[0] > other[1] or one[1] < other[0]
    return Verdict(apart, "the 95 % intervals do not overlap" if apart else "the 95 % intervals overlap")


def _paired(one: Entry, other: Entry, figure: str) -> Bounds | None:
    for entry, against in ((one, other), (other, one)):
        paired = entry.row.paired
        if paired is not None and paired.against in (against.label, against.row.policy):
            _, low, high = paired.figures.get(figure, (None, None, None))
            if low is not None and high is not None:
                return low, high
    return None


def ranked(cell: Cell, figure: str, highest: bool) -> list[Entry]:
    """Best first; those that lack the figure are left out."""
    known = [(value, entry) for entry in cell.entries if (value := entry.row.figure(figure)) is not None]
    return [entry for _, entry in sorted(known, key=lambda pair: -pair[0] if highest else pair[0])]


def best_or_open(cell: Cell) -> list[str]:
    """The policy of most goodput, and all that are not told apart from it."""
    ranks = ranked(cell, "goodput", highest=True)
    return [e.label for e in ranks if e is ranks[0] or not verdict(ranks[0], e, "goodput").told_apart]


def read_group(group: Group) -> list[str]:
    """Over all loads: how often each policy is the best, and the knees."""
    cells = [cell for cell in group.cells if len(ranked(cell, "goodput", highest=True)) > 1]
    sentences = []
    if cells:
        wins = {label: 0 for label in group.labels}
        for cell in cells:
            for label in best_or_open(cell):
                wins[label] += 1
        most = max(wins.values())
        leaders = [label for label, count in wins.items() if count == most]
        of = _loads(len(cells))
        sentences.append(
            f"Best in goodput, or not told apart from the best: {_listed(leaders)}, at {most} of {of}."
        )
    if len(group.cells) > 1:
        sentences += _knees(group)
    return sentences


def _knees(group: Group) -> list[str]:
    unit = "requests/s" if all(cell.offered_per_s is not None for cell in group.cells) else "× speed"
    found: dict[str, list[str]] = {}
    for label in group.labels:
        at = knee(points(group, label))
        where = "not reached by" if at is None else f"{at.offered:.3g} {unit} for"
        lowest = at is not None and at == points(group, label)[0]
        found.setdefault(f"at or below {where}" if lowest else where, []).append(label)
    told = "; ".join(f"{where} {_listed(labels)}" for where, labels in found.items())
    return [f"The knee, the load of most good requests per second: {told}."]


def read_cell(cell: Cell) -> list[str]:
    """Goodput, TTFT, hits, failures and the self-check of one load."""
    made = (_goodput(cell), _ttft(cell), _hits(cell), _failures(cell), _little(cell))
    return [sentence for sentence in made if sentence]


def _goodput(cell: Cell) -> str:
    ranks = ranked(cell, "goodput", highest=True)
    if not ranks:
        return "Goodput was not measured."
    best = ranks[0]
    text = f"{best.label} has the most goodput, {_share(best, 'goodput')}."
    if len(ranks) > 1:
        text += " " + _lead(best, ranks[1])
        open_ones = [label for label in best_or_open(cell)[1:] if label != ranks[1].label]
        if open_ones:
            text += f" Nor is it told apart from {_listed(open_ones)}."
    return text + _against(best)


def _lead(best: Entry, second: Entry) -> str:
    points_ahead = 100 * ((best.row.goodput or 0) - (second.row.goodput or 0))
    told = verdict(best, second, "goodput", 100)
    lead = f"Next is {second.label} with {_share(second, 'goodput')}, {points_ahead:.1f} points less"
    return f"{lead}: {told.why}." if told.told_apart else f"{lead}: {told.why}, so no difference is claimed."


def _against(best: Entry) -> str:
    paired = best.row.paired
    mean, low, high = paired.figures.get("goodput", (None, None, None)) if paired else (None, None, None)
    if paired is None or mean is None or paired.against in (best.label, best.row.policy):
        return ""
    interval = "no interval" if low is None or high is None else f"{100 * low:+.1f} to {100 * high:+.1f}"
    return f" Against {paired.against}: {100 * mean:+.1f} points ({interval}, paired by seed)."


def _ttft(cell: Cell) -> str:
    by_mean, by_p99 = (ranked(cell, f"ttft_ms.{which}", highest=False) for which in ("mean", "p99"))
    if not by_mean:
        return ""
    best = by_mean[0]
    text = f"The mean TTFT is lowest under {best.label}, {best.row.ttft_ms.mean:.0f} ms"
    if len(by_mean) > 1:
        told = verdict(best, by_mean[1], "ttft_ms.mean")
        text += f"; next is {by_mean[1].label}, {by_mean[1].row.ttft_ms.mean:.0f} ms: {told.why}"
        text += "" if told.told_apart else ", so no difference is claimed"
    if by_p99:
        text += f". The lowest p99 is {by_p99[0].label}’s, {by_p99[0].row.ttft_ms.p99:.0f} ms"
    lost = (best.row.rejected or 0) + (best.row.failed or 0)
    return text + (f". The mean leaves out {100 * lost:.1f} % that were rejected or failed." if lost else ".")


def _hits(cell: Cell) -> str:
    ranks = ranked(cell, "token_hit_rate", highest=True)
    if not ranks:
        return ""
    best, last = ranks[0], ranks[-1]
    text = f"Most prompt tokens are found in a cache under {best.label}, {_share(best, 'token_hit_rate')}"
    return text + (
        f"; fewest under {last.label}, {_share(last, 'token_hit_rate')}." if last is not best else "."
    )


def _failures(cell: Cell) -> str:
    told = []
    for field, word in (("rejected", "Rejected"), ("failed", "Failed")):
        values = [(entry.label, entry.row.figure(field)) for entry in cell.entries]
        some = [f"{label} {100 * value:.2g} %" for label, value in values if value]
        unknown = [label for label, value in values if value is None]
        if len(unknown) == len(values):
            told.append(f"{word}: not measured.")
        else:
            told.append(
                f"{word}: {_listed(some) or 'none'}"
                + (f"; unknown of {_listed(unknown)}." if unknown else ".")
            )
    return " ".join(told)


def _little(cell: Cell) -> str:
    known = [value for entry in cell.entries if (value := entry.row.little) is not None]
    if not known:
        return "Little’s law was not checked."
    off = 100 * max(abs(1 - value) for value in known)
    text = f"Little’s law (L = λW) holds within {off:.2g} % where it is claimed"
    return f"{text}, for {len(known)} of {len(cell.entries)} policies."


def _share(entry: Entry, figure: str) -> str:
    value, bounds = entry.row.figure(figure), entry.row.ci95.get(figure)
    interval = "" if bounds is None else f" ({100 * bounds[0]:.1f} to {100 * bounds[1]:.1f})"
    return f"{100 * (value or 0):.1f} %{interval}"


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _loads(count: int) -> str:
    return f"{count} load" if count == 1 else f"{count} loads"


def _listed(labels: Sequence[str]) -> str:
    return ", ".join(labels[:-1]) + " and " + labels[-1] if len(labels) > 1 else "".join(labels)
