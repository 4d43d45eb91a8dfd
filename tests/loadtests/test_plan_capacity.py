"""The capacity plan: its figures, its memory, and how it is shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvroute.loadtests.plan.capacity import (
    CapacityPlan,
    kv_memory_bytes,
    parse_lengths,
    plan_capacity,
    read_config_file,
)
from kvroute.loadtests.plan.show import Plot, Report, Series, print_report, save_plot
from tests.policies.costs import published as p

GIB = 2**30


def figures(config: dict[str, Any] = p.LLAMA_3_8B, **plan: Any) -> dict[str, Any]:
    report, _ = plan_capacity(CapacityPlan(config, **{"memory_bytes": 40 * GIB, **plan}))
    return json.loads(report.to_json())


def test_the_worked_figures() -> None:
    data = figures()
    assert data["bytes_per_token"] == 131072
    assert data["token_slots"] == 327680
    assert data["blocks"] == 20480
    assert data["mean_tail_waste_tokens"] == 7.5
    assert data["bytes_at"] == {"1024": 2**27, "8192": GIB, "32768": 4 * GIB}
    assert [row["concurrent"] for row in data["requests"]] == [320, 40, 10]


def test_kv_memory_is_of_each_gpu_so_slots_grow_with_the_ranks() -> None:
    data = figures(tp=8)
    assert data["token_slots"] == 8 * 327680
    assert data["bytes_per_token"] == 131072
    assert data["bytes_per_token_per_rank"] == 16384
    assert data["per_rank_bytes_at"]["8192"] == 128 * 2**20
    assert data["replication"] == 1.0


def test_copies_are_counted() -> None:
    assert figures(p.DEEPSEEK_V3, tp=8)["replication"] == 8.0
    assert figures(p.QWEN_3_NEXT_80B, tp=8)["replication"] == 4.0


def test_the_fullest_stage_bounds() -> None:
    data = figures(pp=3)
    assert data["stage_layers"] == [11, 11, 10]
    assert data["bytes_per_token_per_rank"] == 11 * 4096
    assert data["token_slots"] == 40 * GIB // (11 * 4096)


def test_instances_have_a_cache_each() -> None:
    data = figures(dp=4)
    assert data["token_slots"] == 327680
    assert data["token_slots_all_dp"] == 4 * 327680


def test_growth_while_decoding() -> None:
    """40 requests of 8100 tokens leave 40 x (8192 - 8112) slots in whole blocks: 92 steps and not 93."""
    (row,) = figures(lengths=(8100,), output_tokens=200)["requests"]
    assert row["concurrent"] == 327680 // 8112 == 40
    assert row["concurrent_at_end"] == 327680 // 8304 == 39
    assert row["steps_until_full"] == 92
    assert row["bytes_at_end"] == 8300 * 131072


def test_windows_bound_requests_but_not_slots() -> None:
    data = figures(p.GEMMA_3_27B, lengths=(32768,))
    assert data["windows_tokens"] == [1024]
    assert data["token_slots"] == 40 * GIB // 507904
    assert data["bytes_at"]["32768"] == 32768 * 81920 + 1024 * 425984
    assert data["requests"][0]["concurrent"] == 40 * GIB // (32768 * 81920 + 1040 * 425984) == 13


def test_a_model_without_attention_has_requests_but_no_slots() -> None:
    mamba = {
        "model_type": "mamba",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "state_size": 16,
        "conv_kernel": 4,
    }
    data = figures(mamba, memory_bytes=100 * 2 * 128 * 19 * 2)
    assert data["token_slots"] is None
    assert data["token_slots_all_dp"] is None
    assert [row["concurrent"] for row in data["requests"]] == [100, 100, 100]


def test_what_does_not_fit_at_all_has_no_steps() -> None:
    (row,) = figures(memory_bytes=GIB, lengths=(8193,))["requests"]
    assert (row["concurrent"], row["steps_until_full"]) == (0, None)


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        ({"tp": 3}, "tp: 3 does not divide the 32 attention heads"),
        ({"tp": 0}, "tp: 0 is not above 0"),
        ({"pp": 33}, "pp: 33 stages for 32 layers"),
        ({"dp": 0}, "dp: 0 is not usable"),
        ({"block_tokens": 0}, "block_tokens: 0 is not usable"),
        ({"output_tokens": -1}, "output_tokens: -1 is not usable"),
        ({"lengths": (0,)}, "lengths: 0 is not usable"),
        ({"kv_dtype": "q4"}, "kv_dtype: 'q4' is not known"),
    ],
)
def test_a_plan_that_cannot_be_is_named(plan: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match="expected") as error:
        figures(**plan)
    assert problem in str(error.value)


def test_memory_of_a_gpu() -> None:
    """80 GiB x 0.9 = 72, less 16 / 2 of weights and 1 of overhead."""
    assert kv_memory_bytes(None, "80GiB", 0.9, "16GiB", "1GiB", gpus=2) == 63 * GIB
    assert kv_memory_bytes("40GiB", None, 0.9, None, None, gpus=2) == 40 * GIB


@pytest.mark.parametrize(
    ("memory", "problem"),
    [
        ((None, None, 0.9, None, None), "--kv-memory: missing"),
        (("40GiB", "80GiB", 0.9, None, None), "--kv-memory: already the memory for KV"),
        (("40Gb", None, 0.9, None, None), "--kv-memory: '40Gb': the unit 'Gb' is not known"),
        (("-40GiB", None, 0.9, None, None), "--kv-memory: '-40GiB' is negative"),
        ((None, "80GiB", 0.9, None, None), "--weights: missing"),
        ((None, "80GiB", 1.5, "16GiB", None), "--utilisation: 1.5 is not above 0 and at most 1"),
        ((None, "80GiB", float("nan"), "16GiB", None), "--utilisation: nan is not"),
        ((None, "24GiB", 0.9, "141GB", None), "--gpu-memory: 24GiB x 0.9 leaves no KV memory"),
    ],
)
def test_memory_that_cannot_be_is_named(memory: tuple[Any, ...], problem: str) -> None:
    with pytest.raises(ValueError) as error:
        kv_memory_bytes(*memory, gpus=1)
    assert problem in str(error.value)


def test_lengths() -> None:
    assert parse_lengths("1024, 8192,1024") == (1024, 8192)
    for text in ("", "1024,", "1k", "-1", "1.5", "1" * 30):
        with pytest.raises(ValueError, match="is no list of token counts"):
            parse_lengths(text)
    with pytest.raises(ValueError, match="--lengths: 33 lengths; at most 32"):
        parse_lengths(",".join(map(str, range(1, 34))))


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[1]", "a list; a JSON object is expected"),
        (b"[" * 200_000, "not JSON"),
        (b" " * (4 * 2**20 + 1), "more than 4 MiB"),
    ],
)
def test_a_file_that_is_no_config_is_named(tmp_path: Path, raw: bytes, problem: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(raw)
    with pytest.raises(ValueError, match="--model: ") as error:
        read_config_file(path)
    assert problem in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        read_config_file(tmp_path / "none.json")
    with pytest.raises(ValueError, match="Is a directory"):
        read_config_file(tmp_path)


def shown(report: Report, width: int = 100) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        print_report(report, console)
    return capture.get()


def test_the_table_says_what_counts() -> None:
    report, _ = plan_capacity(CapacityPlan(p.GEMMA_3_27B, 40 * GIB, dp=2))
    text = shown(report, 200)
    assert "496 KiB per token in 62 attention layers of 62, bf16" in text
    assert "Layers with a window keep 1024 tokens; past them a token adds 80 KiB" in text
    assert "one of 2 instances" in text
    hybrid, _ = plan_capacity(CapacityPlan(p.QWEN_3_NEXT_80B, 40 * GIB))
    assert "37.69 MiB of recurrent state per sequence" in shown(hybrid, 200)


def test_brackets_of_a_report_are_text_and_not_markup() -> None:
    report = Report("[red]t[/red]", ("[bold]a",), (("[/x]",),), {}, notes=("[dim]n",))
    text = shown(report)
    assert all(part in text for part in ("[red]t[/red]", "[bold]a", "[/x]", "[dim]n"))


def test_json_has_no_nan() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        Report("t", (), (), {"x": float("nan")}).to_json()


def test_plots(tmp_path: Path) -> None:
    _, plot = plan_capacity(CapacityPlan(p.LLAMA_3_8B, 40 * GIB))
    (line,) = plot.series
    assert dict(zip(line.xs, line.ys, strict=True))[8192] == 40
    save_plot(plot, tmp_path / "fit.png")
    assert (tmp_path / "fit.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "problem"), [("fit.jpg", "not named .png"), ("none/fit.png", "No such file")]
)
def test_a_plot_that_cannot_be_written_is_named(tmp_path: Path, name: str, problem: str) -> None:
    plot = Plot("t", "x", "y", (Series("s", [1, 2], [1, 2]),))
    with pytest.raises(ValueError, match="--plot: ") as error:
        save_plot(plot, tmp_path / name)
    assert problem in str(error.value)
