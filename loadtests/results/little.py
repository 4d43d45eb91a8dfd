"""Little's law as a check of what was measured: requests inside = rate of arrival x stay, where stable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvroute.loadtests.results.measured import Measured

MAX_LEFT_INSIDE = 0.1
"""Of the arrivals. With more inside at the end, the fleet did not keep up, or the run was too short."""


@dataclass(frozen=True, slots=True)
class NotClaimed:
    """The law says nothing here."""

    reason: str


def little(counted: Sequence[Measured]) -> float | NotClaimed:
    """L / (lambda W) over the time from the first arrival to the last, of the requests that were served.

    L is the time average of those inside, who came before is not among them; near 1, and off by what is
    inside at the end. `counted` is in order of arrival.
    """
    served = [(one.arrival_s, one.end_s) for one in counted if one.failure is None and one.end_s is not None]
    if not served:
        return NotClaimed("nothing was served")
    begin_s, until_s = served[0][0], served[-1][0]
    if until_s <= begin_s:
        return NotClaimed("all came at once")
    left = sum(end_s > until_s for _, end_s in served) / len(served)
    if left > MAX_LEFT_INSIDE:
        return NotClaimed(
            f"{left:.0%} were inside when the last one came: the fleet did not keep up, or the run was short"
        )
    inside = sum(min(end_s, until_s) - arrival_s for arrival_s, end_s in served)
    stays = sum(end_s - arrival_s for arrival_s, end_s in served)
    return inside / stays if stays else NotClaimed("nothing took any time")
