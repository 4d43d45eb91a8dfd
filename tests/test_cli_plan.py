"""`kvroute plan` as a user starts it: what is printed, and exit status 2 with one line for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kvroute.cli_plan import app
from tests.policies.costs import published as p


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(p.LLAMA_3_8B), encoding="utf-8")
    return str(path)


def run(*arguments: str) -> tuple[int, str, str]:
    root = typer.Typer()
    root.add_typer(app, name="plan")
    result = CliRunner().invoke(root, ["plan", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_capacity_as_json(config: str) -> None:
    code, out, err = run("capacity", "--model", config, "--kv-memory", "40GiB", "--json")
    data = json.loads(out)
    assert (code, err) == (0, "")
    assert (data["bytes_per_token"], data["token_slots"]) == (131072, 327680)


def test_capacity_of_a_split(config: str) -> None:
    _, out, _ = run(
        *("capacity", "--model", config, "--gpu-memory", "80GiB", "--weights", "16GiB", "--overhead", "2GiB"),
        *("--tp", "4", "--pp", "2", "--dp", "3", "--kv-dtype", "fp8", "--block-size", "32"),
        *("--lengths", "100", "--output-tokens", "10", "--utilisation", "0.5", "--json"),
    )
    data = json.loads(out)
    assert data["kv_memory_bytes"] == 36 * 2**30
    assert data["bytes_per_token_per_rank"] == 65536 // 8
    assert data["token_slots_all_dp"] == 3 * 36 * 2**30 // 8192
    assert data["requests"][0]["allocated_tokens"] == 128


def test_capacity_as_a_table_and_a_plot(config: str, tmp_path: Path) -> None:
    code, out, _ = run(
        "capacity", "--model", config, "--kv-memory", "40GiB", "--plot", str(tmp_path / "a.png")
    )
    assert code == 0
    assert "327680 token slots in 40 GiB" in out
    assert (tmp_path / "a.png").is_file()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--kv-memory", "40G"), "--kv-memory: '40G': the unit 'G' is not known here"),
        (("--kv-memory", "0"), "--kv-memory: '0' is zero"),
        ((), "--kv-memory: missing"),
        (("--kv-memory", "40GiB", "--tp", "3"), "tp: 3 does not divide the 32 attention heads"),
        (("--kv-memory", "40GiB", "--tp", "-1"), "tp: -1 is not above 0"),
        (("--kv-memory", "40GiB", "--lengths", "8k"), "--lengths: '8k' is no list of token counts"),
        (("--kv-memory", "40GiB", "--plot", "x.pdf"), "--plot: x.pdf is not named .png"),
        (("--kv-memory", "40GiB", "--model", "none.json"), "--model: none.json: No such file"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(config: str, arguments: tuple[str, ...], problem: str) -> None:
    code, out, err = run("capacity", "--model", config, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"kvroute: {problem}")
    assert err.count("\n") == 1


def test_an_unknown_architecture_is_an_error_unless_it_is_assumed_plain(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**p.LLAMA_3_8B, "model_type": "mystery"}), encoding="utf-8")
    command = ("capacity", "--model", str(path), "--kv-memory", "40GiB", "--json")
    code, _, err = run(*command)
    assert code == 2
    assert "unknown architecture (model_type 'mystery'" in err
    code, out, _ = run(*command, "--assume-standard")
    assert json.loads(out)["bytes_per_token"] == 131072
