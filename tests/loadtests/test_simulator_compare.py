"""Comparisons: who is paired with whom, what is generated, what is shown, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kvroute.cli_simulate import simulate
from kvroute.loadtests.simulator.compare import Comparison, Run, Variant, compare, interval
from kvroute.loadtests.simulator.report import make_report
from kvroute.loadtests.simulator.results import Limits
from kvroute.loadtests.simulator.setting import Setting
from kvroute.loadtests.simulator.sources import GeneratedSource
from kvroute.loadtests.traces.arrivals import arrivals
from kvroute.loadtests.traces.rows import Row, Trace
from kvroute.loadtests.traces.workloads import BLOCK_TOKENS, WORKLOADS, generate

SMALL = Setting(workers=2, block_tokens=BLOCK_TOKENS)
cli = typer.Typer()
cli.command()(simulate)


def small(**fields: object) -> Comparison:
    variants = [Variant("round_robin"), Variant("least_loaded"), Variant("ttft", {"hold": "false"})]
    return Comparison(GeneratedSource("chat", 40, 4.0), variants, SMALL, **fields)  # type: ignore[arg-type]


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


def test_who_comes_back_repeats_what_was_said() -> None:
    def repeated(kind: str) -> float:
        seen: set[int] = set()
        hits = total = 0
        for row in generate(kind, 500).rows:
            hits += sum(id_ in seen for id_ in row.block_ids)
            total += len(row.block_ids)
            seen.update(row.block_ids)
        return hits / total

    assert repeated("agents") > 0.7
    assert 0.5 < repeated("documents") < repeated("chat") < 1.0


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


def test_an_interval_holds_the_mean_and_needs_two() -> None:
    assert interval([1.0]) is None
    assert interval([1.0, float("inf")]) is None
    assert interval([2.0, 2.0, 2.0]) == (2.0, 2.0)
    low, high = interval([1.0, 2.0, 3.0, 4.0]) or (0.0, 0.0)
    assert 1.0 <= low < 2.5 < high <= 4.0


def test_every_policy_gets_the_same_requests_and_is_paired_by_seed() -> None:
    comparison = small(seeds=2, speedups=(1.0, 4.0), limits=Limits(0.2, 0.013))
    results = compare(comparison)
    assert set(results) == set(comparison.runs)
    assert len(results) == 12
    report = make_report(comparison, results)
    cells = report.data["cells"]
    assert [(cell["policy"], cell["speedup"]) for cell in cells[:4]] == [
        ("round_robin", 1.0),
        ("least_loaded", 1.0),
        ("ttft", 1.0),
        ("round_robin", 4.0),
    ]
    baseline, other = ([results[Run(variant, 4.0, seed)].goodput for seed in (1, 2)] for variant in (0, 2))
    difference = cells[5]["difference"]["goodput"]
    assert difference["mean"] == pytest.approx(sum(other) / 2 - sum(baseline) / 2)
    assert difference["low"] <= difference["mean"] <= difference["high"]
    assert cells[5]["goodput"] == pytest.approx(sum(other) / 2)
    assert cells[3]["difference"]["ttft_mean_s"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    assert json.loads(report.to_json())["baseline"] == "round_robin"
    assert len(report.rows) == len(cells)
    assert all(len(row) == len(report.columns) for row in report.rows)


def test_chance_follows_the_seed() -> None:
    variant = Variant("random")
    comparison = Comparison(GeneratedSource("chat", 40, 4.0), [variant], SMALL)
    one = comparison.simulate(Run(0, 1.0, 1))
    assert one == comparison.simulate(Run(0, 1.0, 1)) != comparison.simulate(Run(0, 1.0, 2))
    fixed = Comparison(lambda seed: generate("chat", 40), [Variant("random", {"seed": 3})], SMALL)
    assert fixed.simulate(Run(0, 1.0, 1)) == fixed.simulate(Run(0, 1.0, 2))


def test_drawn_arrivals_are_others_than_the_traces() -> None:
    asis, drawn = (
        compare(small(process=process))[Run(0, 1.0, 1)].duration_s for process in ("trace", "gamma")
    )
    assert asis != drawn


def test_more_processes_change_nothing() -> None:
    comparison = small()
    heard: list[Run] = []
    assert compare(comparison, jobs=2, done=heard.append) == compare(comparison)
    assert heard == comparison.runs


def test_what_is_infinite_is_shown_and_is_null_in_json() -> None:
    blocks = tuple(range(40))
    hopeless = Trace("test", 512, (Row(0.0, 40 * 512, 5, blocks),))
    setting = Setting(workers=1, kv_tokens=10_240)
    comparison = Comparison(lambda seed: hopeless, [Variant("round_robin")], setting)
    report = make_report(comparison, compare(comparison))
    (cell,) = report.data["cells"]
    assert (cell["rejected"], cell["goodput"], cell["ttft_p50_s"], cell["tpot_mean_s"]) == (
        1.0,
        0.0,
        None,
        None,
    )
    assert "inf/inf/inf/inf" in report.rows[0]
    json.loads(report.to_json())


def trace_file(path: Path) -> Path:
    lines = [
        {"timestamp": 3000 * (i // 4), "input_length": 700, "output_length": 20, "hash_ids": [0, i + 1]}
        for i in range(20)
    ]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path


def test_the_command_compares_over_a_trace(tmp_path: Path) -> None:
    trace = str(trace_file(tmp_path / "trace.jsonl"))
    options = ["--trace", trace, "--jitter", "3s", "--seeds", "2", "--workers", "2", "--jobs", "1"]
    policies = ["--policy", "round_robin", "--policy", "ttft", "--option", "ttft.cache_weight=3"]
    result = CliRunner().invoke(cli, [*options, *policies, "--speedup", "2", "--json"])
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert [cell["policy"] for cell in data["cells"]] == ["round_robin", "ttft"]
    assert data["cells"][1]["options"] == {"cache_weight": "3"}
    assert data["cells"][0]["goodput"] == 1.0
    result = CliRunner().invoke(cli, [*options, *policies])
    assert result.exit_code == 0
    assert "goodput" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "rr"], "unknown policy 'rr'; known: "),
        (["--policy", "ttft", "--policy", "ttft"], "--policy: ttft is given more than once"),
        (["--policy", "ttft", "--option", "hold"], "--option: 'hold' is not understood; policy.option=value"),
        (["--policy", "ttft", "--option", "random.seed=1"], "is for none of the policies compared: ttft"),
        (["--policy", "ttft", "--option", "ttft.x=1"], "policy 'ttft' has no option 'x'; accepted: "),
        (
            ["--policy", "ttft", "--option", "ttft.hold=maybe"],
            "option 'hold': Input should be a valid boolean",
        ),
        (["--workload", "poems"], "--workload: unknown 'poems'; known: chat, agents, documents, mixed"),
        (["--workload", "chat", "--trace", "x"], "--trace and --workload: only one of them is accepted"),
        (["--trace", "/nowhere"], "--trace: /nowhere: No such file"),
        (["--requests", "0"], "--requests must be from 1 to 1000000, got 0"),
        (["--rate", "0"], "--rate must be positive, got 0"),
        (["--speedup", "-1"], "--speedup must be positive, got -1"),
        (["--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["--jobs", "0"], "--jobs must be at least 1, got 0"),
        (["--workers", "0"], "workers must be at least 1, got 0"),
        (["--preset", "tpu"], "speed 'tpu' is neither a preset nor a file; known: "),
        (["--jitter", "3"], "--jitter"),
        (["--arrivals", "flood"], "--arrivals: unknown 'flood'; known: trace, poisson, gamma"),
        (["--ttft-limit", "0s"], "--ttft-limit"),
        (["--block-size", "48"], "block_tokens must divide the trace's blocks of 64 tokens, got 48"),
    ],
)
def test_bad_input_is_named(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(cli, [*arguments, "--jobs", "1"] if "--jobs" not in arguments else arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output
