"""`kvroute simulate`: what it writes and shows, what it refuses, how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from kvroute.cli_simulate import simulate

cli = typer.Typer()
cli.command()(simulate)
FEW = ("--workload", "chat", "--requests", "30", "--seeds", "1", "--workers", "2", "--policy", "round_robin")


def run(*arguments: str) -> Result:
    """In this process, unless it says otherwise."""
    jobs = () if "--jobs" in arguments else ("--jobs", "1")
    return CliRunner().invoke(cli, [*arguments, *jobs])


def rows(*arguments: str) -> list[dict[str, Any]]:
    result = run(*arguments, "--json", "-")
    assert result.exit_code == 0, result.output
    made: list[dict[str, Any]] = json.loads(result.stdout)
    return made


def trace_file(path: Path, requests: int = 20) -> str:
    lines = [
        {"timestamp": 3000 * (i // 4), "input_length": 700, "output_length": 20, "hash_ids": [0, i + 1]}
        for i in range(requests)
    ]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return str(path)


def test_a_trace_is_compared_and_written(tmp_path: Path) -> None:
    trace, results, table = trace_file(tmp_path / "mine.jsonl"), tmp_path / "r.json", tmp_path / "r.csv"
    result = run(
        *("--trace", trace, "--jitter", "3s", "--seeds", "2", "--workers", "2", "--speed", "2"),
        *("--policy", "round_robin,ttft", "--set", "ttft.cache_weight=3"),
        *("--json", str(results), "--csv", str(table)),
    )
    assert result.exit_code == 0, result.output
    assert "goodput" in result.stdout
    assert "against round_robin" in result.stdout
    assert "TTFT is time held, queueing" in result.stdout
    first, second = json.loads(results.read_text(encoding="utf-8"))
    assert (first["policy"], first["speed"], first["workers"], first["goodput"]) == (
        "round_robin",
        2.0,
        2,
        1.0,
    )
    assert (second["options"], second["trace"], second["offered"]) == ({"cache_weight": "3"}, "mine", 18)
    for row in (first, second):
        for latency in ("ttft_ms", "tpot_ms", "e2e_ms", "itl_ms"):
            assert 0 < row[latency]["p50"] <= row[latency]["p99"]
        assert len(row["ci95"]["goodput"]) == 2
        assert 0 <= row["token_hit_rate"] <= 1
        assert row["rejected"] == 0
        assert row["setting"]["preset"] == "qwen3-32b-h200-tp2"
    assert second["paired"]["figures"]["goodput"] == [0, 0, 0]
    assert table.read_text(encoding="utf-8").count("\n") == 3


def test_fleets_speeds_and_policies_may_be_listed_or_repeated() -> None:
    made = rows(
        *("--workload", "chat", "--requests", "20", "--seeds", "1"),
        *(
            "--workers",
            "1,1P1D",
            "--speed",
            "1,2",
            "--speed",
            "4",
            "--policy",
            "round_robin",
            "--policy",
            "random",
        ),
    )
    assert [(row["workers"], row["speed"], row["policy"]) for row in made] == [
        (workers, speed, policy)
        for workers in (1, "1P1D")
        for speed in (1, 2, 4)
        for policy in ("round_robin", "random")
    ]


def test_the_polynomial_preset_has_blocks_of_its_own(tmp_path: Path) -> None:
    trace = trace_file(tmp_path / "t.jsonl")
    given = ("--trace", trace, "--seeds", "1", "--policy", "round_robin", "--preset", "polynomial-64x16384")
    (row,) = rows(*given)
    assert (row["setting"]["kv_tokens"], row["setting"]["block_tokens"]) == (16384 * 64, 64)
    (half,) = rows(*given, "--kv-tokens", "524288", "--block-size", "128")
    assert (half["setting"]["kv_tokens"], half["setting"]["block_tokens"]) == (524_288, 128)
    assert row["e2e_ms"]["mean"] != rows(*given[:-2])[0]["e2e_ms"]["mean"]


def test_options_reach_the_setting_and_are_told() -> None:
    (row,) = rows(
        *(
            *FEW,
            "--event-lag",
            "2s",
            "--event-loss",
            "0.5",
            "--prefill-error",
            "0.7",
            "--decode-error",
            "1.3",
        ),
        *("--learns", "--worker-scales", "1,2", "--fail", "1@5s-9s", "--scale", "1", "--gpu-eviction", "lfu"),
        *("--cpu-tokens", "50000", "--cpu-write", "through", "--peer-link", "tcp", "--outputs", "known"),
    )
    setting = row["setting"]
    assert (setting["event_lag_s"], setting["event_loss"], setting["scale"]) == (2, 0.5, 1)
    assert (setting["prefill_error"], setting["decode_error"], setting["learns"]) == (0.7, 1.3, True)
    assert setting["worker_scales"] == [1, 2]
    assert setting["failures"] == [{"worker": 1, "at_s": 5, "back_s": 9}]
    assert (setting["gpu_eviction"], setting["cpu_tokens"]) == ("lfu", 50_000)
    assert setting["cpu_write"] == "through"
    assert setting["peer_link"] == {"bytes_per_s": 4.2e9, "latency_s": 0.005}
    (plain,) = rows(*FEW)
    assert set(plain["setting"]) == {"command", "preset", "kv_tokens", "block_tokens", "ttft_includes"}
    assert plain["ttft_ms"] != row["ttft_ms"]


def test_what_no_engine_can_hold_is_bad_and_null_in_json() -> None:
    (row,) = rows(*FEW, "--kv-tokens", "64")
    assert (row["goodput"], row["failed"], row["ttft_ms"]["p50"], row["token_hit_rate"]) == (0, 1, None, None)
    shown = run(*FEW, "--kv-tokens", "64").stdout
    assert "inf/inf/inf/inf" in shown
    assert "Little's law is not claimed for 1 of 1 rows: nothing was served" in shown


def test_seeds_that_change_nothing_and_lines_left_out_are_remarked(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    trace_file(path)
    path.write_text(path.read_text(encoding="utf-8") + "\n{}\n", encoding="utf-8")
    given = ("--trace", str(path), "--seeds", "2", "--policy", "round_robin", "--workers", "2")
    shown = run(*given, "--bad-lines", "skip").stdout
    assert "t: lines skipped: 1 " in shown
    assert "every seed has the same requests at the same times" in shown
    assert "every seed" not in run(*given, "--bad-lines", "skip", "--jitter", "3s").stdout
    stopped = run(*given)
    assert (stopped.exit_code, stopped.stdout) == (2, "")
    assert "line 21" in stopped.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "rr"], "unknown policy 'rr'; known: "),
        (["--policy", "ttft,ttft"], "--policy: ttft is given more than once"),
        (["--policy", "ttft", "--set", "hold"], "--set: 'hold' is not understood; policy.option=value"),
        (["--policy", "ttft", "--set", "random.seed=1"], "is for none of the policies compared: ttft"),
        (["--policy", "ttft", "--set", "ttft.x=1"], "policy 'ttft' has no option 'x'; accepted: "),
        (["--policy", "ttft", "--set", "ttft.hold=maybe"], "option 'hold': Input should be a valid boolean"),
        (["--workload", "poems"], "--workload: unknown 'poems'; known: chat, "),
        (["--workload", "chat,chat"], "--trace, --workload: chat, chat: a name is all that tells two apart"),
        (["--trace", "/nowhere.jsonl"], "--trace: /nowhere.jsonl: "),
        (["--trace", "TRACE", "--rate", "5"], "--rate is of generated workloads; a trace has its own"),
        (["--trace", "TRACE", "--requests", "5"], "--requests is of generated workloads"),
        (["--trace", "TRACE", "--format", "xml"], "--format: unknown 'xml'; known: auto, mooncake"),
        (["--trace", "TRACE", "--bad-lines", "fix"], "--bad-lines: unknown 'fix'; known: stop, skip"),
        (["--trace", "TRACE", "--block-size", "100"], "--block-size: t: block_tokens must divide"),
        (["--block-size", "0"], "--block-size: mixed: block_tokens must be at least 1, got 0"),
        (["--preset", "polynomial-64x16384", "--block-size", "0"], "block_tokens must be at least 1, got 0"),
        (["--requests", "0"], "--requests must be from 1 to 1000000, got 0"),
        (["--requests", "1000001"], "--requests must be from 1 to 1000000, got 1000001"),
        (["--rate", "0"], "--rate must be above 0 and at most 100000 per second, got 0"),
        (["--rate", "1e9"], "--rate must be above 0 and at most 100000 per second, got 1000000000"),
        (["--speed", "-1"], "--speed must be above 0 and at most 1000, got -1"),
        (["--speed", "fast"], "--speed: 'fast' is no number"),
        (["--speed", "nan"], "--speed: 'nan' is no number"),
        (["--speed", "2,2"], "is given more than once"),
        (["--seeds", "0"], "--seeds must be from 1 to 1000, got 0"),
        (["--jobs", "0"], "--jobs must be from 1 to 256, got 0"),
        (["--workers", "0"], "--workers: '0': from 1 to 10000 of them are accepted"),
        (["--workers", "6P"], "--workers: '6P' is not understood; a number is expected, or 6P2D"),
        (["--workers", "0P2D"], "--workers: '0P2D': from 1 to 10000 of them are accepted"),
        (["--workers", "x"], "--workers: 'x' is not understood"),
        (["--workers", "20000"], "--workers: '20000': from 1 to 10000"),
        (["--workers", "2,2"], "--workers: 2, 2: one is given more than once"),
        (["--preset", "tpu"], "--preset: speed 'tpu' is neither a preset nor a file; known: "),
        (["--preset", "tpu"], "polynomial-64x16384"),
        (["--preset", "polynomial-64x16384", "--scale", "2"], "--scale: the steps of polynomial-64x16384"),
        (["--jitter", "3"], "--jitter"),
        (["--jitter", "-3s"], "--jitter: '-3s' is negative"),
        (["--event-lag", "soon"], "--event-lag: 'soon' is not a number with a unit"),
        (["--event-loss", "2"], "event_loss must be a share of 0 to 1, got 2"),
        (["--prefill-error", "0"], "prefill_error must be positive, got 0"),
        (["--kv-tokens", "-5"], "kv_tokens must be at least 1, got -5"),
        (["--worker-scales", "1,2"], "worker_scales must be one for each of 8 workers, got 2"),
        (["--worker-scales", "1,b"], "--worker-scales: 'b' is no number"),
        (["--fail", "soon"], "--fail: 'soon' is not understood; worker@time or worker@time-time is expected"),
        (["--fail", "9@1s"], "failures: no worker 9 among 8"),
        (["--handoff", "pigeon"], "--handoff: unknown 'pigeon'; known: dram"),
        (["--gpu-eviction", "mru"], "gpu_eviction 'mru' is unknown; known: "),
        (["--arrivals", "flood"], "--arrivals: unknown 'flood'; known: trace, poisson, gamma"),
        (["--outputs", "guessed"], "--outputs: unknown 'guessed'; known: learned, known"),
        (["--ttft-limit", "0s"], "--ttft-limit"),
        (["--warm-up", "1"], "--warm-up must be from 0 to below 1, or fill, got 1"),
        (["--warm-up", "some"], "--warm-up: 'some' is no number"),
        (["--json", "/nowhere/r.json"], "--json: /nowhere/r.json: /nowhere does not exist"),
    ],
)
def test_bad_input_is_named(arguments: list[str], message: str, tmp_path: Path) -> None:
    trace = trace_file(tmp_path / "t.jsonl")
    result = run(*[trace if argument == "TRACE" else argument for argument in arguments])
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.startswith("kvroute: ")
    assert "Traceback" not in result.output
    assert not result.stdout


def test_a_warm_up_that_never_ends_is_a_run_that_failed() -> None:
    result = run(*FEW, "--warm-up", "fill")
    assert result.exit_code == 1
    assert "kvroute: round_robin on chat x1, 2 workers, seed 1: ValueError: --warm-up fill: " in result.stderr


@pytest.mark.parametrize("slow", [["--speed", "1e-300"], ["--rate", "1e-300"]])
def test_what_would_take_years_is_a_run_that_failed(slow: list[str]) -> None:
    result = run("--requests", "5", "--seeds", "1", "--jobs", "1", "--policy", "round_robin", *slow)
    assert result.exit_code == 1
    assert "--speed, --rate or the times of the trace: the last request comes after " in result.stderr
    assert "at most 3.16e+07 s, a year, are simulated" in result.stderr


def children_of(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [int(child) for child in found.split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.soak
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="reads children from /proc")
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_children_end_with_the_command(ending: signal.Signals, tmp_path: Path) -> None:
    """An interrupt is told in one line; who is killed leaves nobody behind either."""
    results = tmp_path / "r.json"
    arguments = ["--requests", "200000", "--seeds", "4", "--policy", "ttft", "--jobs", "2"]
    command = [sys.executable, "-m", "kvroute", "simulate", *arguments, "--json", str(results)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while len(children := children_of(process.pid)) < 3:  # two that work, and what tracks their resources
            assert time.monotonic() < deadline, "no children"
            time.sleep(0.05)
        if ending is signal.SIGINT:
            os.killpg(process.pid, ending)  # as a terminal does it
        else:
            process.kill()
        _, told = process.communicate(timeout=60)
        while any(map(is_alive, children)):
            assert time.monotonic() < deadline + 60, f"left behind: {children}"
            time.sleep(0.05)
    finally:
        process.kill()
    assert not results.exists()
    if ending is signal.SIGINT:
        assert process.returncode == 130
        assert told == "kvroute: interrupted after 0 of 4 runs; nothing was written\n"
