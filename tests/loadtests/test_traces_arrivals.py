"""When requests arrive, how long they are, and what they share."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from random import Random

import pytest

from kvroute.loadtests.traces.arrivals import Arrival, arrivals, arriving
from kvroute.loadtests.traces.cuts import Cut
from kvroute.loadtests.traces.rows import Row, Trace
from tests.loadtests.random_traces import in_common, random_trace, shared

# --- cuts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 0.1, 0.37, 0.5, 1.9, 3.0, 1 / 3])
@pytest.mark.parametrize(("trace_tokens", "block_tokens"), [(64, 16), (64, 64), (512, 64), (16, 1), (48, 12)])
def test_prompts_cut_anew_share_exactly_what_the_trace_says(
    trace_tokens: int, block_tokens: int, scale: float
) -> None:
    seed = hash((trace_tokens, block_tokens, scale)) % 1000
    trace = random_trace(Random(seed), trace_tokens)
    cut = Cut(trace_tokens, block_tokens, scale)
    made = list(arriving(trace, block_tokens, scale=scale))
    before: dict[int, tuple[int, ...]] = {}
    sizes: dict[int, int] = {}
    for one, row in zip(made, trace.rows, strict=True):
        tokens = one.keys.prompt_tokens
        assert tokens == one.view.prompt_tokens == max(1, int(row.input_tokens * scale))
        assert len(one.keys.keys) == tokens // block_tokens
        all_keys = cut.all(row.block_ids, tokens)
        assert all_keys[: len(one.keys.keys)] == one.keys.keys
        assert len(all_keys) == -(-tokens // block_tokens)
        for index, key in enumerate(all_keys):  # a key stands for one prefix and one length: aiperf insists
            assert before.setdefault(key, all_keys[:index]) == all_keys[:index], f"seed {seed}"
            size = min(block_tokens, tokens - index * block_tokens)
            assert sizes.setdefault(key, size) == size, f"seed {seed}"
        for other, other_row in zip(made, trace.rows, strict=True):
            expected = in_common(row, other_row, cut) // block_tokens
            assert shared(one.keys.keys, other.keys.keys) == expected, f"seed {seed}"


def test_even_parts_keep_their_numbers() -> None:
    cut = Cut(512, 128)
    assert cut.full((5, 9), 700) == (20, 21, 22, 23, 36)
    assert cut.all((5, 9), 700) == (20, 21, 22, 23, 36, 37)
    assert cut.all((5, 9), 640) == (20, 21, 22, 23, 36)
    assert Cut(512, 512).all((5, 9), 700) == (5, 9)


def test_lengths_are_scaled_and_never_nothing() -> None:
    cut = Cut(64, 16, 0.1)
    assert [cut.length(tokens) for tokens in (1, 9, 10, 19, 20, 1000)] == [1, 1, 1, 1, 2, 100]
    (one,) = arriving(Trace("test", 64, (Row(0.0, 640, 30, tuple(range(10))),)), 64, scale=2.5)
    assert (one.view.prompt_tokens, one.output_tokens, len(one.keys.keys)) == (1600, 75, 25)
    assert one.block_ids == tuple(range(10))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_tokens": 100}, "block_tokens must divide the trace's blocks of 512 tokens, got 100"),
        ({"block_tokens": 0}, "block_tokens must divide the trace's blocks of 512 tokens, got 0"),
        ({"scale": 0.0}, "scale must be above 0 and at most 1000, got 0"),
        ({"scale": float("nan")}, "scale must be above 0 and at most 1000, got nan"),
        ({"speedup": 0.0}, "speedup must be positive, got 0"),
        ({"jitter_s": -1.0}, "jitter_s must be 0 or more, got -1"),
        ({"process": "flood"}, "unknown arrivals 'flood'; known: trace, poisson, gamma"),
    ],
)
def test_what_cannot_be_is_refused_before_the_first_request(options: dict[str, object], message: str) -> None:
    trace = Trace("test", 512, (Row(0.0, 700, 1, (5, 9)),))
    with pytest.raises(ValueError, match=message):
        arriving(trace, **{"block_tokens": 512, **options})  # type: ignore[arg-type]


# --- when ----------------------------------------------------------------------------------------


class Counted(tuple[Row, ...]):
    """Rows that know how many of them were asked for."""

    asked = 0

    def __iter__(self) -> Iterator[Row]:
        for row in super().__iter__():
            self.asked += 1
            yield row


def ticks(count: int) -> Trace:
    """Four requests on every third second."""
    return Trace(
        "test", 64, Counted(Row(3.0 * (i // 4), 100, i % 7 + 1, (2 * i, 2 * i + 1)) for i in range(count))
    )


@pytest.mark.parametrize("process", ["trace", "poisson", "gamma"])
def test_the_iterator_gives_what_the_list_has_in_order(process: str) -> None:
    trace = ticks(400)
    listed = arrivals(trace, 64, 2.0, 10.0, seed=7, process=process)
    assert list(arriving(trace, 64, 2.0, 10.0, seed=7, process=process)) == listed
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(listed))
    assert sorted(one.block_ids for one in listed) == sorted(row.block_ids for row in trace.rows)
    assert arrivals(trace, 64, 2.0, 10.0, seed=8, process=process) != listed


def test_jitter_moves_each_by_its_own_draw() -> None:
    trace, source = ticks(40), Random(7)
    due = {row.block_ids: (row.arrival_s + 10 * source.random()) / 2 for row in trace.rows}
    assert {one.block_ids: one.arrival_s for one in arriving(trace, 64, 2.0, 10.0, seed=7)} == due
    plain: list[Arrival] = arrivals(trace, 64)
    assert [one.block_ids for one in plain] == [row.block_ids for row in trace.rows]


@pytest.mark.parametrize(
    ("process", "jitter_s", "most"), [("trace", 6.0, 12), ("trace", 0.0, 1), ("gamma", 0.0, 1)]
)
def test_no_more_rows_are_read_ahead_than_a_jitter_window_has(
    process: str, jitter_s: float, most: int
) -> None:
    trace = ticks(400)
    rows = trace.rows
    assert isinstance(rows, Counted)
    coming = arriving(trace, 64, jitter_s=jitter_s, process=process)
    assert rows.asked == 0
    ahead = [rows.asked - given for given, _ in enumerate(coming)]
    assert 1 <= max(ahead) <= most + 1
