"""Traces as plans read them, and the workload that stands in for one."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvroute.loadtests.traces.rows import Row, generated, read_trace

GOOD = '{"timestamp": 1500, "input_length": 600, "output_length": 5, "hash_ids": [7, 8], "other": 1}\n'


def test_a_trace_is_read_in_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(GOOD + "\n" + GOOD.replace("1500", "0"))
    trace = read_trace(path)
    assert trace.rows == (Row(0.0, 600, 5, (7, 8)), Row(1.5, 600, 5, (7, 8)))
    assert trace.block_tokens == 512
    assert trace.name == "trace.jsonl"
    assert trace.prompts[0] == (600, (7, 8))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 2: Input data was truncated"),
        ("[1]", r"line 2: Expected `object`, got `array`"),
        ('{"timestamp": 1}', r"line 2: Object missing required field `input_length`"),
        (GOOD.replace("600", "0"), r"line 2: Expected `int` >= 1 - at `\$\.input_length`"),
        (GOOD.replace("1500", "-1"), r"line 2: Expected `float` >= 0"),
        (GOOD.replace("[7, 8]", "[7]"), r"line 2: hash_ids: 1 for 600 tokens; 2 blocks of 512 tokens"),
        ("[" * 200_000, r"line 2: "),
        (" " * 2**20 + "x", r"line 2: longer than 1048576 bytes"),
    ],
)
def test_a_line_that_does_not_fit_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(GOOD + line)
    with pytest.raises(ValueError, match=f"^--trace: .*{message}"):
        read_trace(path)


def test_no_file_and_no_requests_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--trace: .*No such file or directory; the path of a JSONL trace"):
        read_trace(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"--trace: .*no requests"):
        read_trace(tmp_path / "empty.jsonl")


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
