"""Generated workloads: who shares what with whom, and when they come."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from kvroute.loadtests.traces.arrivals import arrivals
from kvroute.loadtests.traces.rows import Trace
from kvroute.loadtests.traces.workloads import BLOCK_TOKENS, WORKLOADS, generate


def repeated(trace: Trace) -> float:
    """Share of blocks that an earlier request had, in an endless cache."""
    seen: set[int] = set()
    hits = total = 0
    for row in trace.rows:
        hits += sum(id_ in seen for id_ in row.block_ids)
        total += len(row.block_ids)
        seen.update(row.block_ids)
    return hits / total


@pytest.mark.parametrize("kind", WORKLOADS)
def test_workloads_are_chained_ordered_and_the_same_for_a_seed(kind: str) -> None:
    trace = generate(kind, 300, 2.0, 7)
    assert trace == generate(kind, 300, 2.0, 7)
    assert trace != generate(kind, 300, 2.0, 8)
    assert len(trace.rows) == 300
    before: dict[int, int | None] = {}
    for row in trace.rows:
        assert len(row.block_ids) == -(-row.input_tokens // BLOCK_TOKENS)
        assert row.output_tokens >= 1
        for parent, id_ in zip((None, *row.block_ids), row.block_ids, strict=False):
            assert before.setdefault(id_, parent) == parent
    times = [row.arrival_s for row in trace.rows]
    assert times == sorted(times)


def test_workloads_keep_their_requests_when_kinds_are_added() -> None:
    """Pinned: figures that were found on them must be found again."""
    pinned = {
        kind: (
            round(row.arrival_s, 3),
            row.input_tokens,
            row.output_tokens,
            row.block_ids[-1],
            row.session_id,
        )
        for kind in ("chat", "agents", "documents", "mixed")
        for row in generate(kind, 200, 4.0, 1).rows[-1:]
    }
    assert pinned == PINNED


PINNED = {
    "agents": (145.34, 31424, 73, 1998, "s1587"),
    "chat": (1087.445, 9136, 197, 2027, "s1876"),
    "documents": (562.975, 13531, 74, 10020, None),
    "mixed": (705.25, 13150, 488, 5635, "s5422"),
}


def test_who_comes_back_repeats_what_was_said() -> None:
    shares = {kind: repeated(generate(kind, 500)) for kind in WORKLOADS}
    assert shares["agents"] > 0.7
    assert 0.5 < shares["documents"] < shares["chat"] < 1.0
    assert shares["shared"] > 0.6
    assert shares["scans"] == 0.0
    assert shares["bursts"] > 0.6


def test_clients_that_come_back_say_so() -> None:
    first: dict[str | None, tuple[int, ...]] = {}
    for arrival in arrivals(generate("agents", 200), BLOCK_TOKENS):
        session = arrival.view.session_id
        assert session is not None
        keys = first.setdefault(session, tuple(arrival.keys.keys))
        assert tuple(arrival.keys.keys)[: len(keys)] == keys
    assert 5 < len(first) < 100
    one_off = [arrival.view.session_id for arrival in arrivals(generate("documents", 50), BLOCK_TOKENS)]
    assert one_off == [None] * 50


def test_one_system_prompt_is_more_popular_than_another_and_nobody_comes_back() -> None:
    trace = generate("shared", 400)
    first = Counter(row.block_ids[0] for row in trace.rows)
    assert len(first) == 8
    assert max(first.values()) > 5 * min(first.values())
    assert len({row.block_ids[-1] for row in trace.rows}) == 400
    assert {row.session_id for row in trace.rows} == {None}


def test_bursts_stand_out_of_a_quiet_background() -> None:
    trace = generate("bursts", 2000, per_s=2.0, seed=3)
    gaps = sorted(b.arrival_s - a.arrival_s for a, b in pairwise(trace.rows))
    assert gaps[600] < 0.1
    assert sum(gap > 0.5 for gap in gaps) > 200
    prompts = Counter(row.block_ids for row in trace.rows)
    equal = sum(count for count in prompts.values() if count >= 16)
    assert 0.1 < equal / 2000 < 0.5
    documents = Counter(row.block_ids[: len(row.block_ids) // 2] for row in trace.rows)
    assert any(count >= 16 and ids not in prompts for ids, count in documents.items())


def test_a_long_prompt_of_a_scan_never_returns() -> None:
    trace = generate("scans", 300)
    assert sum(row.input_tokens for row in trace.rows) / 300 > 5000


def test_workloads_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=f"--workload: unknown 'poems'; known: {', '.join(WORKLOADS)}"):
        generate("poems")
    for requests, per_s in ((0, 1.0), (1, 0.0), (1, float("inf"))):
        with pytest.raises(ValueError, match="a workload needs requests and a rate above 0"):
            generate("chat", requests, per_s)
