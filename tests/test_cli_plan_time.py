"""`kvroute plan` about time, as a user starts it: options in, figures out, one line for what is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kvroute.cli_plan import app

COMMANDS = ("breakeven", "chunks", "pd", "queue", "value")


def run(*arguments: str) -> tuple[int, str, str]:
    root = typer.Typer()
    root.add_typer(app, name="plan")
    result = CliRunner().invoke(root, ["plan", *arguments])
    return result.exit_code, result.stdout, result.stderr


def figures(*arguments: str) -> Any:
    code, out, err = run(*arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_needs_no_option_and_draws_a_picture(command: str, tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    code, out, err = run(command, "--plot", str(picture))
    assert (code, err) == (0, "")
    assert len(out.splitlines()) > 5
    assert "…" not in out  # No figure is cut off.
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_a_table_in_a_pipe_is_not_folded_into_80_columns() -> None:
    _, out, _ = run("chunks", "--sizes", "64")
    heads = next(line for line in out.splitlines() if "objects" in line)
    assert all(head in heads for head in ("lost at ends", "tail/prompt", "TTFT mean", "TTFT p99"))


def test_bandwidths_have_units() -> None:
    # 1024 tokens of 1 MiB are 1 GiB; 200Gbps is 25 GB/s is 23.28 GiB/s.
    for bandwidth, load_ms in (("20GiB/s", 50.0), ("200Gbps", 1e3 / 23.283), ("25GB/s", 1e3 / 23.283)):
        options = ("--bytes-per-token", "1MiB", "--lengths", "1024", "--latency", "0")
        data = figures("breakeven", "--bandwidth", bandwidth, *options)
        assert data["links"][0]["lengths"][0]["payload_bytes"] == 2**30
        assert data["links"][0]["lengths"][0]["load_ms"] == pytest.approx(load_ms, rel=1e-4)
        assert data["links"][0]["link"] == bandwidth


def test_break_even_with_queues_and_a_copy() -> None:
    options = ("--link", "ib-400g", "--lengths", "8192", "--host-bandwidth", "20GB/s", "--overlap", "serial")
    fetched = figures("breakeven", *options, "--lookup", "2ms")["links"]
    # 2147 MB at 43 GB/s, then at 20 GB/s, behind 1 ms.
    assert fetched[0]["lengths"][0]["load_ms"] == pytest.approx(1 + 49.941 + 107.374, rel=1e-4)
    assert fetched[0]["lengths"][0]["fetch"]
    late = figures("breakeven", *options, "--queue-reuse", "800ms", "--queue-cold", "10ms")["links"]
    assert not late[0]["lengths"][0]["fetch"]


def test_chunks_of_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 1025, "output_length": 1, "hash_ids": [1, 2, 3]}
    trace.write_text(json.dumps(row) + "\n" + json.dumps(row))
    data = figures("chunks", "--trace", str(trace), "--sizes", "512,256", "--metadata", "1KiB")
    assert [each["chunk_tokens"] for each in data["chunks"]] == [256, 512]
    assert [each["usable_tokens"] for each in data["chunks"]] == [1024, 1024]
    assert [each["metadata_bytes"] for each in data["chunks"]] == [4096, 2048]
    assert data["trace"] == "trace.jsonl"


def test_seeds_generate_different_workloads() -> None:
    first, again, other = (figures("value", "--seed", seed)["total_value_s"] for seed in ("1", "1", "2"))
    assert first == again != other


def test_a_split_with_a_limit_on_the_itl() -> None:
    loose, tight = figures("pd"), figures("pd", "--itl", "15ms")
    assert (loose["pays"], loose["reason"]) == (True, "pays")
    assert (tight["pays"], tight["reason"]) == (True, "only the split fleet keeps the ITL limit")
    fixed = figures("pd", "--prefill-workers", "2")
    assert (fixed["pays"], fixed["reason"]) == (False, "unbalanced fleet")


def test_queue_says_how_many_are_in_flight() -> None:
    options = ("--rate", "10", "--stay", "2s", "--service", "300ms", "--servers", "4", "--buffer", "1GiB")
    data = figures("queue", *options)
    assert (data["in_flight"], data["buffer_bytes"], data["stable"]) == (20, 20 * 2**30, True)


def test_queue_refuses_a_steady_state_that_is_none() -> None:
    options = ("queue", "--rate", "20", "--stay", "2s", "--service", "200ms", "--servers", "4")
    code, out, _ = run(*options, "--json")
    assert code == 1
    assert json.loads(out)["stable"] is False
    assert json.loads(out)["in_flight"] is None
    code, out, _ = run(*options)
    assert code == 1
    assert "in flight" not in out
    assert "utilisation 1.00 is not below 1: the queue grows without end" in out


def test_value_within_a_capacity() -> None:
    small, large = (figures("value", "--capacity", size) for size in ("1GiB", "10TiB"))
    assert 0 < small["share_in_capacity"] < large["share_in_capacity"] == 1
    assert small["total_value_s"] == large["total_value_s"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("breakeven --preset gpt-9", "--preset: .*'gpt-9'.*llama-3.1-8b-h100-tp1.*qwen3-32b-h200-tp2"),
        ("breakeven --link carrier-pigeon", "--link: 'carrier-pigeon' is unknown; one of dram, nvme.*tcp"),
        ("breakeven --bandwidth 200", "--bandwidth: '200': the unit is missing.*200Gbps"),
        ("breakeven --bandwidth 200gbps", r"--bandwidth: .*case counts: Gbps"),
        ("breakeven --bandwidth 0GB/s", "--bandwidth: '0GB/s' is zero"),
        ("breakeven --latency 5", "--latency: '5': the unit is missing"),
        ("breakeven --lookup -2ms", "--lookup: '-2ms' is negative"),
        ("breakeven --lengths 1k", "--lengths: '1k' is no list of numbers separated by commas"),
        ("breakeven --lengths 0", "--lengths: 0 is not usable; 1 to"),
        ("breakeven --suffix 0", "--suffix: 0 is not usable"),
        ("breakeven --overlap half", "--overlap: 'half' is unknown; one of serial, pipelined"),
        ("breakeven --bytes-per-token 0", "--bytes-per-token: '0' is zero"),
        ("breakeven --plot a.jpg", r"--plot: a\.jpg is not named \.png"),
        ("breakeven --plot /nowhere/a.png", "--plot: /nowhere/a.png: No such file or directory"),
        ("chunks --sizes 24", "chunk: 24 tokens are not whole pages of 16 tokens.*such as 16 or 32"),
        ("chunks --page 0", "page: 0 is not above 0"),
        ("chunks --trace nowhere.jsonl", r"--trace: nowhere\.jsonl: No such file or directory"),
        ("chunks --object-time 50", "--object-time: '50': the unit is missing"),
        ("chunks --metadata 9ZB", "--metadata: '9ZB': the unit 'ZB' is not known here"),
        ("pd --prompt 0", "--prompt: 0 is not usable"),
        ("pd --rate nan", "--rate: nan is not usable"),
        ("pd --prefill-workers 8", "--prefill-workers: 8 is not usable; 1 to 7 is expected"),
        ("pd --itl 0ms", "--itl: '0ms' is zero"),
        ("queue --rate 0", "--rate: 0 is not usable"),
        ("queue --stay 2", "--stay: '2': the unit is missing"),
        ("queue --service 3s", "--service: 3 s is longer than the stay of 2 s"),
        ("queue --buffer 1Gb", "--buffer: '1Gb': the unit 'Gb'"),
        ("value --top 0", "--top: 0 is not usable; 1 to 1000"),
        ("value --write-bandwidth fast", "--write-bandwidth: 'fast' is not a number with a unit"),
    ],
)
def test_bad_input_is_one_line_that_names_it_and_status_2(arguments: str, problem: str) -> None:
    code, out, err = run(*arguments.split())
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert re.match(f"kvroute: {problem}", err), err
