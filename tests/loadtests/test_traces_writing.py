"""What is written for others' load generators, and read back."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from kvroute.loadtests.traces.arrivals import arrivals
from kvroute.loadtests.traces.cuts import Cut
from kvroute.loadtests.traces.prompts import Prompts
from kvroute.loadtests.traces.reading import read_trace
from kvroute.loadtests.traces.rows import Row, Trace
from kvroute.loadtests.traces.workloads import generate
from kvroute.loadtests.traces.writing import write_mooncake, write_text
from tests.loadtests.random_traces import random_trace


def test_a_line_has_what_aiperf_and_dynamo_read(tmp_path: Path) -> None:
    trace = Trace("test", 512, (Row(0.0, 700, 3, (5, 9), "s1"), Row(1.2346, 512, 4, (5,))))
    path = tmp_path / "out.jsonl"
    assert write_mooncake(path, arrivals(trace, 512), Cut(512, 512)) == 2
    assert path.read_text() == (
        '{"timestamp":0,"input_length":700,"output_length":3,"hash_ids":[5,9]}\n'
        '{"timestamp":1235,"input_length":512,"output_length":4,"hash_ids":[5]}\n'
    )
    write_mooncake(path, arrivals(trace, 512, speedup=2.0, scale=0.5), Cut(512, 128, 0.5))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["input_length"] for line in lines] == [350, 256]
    assert [line["timestamp"] for line in lines] == [0, 617]
    assert [len(line["hash_ids"]) for line in lines] == [3, 2]
    assert lines[0]["hash_ids"][:2] == lines[1]["hash_ids"]


@pytest.mark.parametrize("scale", [1.0, 0.45])
def test_what_is_written_is_read_as_the_same_requests(tmp_path: Path, scale: float) -> None:
    path = tmp_path / "out.jsonl"
    for trace in (random_trace(Random(4), 64), generate("agents", 80, seed=1), generate("mixed", 80, seed=1)):
        made = arrivals(trace, 16, scale=scale)
        assert write_mooncake(path, made, Cut(64, 16, scale), sessions=True) == len(trace.rows)
        back = arrivals(read_trace(path, block_tokens=16), 16)
        assert [one.keys for one in back] == [one.keys for one in made]
        assert [one.view for one in back] == [one.view for one in made]
        assert [one.output_tokens for one in back] == [one.output_tokens for one in made]
        first_s = made[0].arrival_s
        assert [one.arrival_s for one in back] == pytest.approx(
            [one.arrival_s - first_s for one in made], abs=1.1e-3
        )


def test_text_is_written_as_vllm_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    made = arrivals(generate("shared", 5, seed=1), 64)
    prompts = Prompts(Cut(64, 64))
    assert write_text(path, made, prompts) == 5
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["output_tokens"] for line in lines] == [one.output_tokens for one in made]
    assert [line["prompt"] for line in lines] == [
        prompts.text(one.block_ids, one.view.prompt_tokens) for one in made
    ]
    assert [len(line["prompt"].split()) for line in lines] == [one.view.prompt_tokens for one in made]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere/x: No such file or directory; the path of a file to write"):
        write_mooncake(tmp_path / "nowhere" / "x", [], Cut(64, 64))
