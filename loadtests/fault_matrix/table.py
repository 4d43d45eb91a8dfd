"""The table of all cells, in markdown. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kvroute.loadtests.fault_matrix.cells import CONNECTORS, FAULTS, FLEETS, LEGS, MOMENTS, Cell
from kvroute.loadtests.fault_matrix.running import LEASE_S, LIMIT_S, Result

Results = Mapping[Cell, Result | str]
"""A string: why the cell cannot exist."""

HEAD = f"""# Faults of split requests

Each cell is one request through a gateway to mock engines, to which one fault happens: *before* the KV
moves from the prefill to the decode worker, *during* that, or *after* it. It says what the client got, the
status, the time to the last byte, how often a leg was begun again, and the KV blocks that nobody will fetch
after the gateway has let go of them and, where they are not 0, after the engines' lease of {LEASE_S:g} s.

*right*: the whole text of a cold engine. *error*: a status or an error object. *broken off*: a stream that
began right and whose client sees that it did not end. "-": cannot exist. A bold cell is bad: wrong text, a
request of more than {LIMIT_S:g} s, a load or KV that stays, or wrong text for the same prompt afterwards.
Streams where there are two workers of a role or the first byte was there, else plain answers. KV waits for
its lease where nobody can know of it: the prefill's answer was lost, a decode worker says 200 and has not
fetched it, or no decode worker is left to pass the release on.
"""


def render(results: Results) -> str:
    """One row per leg, moment, fault and fleet; one column per connector."""
    lines = [
        HEAD,
        _summary(results),
        "",
        "| leg | moment | fault | fleet | " + " | ".join(CONNECTORS) + " |",
        "|---" * (4 + len(CONNECTORS)) + "|",
    ]
    for leg in LEGS:
        for moment in MOMENTS:
            for fault in FAULTS:
                for workers in FLEETS:
                    row = [results.get(Cell(name, leg, moment, fault, workers)) for name in CONNECTORS]
                    if any(isinstance(one, Result) for one in row):
                        shown = " | ".join(map(_cell, row))
                        lines.append(f"| {leg} | {moment} | {fault} | {workers}P{workers}D | {shown} |")
    return "\n".join([*lines, "", *_impossible(results)]) + "\n"


def bad(results: Results) -> list[str]:
    """A line for each bad cell."""
    return [
        f"{cell.name}: {'; '.join(one.faults)}"
        for cell, one in results.items()
        if isinstance(one, Result) and one.faults
    ]


def _cell(one: Result | str | None) -> str:
    if not isinstance(one, Result):
        return "-"
    text = f"{one.outcome.value} {one.status}, {one.seconds:.2f} s"
    if one.retries:
        text += f", {one.retries} retr{'y' if one.retries == 1 else 'ies'}"
    text += f", {one.stranded_blocks} stranded"
    if one.stranded_blocks:
        text += f" ({one.stranded_after_lease_blocks} after the lease)"
    return f"**{text}: {'; '.join(one.faults)}**" if one.faults else text


def _summary(results: Results) -> str:
    ran = [one for one in results.values() if isinstance(one, Result)]
    counts = Counter(one.outcome.value for one in ran)
    outcomes = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    slowest = max((one.seconds for one in ran), default=0.0)
    return f"{len(ran)} cells: {outcomes}; {len(bad(results))} bad; the slowest took {slowest:.2f} s."


def _impossible(results: Results) -> list[str]:
    """Why cells cannot exist, by leg, moment and fault."""
    reasons: dict[str, None] = {}
    for cell, why in results.items():
        if isinstance(why, str):
            reasons[f"* {cell.leg}, {cell.fault} {cell.moment}, {cell.connector}: {why}"] = None
    return ["Cells that cannot exist:", "", *reasons] if reasons else []
