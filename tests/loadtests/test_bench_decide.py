from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvroute.cli_bench import app
from kvroute.load import WorkerLoad
from kvroute.loadtests import bench_decide
from kvroute.loadtests.bench_decide import (
    BLOCK_TOKENS,
    DecideBench,
    _Side,
    run_bench_decide,
    show_bench_decide,
)
from kvroute.policies.registry import make_policy
from kvroute.types import Decision

STAGES = ["look_up", "price", "decide", "look_up_and_decide", "choose_and_charge"]


def test_figures_have_the_names_that_reports_read() -> None:
    result = run_bench_decide(DecideBench((2, 3), blocks=40, reps=5, rounds=3))
    assert (result["policy"], result["blocks"], result["reps"], result["rounds"]) == ("ttft", 40, 5, 3)
    assert [(row["workers"], row["stage"]) for row in result["rows"]] == [
        (workers, stage) for workers in (2, 3) for stage in STAGES
    ]
    for row in result["rows"]:
        for name in ("p50", "p99"):
            assert 0 <= row[f"{name}_min_us"] <= row[f"{name}_us"] <= row[f"{name}_max_us"]
        assert row["p50_us"] <= row["p99_us"]
    lines = show_bench_decide(result).splitlines()
    assert lines[0].startswith("ttft, prompts of 40 blocks; CPU us per call, the median of 3 rounds of 5")
    assert "look up and decide" in lines[6]
    assert f"{result['rows'][3]['p50_us']:.1f}" in lines[6]


@pytest.mark.parametrize(
    ("policy", "stages"),
    [("round_robin", STAGES[2:]), ("prefix_affinity", ["look_up", *STAGES[2:]])],
)
def test_a_policy_is_measured_in_what_it_does(policy: str, stages: list[str]) -> None:
    result = run_bench_decide(DecideBench((2,), policy, blocks=40, reps=2, rounds=1))
    assert [row["stage"] for row in result["rows"]] == stages


def test_the_fleet_is_what_it_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_decide, "WORKERS_PER_HOLDER", 2)
    side = _Side(DecideBench(blocks=64), 8, make_policy("ttft", {}))
    assert len(side.fleets) == 16
    held = [match.confirmed_tokens for fleet in side.fleets for match in fleet.matches]
    system = 4 * BLOCK_TOKENS
    assert min(held) == system
    assert all(tokens == system or 32 * BLOCK_TOKENS <= tokens <= 64 * BLOCK_TOKENS for tokens in held)
    assert 0.25 < sum(tokens > system for tokens in held) / len(held) < 0.75
    for load in side.fleets[0].loads:
        assert 4 <= load.decoding <= 32
        assert load.prefilling <= 3
    before = [_books(member.load) for member in side.members]
    look_up, _, decide, look_up_and_decide, choose_and_charge = side.stages()
    assert list(look_up(0)) == list(side.fleets[0].matches)  # type: ignore[call-overload]
    decided, again = decide(0), look_up_and_decide(0)
    assert isinstance(decided, Decision)
    assert isinstance(again, Decision)
    choose_and_charge(0)
    assert [_books(member.load) for member in side.members] == before


def test_the_command_writes_both(tmp_path: Path) -> None:
    out = tmp_path / "decide.json"
    command = [
        "decide",
        "--workers",
        "2",
        "--blocks",
        "32",
        "--reps",
        "2",
        "--rounds",
        "1",
        "--json",
        str(out),
    ]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    result = json.loads(out.read_text())
    assert [row["stage"] for row in result["rows"]] == STAGES
    assert done.output == show_bench_decide(result) + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "0"], "workers must be at least 1, not 0"),
        (["--blocks", "1"], "blocks must be at least 2, not 1"),
        (["--reps", "0"], "reps must be at least 1, not 0"),
        (["--rounds", "0"], "rounds must be at least 1, not 0"),
        (["--policy", "nope"], "unknown policy 'nope'; known: "),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["decide", *arguments])
    assert done.exit_code == 2
    assert message in done.output


def _books(load: WorkerLoad) -> str:
    """All but the count of its changes."""
    return repr(replace(load, version=0))
