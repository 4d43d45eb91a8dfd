"""`kvroute plan value`: which prefixes of a trace are worth their bytes, and what a capacity holds of it."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from kvroute.loadtests.plan.choices import whole_number
from kvroute.loadtests.plan.show import Plot, Report, Series
from kvroute.loadtests.traces.rows import Trace
from kvroute.policies.costs.breakeven import value_per_byte
from kvroute.policies.costs.speeds import Speed
from kvroute.policies.costs.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class ValuePlan:
    trace: Trace
    preset: str
    speed: Speed
    capacity_bytes: int
    link_name: str
    read_bytes_per_s: float
    write_bytes_per_s: float
    top: int = 15

    def __post_init__(self) -> None:
        whole_number("--top", self.top, most=1000)


@dataclass(slots=True, eq=False)
class Segment:
    """A run of blocks that the same requests have passed, after all those above it."""

    first_block: int
    start_tokens: int
    uses: int
    blocks: int = 1
    below: list[Segment] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Worth:
    """A segment's price: seconds it saves over the whole trace, net, and the bytes it takes."""

    segment: Segment
    tokens: int
    size_bytes: int
    value_s: float
    per_byte: float


def plan_value(plan: ValuePlan) -> tuple[Report, Plot]:
    """ValueError if nothing in the trace comes twice."""
    worths = list(chosen(plan, segments(plan.trace)))
    if not worths:
        raise ValueError(
            f"--trace: {plan.trace.name}: no prefix is worth keeping: none is used again for long"
        )
    total_s = sum(worth.value_s for worth in worths)
    sizes = list(accumulate(worth.size_bytes for worth in worths))
    values = list(accumulate(worth.value_s for worth in worths))
    fit = sum(size <= plan.capacity_bytes for size in sizes)
    data = {
        "trace": plan.trace.name,
        "requests": len(plan.trace.rows),
        "preset": plan.preset,
        "link": plan.link_name,
        "capacity_bytes": plan.capacity_bytes,
        "prefixes_worth_keeping": len(worths),
        "bytes_worth_keeping": sizes[-1],
        "total_value_s": total_s,
        "value_in_capacity_s": values[fit - 1] if fit else 0.0,
        "share_in_capacity": values[fit - 1] / total_s if fit else 0.0,
        "prefixes": [_prefix(worth) for worth in worths[: plan.top]],
    }
    return _report(plan, data), _plot(plan, sizes, values)


def segments(trace: Trace) -> list[Segment]:
    """The prefix tree of all full blocks, in runs that share their requests; the runs without one above."""
    parents: dict[int, int | None] = {}
    uses: dict[int, int] = {}
    for row in trace.rows:
        above: int | None = None
        for block_id in row.block_ids[: row.input_tokens // trace.block_tokens]:
            parents.setdefault(block_id, above)
            uses[block_id] = uses.get(block_id, 0) + 1
            above = block_id
    return _runs(parents, uses, trace.block_tokens)


def _runs(parents: dict[int, int | None], uses: dict[int, int], block_tokens: int) -> list[Segment]:
    roots: list[Segment] = []
    of_block: dict[int, Segment] = {}
    for block_id, above in parents.items():  # A block comes after the one above it: insertion order.
        segment = None if above is None else of_block[above]
        if segment is not None and segment.uses == uses[block_id]:
            # All requests that passed the one above go on here, so nothing else hangs on it.
            segment.blocks += 1
            of_block[block_id] = segment
            continue
        start = 0 if segment is None else segment.start_tokens + segment.blocks * block_tokens
        of_block[block_id] = new = Segment(block_id, start, uses[block_id])
        (roots if segment is None else segment.below).append(new)
    return roots


def chosen(plan: ValuePlan, roots: list[Segment]) -> Iterator[Worth]:
    """What is worth keeping, the most per byte first, but never before what it hangs on.

    Greedy: a poor prefix that carries a rich one waits for its own turn.
    """
    waiting: list[tuple[float, int, Worth]] = []

    def offer(segment: Segment) -> None:
        worth = _worth(plan, segment)
        if worth.value_s > 0:
            heapq.heappush(waiting, (-worth.per_byte, segment.first_block, worth))

    for root in roots:
        offer(root)
    while waiting:
        worth = heapq.heappop(waiting)[2]
        yield worth
        for segment in worth.segment.below:
            offer(segment)


def _worth(plan: ValuePlan, segment: Segment) -> Worth:
    """Reuses are those of the whole trace, known afterwards: an upper bound of what is to be expected."""
    tokens = segment.blocks * plan.trace.block_tokens
    size_bytes = tokens * plan.speed.kv_bytes_per_token
    reuses = segment.uses - 1
    saved_s = plan.speed.marginal_prefill_s(tokens, segment.start_tokens)
    # Bytes only: the latency of a load is once for the whole prefix, not for each of its segments.
    cost_s = size_bytes / plan.write_bytes_per_s + reuses * size_bytes / plan.read_bytes_per_s
    per_byte = value_per_byte(reuses, saved_s, cost_s, size_bytes)
    return Worth(segment, tokens, size_bytes, per_byte * size_bytes, per_byte)


def _prefix(worth: Worth) -> dict[str, Any]:
    return {
        "first_block": worth.segment.first_block,
        "start_tokens": worth.segment.start_tokens,
        "tokens": worth.tokens,
        "size_bytes": worth.size_bytes,
        "reuses": worth.segment.uses - 1,
        "value_s": worth.value_s,
        "value_s_per_gib": worth.per_byte * 2**30,
    }


def _report(plan: ValuePlan, data: dict[str, Any]) -> Report:
    columns = ("prefix at block", "from token", "tokens", "KV", "reuses", "saves", "saves per GiB")
    rows = tuple(
        (
            f"{each['first_block']}",
            f"{each['start_tokens']}",
            f"{each['tokens']}",
            format_bytes(each["size_bytes"]),
            f"{each['reuses']}",
            format_seconds(each["value_s"]),
            format_seconds(each["value_s_per_gib"]),
        )
        for each in data["prefixes"]
    )
    title = f"Prefixes of {data['trace']} by value per byte: {plan.preset}, read over {plan.link_name}"
    notes = (
        f"{format_bytes(plan.capacity_bytes)} hold {data['share_in_capacity']:.1%} of the "
        f"{format_seconds(data['total_value_s'])} of prefill that all {data['prefixes_worth_keeping']} "
        f"prefixes worth keeping ({format_bytes(data['bytes_worth_keeping'])}) save over "
        f"{data['requests']} requests.",
        "Value: reuses x prefill seconds saved, less one write and a read for each reuse. Reuses are counted "
        "over the whole trace, in hindsight, and what is kept is kept throughout: evicting in time needs "
        "fewer bytes, and a forecast knows less.",
    )
    return Report(title, columns, rows, data, notes)


def _plot(plan: ValuePlan, sizes: list[int], values: list[float]) -> Plot:
    share = [100 * value / values[-1] for value in values]
    size_gib = [size / 2**30 for size in sizes]
    return Plot(
        f"Value that a capacity holds: {plan.trace.name}, {plan.preset}",
        "capacity (GiB)",
        "share of all seconds that prefixes save (%)",
        (Series("best value per byte first", size_gib, share),),
        log_x=True,
        marks=((plan.capacity_bytes / 2**30, f"given: {format_bytes(plan.capacity_bytes)}"),),
    )
