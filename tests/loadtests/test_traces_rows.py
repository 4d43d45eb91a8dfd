"""Rows packed and unpacked, and the chats that stand in for a trace."""

from __future__ import annotations

import pickle
from random import Random

import pytest

from kvroute.loadtests.traces.rows import Row, Rows
from kvroute.loadtests.traces.runs import ids_of, runs_of
from kvroute.loadtests.traces.sample import generated


@pytest.mark.parametrize(
    ("ids", "runs"),
    [
        ((), []),
        ((4,), [4, 5]),
        ((4, 5, 6, 9), [4, 7, 9, 10]),
        ((3, 2, 1), [3, 4, 2, 3, 1, 2]),
        ((-2, -1, 0), [-2, 1]),
        ((7, 7), [7, 8, 7, 8]),
    ],
)
def test_consecutive_ids_are_one_run(ids: tuple[int, ...], runs: list[int]) -> None:
    assert runs_of(ids) == runs
    assert ids_of(runs) == ids


def test_packed_rows_are_the_rows() -> None:
    source = Random(5)
    rows = [
        Row(source.random(), source.randrange(1, 9000), source.randrange(1, 99), ids, session)
        for ids in [(), (1, 2, 3), (1, 2, 9, 8), (2**62,)] * 5
        for session in (None, "a", "b")
    ]
    packed = Rows(rows)
    assert packed == tuple(rows) == packed
    assert (packed[3], packed[-1], packed[5:9]) == (rows[3], rows[-1], tuple(rows[5:9]))
    assert pickle.loads(pickle.dumps(packed)) == packed
    assert packed != rows[:-1]
    assert packed != 1
    assert repr(packed) == "Rows(60 rows, 75 runs, 2 sessions)"


def test_rows_are_sorted_stably_and_cut() -> None:
    packed = Rows(Row(at_s, number, 1, (number,)) for number, at_s in enumerate((2.0, 1.0, 2.0, 1.0, 3.0), 1))
    assert packed.sort() == 2
    assert [row.input_tokens for row in packed] == [2, 4, 1, 3, 5]
    many = Rows(Row(float(number % 2), 1, 1, (number,)) for number in range(1000))
    assert many.sort() == 499
    assert [row.block_ids[0] for row in many] == [*range(0, 1000, 2), *range(1, 1000, 2)]
    packed.shift(1.0)
    assert [row.arrival_s for row in packed] == [0.0, 0.0, 1.0, 1.0, 2.0]
    packed.sort(keep=3)
    assert [row.input_tokens for row in packed] == [2, 4, 1]


def test_a_row_takes_32_bytes_and_16_for_a_run() -> None:
    packed = Rows(Row(1.0, 640, 1, tuple(range(10 * i, 10 * i + 10))) for i in range(2000))
    columns = [getattr(packed, name) for name in Rows.__slots__]
    assert sum(len(memoryview(one).cast("B")) for one in columns if hasattr(one, "itemsize")) == 2000 * 48


def test_the_generated_workload_is_the_same_for_the_same_seed_and_shares_prefixes() -> None:
    trace = generated(seed=3)
    assert trace == generated(seed=3)
    assert trace != generated(seed=4)
    assert [row.arrival_s for row in trace.rows] == sorted(row.arrival_s for row in trace.rows)
    for row in trace.rows:
        assert len(row.block_ids) == -(-row.input_tokens // trace.block_tokens)
        assert len(set(row.block_ids)) == len(row.block_ids)
    seen: set[int] = set()
    shared = 0
    for row in trace.rows:
        shared += sum(block_id in seen for block_id in row.block_ids)
        seen.update(row.block_ids)
    blocks = sum(len(row.block_ids) for row in trace.rows)
    assert 0.4 < shared / blocks < 0.8


def test_an_id_stands_for_the_same_prefix_everywhere() -> None:
    before: dict[int, tuple[int, ...]] = {}
    for row in generated(seed=1).rows:
        for index, block_id in enumerate(row.block_ids[:200]):
            assert before.setdefault(block_id, row.block_ids[:index]) == row.block_ids[:index]
