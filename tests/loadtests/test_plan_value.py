"""Which prefixes are worth their bytes: the tree, the price, the order and the capacity."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.loadtests.plan.value import Segment, ValuePlan, chosen, plan_value, segments
from kvroute.loadtests.traces.rows import Row, Trace
from kvroute.loadtests.traces.sample import generated
from kvroute.policies.costs.speeds import PRESETS, Speed

PLAIN = Speed(0, 0, 1.0, 0, 0, 0, 0, kv_tokens=0, kv_bytes_per_token=1000)  # a millisecond a token
FAST = 1e15  # bytes/s: reading costs nothing


def trace(*prompts: tuple[int, ...]) -> Trace:
    """Ten tokens a block, all blocks full."""
    return Trace("hand", 10, tuple(Row(i, 10 * len(ids), 1, ids) for i, ids in enumerate(prompts)))


def a_plan(made: Trace, **change: object) -> ValuePlan:
    plan = ValuePlan(made, "plain", PLAIN, 10**9, "a link", read_bytes_per_s=FAST, write_bytes_per_s=FAST)
    return replace(plan, **change)  # type: ignore[arg-type]


def shape(segment: Segment) -> tuple[object, ...]:
    below = tuple(shape(each) for each in segment.below)
    return (segment.first_block, segment.start_tokens, segment.blocks, segment.uses, below)


def test_blocks_that_the_same_requests_pass_are_one_segment() -> None:
    made = trace((1, 2, 3, 4), (1, 2, 5), (1, 2, 3, 6), (9,))
    assert [shape(root) for root in segments(made)] == [
        (1, 0, 2, 3, ((3, 20, 1, 2, ((4, 30, 1, 1, ()), (6, 30, 1, 1, ()))), (5, 20, 1, 1, ()))),
        (9, 0, 1, 1, ()),
    ]


def test_a_partial_last_block_is_not_kept() -> None:
    made = Trace("hand", 10, (Row(0, 15, 1, (1, 2)), Row(1, 15, 1, (1, 2))))
    assert [shape(root) for root in segments(made)] == [(1, 0, 1, 2, ())]


def test_values_by_hand() -> None:
    made = trace((1, 2, 3, 4), (1, 2, 5), (1, 2, 3, 6), (9,))
    # 20 tokens reused twice save 20 ms each; 10 tokens reused once. Writing 1 MB/s: 20 and 10 ms.
    report, _ = plan_value(a_plan(made, write_bytes_per_s=1e6, read_bytes_per_s=1e7))
    first, *others = report.data["prefixes"]
    assert (first["first_block"], first["tokens"], first["reuses"]) == (1, 20, 2)
    assert first["size_bytes"] == 20_000
    # Two times 20 ms, less 20 ms of writing and two reads of 2 ms.
    assert first["value_s"] == pytest.approx(0.040 - 0.020 - 0.004)
    # One time 10 ms does not pay for 10 ms of writing and 1 ms of reading.
    assert others == []
    assert report.data["prefixes_worth_keeping"] == 1


def test_a_rich_prefix_waits_for_the_poor_one_it_hangs_on() -> None:
    # Attention makes late blocks dear: per byte the second segment is worth more, but is of no use alone.
    speed = replace(PLAIN, attention_ms=1.0)
    plan = a_plan(trace((1, 2), (1, 2), (1, 3)), speed=speed)
    first, second = chosen(plan, segments(plan.trace))
    assert (first.segment.first_block, second.segment.first_block) == (1, 2)
    assert second.per_byte > first.per_byte


def test_a_capacity_holds_the_best_first() -> None:
    made = trace((1,), (1,), (1,), (2,), (2,), (3, 4), (3, 4))
    report, plot = plan_value(a_plan(made, capacity_bytes=20_000))
    # 10 kB with 20 ms, 10 kB with 10 ms and 20 kB with 20 ms: 30 of 50 ms fit.
    assert [each["first_block"] for each in report.data["prefixes"]] == [1, 2, 3]
    assert report.data["share_in_capacity"] == pytest.approx(0.6)
    assert plan_value(a_plan(made, capacity_bytes=9_999))[0].data["share_in_capacity"] == 0
    assert plan_value(a_plan(made, capacity_bytes=40_000))[0].data["share_in_capacity"] == 1
    assert plot.series[0].ys == pytest.approx([40, 60, 100])


def test_a_trace_without_reuse_has_nothing_to_keep() -> None:
    with pytest.raises(ValueError, match="--trace: hand: no prefix is worth keeping"):
        plan_value(a_plan(trace((1, 2), (3, 4))))


@given(st.integers(0, 2**32), st.integers(1, 10**10), st.integers(1, 10**10))
def test_a_larger_capacity_never_holds_less(seed: int, capacity: int, more: int) -> None:
    # Of five chats on four system prompts two share one, whatever the seed.
    plan = ValuePlan(
        generated(seed, sessions=5), "q", PRESETS["qwen3-32b-h200-tp2"], capacity, "dram", 20e9, 20e9
    )
    small, large = (
        plan_value(replace(plan, capacity_bytes=size))[0].data["share_in_capacity"]
        for size in (capacity, capacity + more)
    )
    assert 0 <= small <= large <= 1


def test_only_so_many_are_shown() -> None:
    report, _ = plan_value(ValuePlan(generated(), "q", PLAIN, 10**12, "dram", FAST, FAST, top=3))
    assert len(report.data["prefixes"]) == len(report.rows) == 3
    with pytest.raises(ValueError, match="--top: 0"):
        a_plan(trace((1,)), top=0)
