"""Rows over seeds, and the files they are kept in."""

from __future__ import annotations

import csv
import json
import sys
from io import TextIOWrapper
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvroute.loadtests.results import files
from kvroute.loadtests.results.combine import Result, intervals, make_row
from kvroute.loadtests.results.files import ResultsError, check_writable, read_results, write_results
from kvroute.loadtests.results.measured import Limits
from kvroute.loadtests.results.rows import Row
from kvroute.loadtests.results.table import print_results

ABOUT = {"policy": "ttft", "speed": 1.5, "workers": "6P2D", "trace": "t", "options": {"hold": "false"}}


def results(*values: float, **others: float) -> list[Result]:
    latency = {
        f"{name}.{which}": 5.0 for name in ("ttft_ms", "tpot_ms", "e2e_ms") for which in ("mean", "p99")
    }
    return [
        Result({"goodput": value, "token_hit_rate": 0.5, "rejected": 0.0, **latency, **others})
        for value in values
    ]


def row(*values: float, against: tuple[str, list[Result]] | None = None, **others: float) -> Row:
    return make_row(results(*(values or (0.5,)), **others), Limits(), ABOUT, against)


def test_a_row_is_the_mean_over_seeds_with_its_interval() -> None:
    made = row(0.4, 0.5, 0.9)
    assert (made.goodput, made.seeds, made.workers) == (pytest.approx(0.6), 3, "6P2D")
    low, high = made.ci95["goodput"] or (0.0, 0.0)
    assert 0.4 <= low < 0.6 < high <= 0.9
    assert made.ci95["ttft_ms.p99"] == (5.0, 5.0)
    assert row(0.4).ci95["goodput"] is None


def test_what_is_infinite_in_a_seed_is_null_and_has_no_interval() -> None:
    mixed = [*results(0.5, **{"ttft_ms.p99": inf}), *results(0.5, 0.5)]
    made = make_row(mixed, Limits(), ABOUT)
    assert (made.ttft_ms.p99, made.ci95["ttft_ms.p99"], made.ttft_ms.mean) == (None, None, 5.0)
    assert row(peak_to_mean=nan).peak_to_mean is None


def test_differences_are_paired_by_seed() -> None:
    # Seeds differ by far more than the policies: only pairing shows the difference.
    made = row(0.3, 0.6, 0.9, against=("first", results(0.2, 0.5, 0.8)))
    assert made.paired is not None
    assert made.paired.against == "first"
    assert made.paired.figures["goodput"] == pytest.approx((0.1, 0.1, 0.1))
    single = row(0.3, against=("first", results(0.2))).paired
    assert single is not None
    assert single.figures["goodput"] == (pytest.approx(0.1), None, None)


def test_one_run_made_again_under_every_seed_has_no_intervals() -> None:
    """A file's requests without jitter: all but the clock of the machine comes out the same."""
    same = [
        Result({**one.figures, "decision_us": us}) for one, us in zip(results(0.4, 0.4), (7, 9), strict=True)
    ]
    better = [Result({**one.figures, "decision_us": 7.0}) for one in results(0.5, 0.5)]
    made = make_row(better, Limits(), ABOUT, ("first", same))
    assert set(made.ci95.values()) == {None}
    assert made.paired is not None
    assert made.paired.figures["goodput"] == (pytest.approx(0.1), None, None)
    assert (made.seeds, made.goodput) == (2, 0.5)
    drawn = [Result({**one.figures, "decision_us": 7.0}) for one in results(0.5, 0.6)]
    paired = make_row(drawn, Limits(), ABOUT, ("first", same)).paired
    assert paired is not None
    assert paired.figures["goodput"] == pytest.approx((0.15, 0.1, 0.2)), "by chance of its own"


def test_intervals_are_those_of_the_bootstrap() -> None:
    ((low, high),) = intervals([[0.0], [1.0]])  # type: ignore[misc]
    assert (low, high) == (0.0, 1.0)  # both drawn alike in a quarter of the draws each
    values = [float(i) for i in range(10)]
    ((low, high), nothing) = intervals([[value, inf] for value in values])  # type: ignore[misc]
    assert nothing is None
    assert low == pytest.approx(4.5 - 1.96 * 2.8723 / 10**0.5, abs=0.15)
    assert high == pytest.approx(4.5 + 1.96 * 2.8723 / 10**0.5, abs=0.15)


def test_json_is_read_as_it_was_written(tmp_path: Path) -> None:
    rows = [row(0.4, 0.6, against=("x", results(0.3, 0.3))), row(1.0, **{"ttft_ms.p99": inf})]
    path = tmp_path / "results.json"
    write_results(rows, path)
    assert read_results([path, path]) == rows * 2
    first, second = json.loads(path.read_text(encoding="utf-8"))
    assert (first["policy"], first["speed"], first["workers"], first["goodput"]) == ("ttft", 1.5, "6P2D", 0.5)
    assert set(first["ttft_ms"]) == {"mean", "p50", "p90", "p99"}
    assert second["ttft_ms"]["p99"] is None
    assert first["ci95"]["goodput"][0] <= 0.5 <= first["ci95"]["goodput"][1]


def test_dash_is_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    write_results([row()], Path("-"))
    assert json.loads(capsys.readouterr().out)[0]["goodput"] == 0.5


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_standard_output_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "wb", buffering=0) as full, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", TextIOWrapper(full, write_through=True))
        with pytest.raises(
            ResultsError, match=r"^--json: standard output: No space left on device; it was not"
        ):
            write_results([row()], files.STDOUT)


def test_csv_has_a_column_for_each_figure_and_bound(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    write_results([row(0.2, 0.4), row(1.0, **{"hit_by_tier.cpu": 0.25})], csv=path)
    with path.open(newline="", encoding="utf-8") as file:
        first, second = csv.DictReader(file)
    assert (first["goodput"], first["workers"], first["options"]) == (
        "0.30000000000000004",
        "6P2D",
        '{"hold":"false"}',
    )
    assert (first["goodput.low"], first["goodput.high"]) == ("0.2", "0.4")
    assert (first["hit_by_tier.cpu"], second["hit_by_tier.cpu"], second["goodput.low"]) == ("", "0.25", "")


def test_parquet_is_the_same_table(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "results.parquet"
    write_results([row(0.25)], parquet=path)
    (line,) = parquet.read_table(path).to_pylist()
    assert (line["goodput"], line["workers"], line["ttft_ms.mean"]) == (0.25, "6P2D", 5.0)


def test_parquet_without_its_library_is_refused_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "find_spec", lambda name: None)
    with pytest.raises(
        ResultsError, match=r"--parquet: pyarrow is not installed; `pip install kvroute\[parquet\]`"
    ):
        check_writable(None, None, tmp_path / "x.parquet")


def test_files_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match=r"--csv: .*: .*/none does not exist; the path of a file"):
        check_writable(None, tmp_path / "none" / "x.csv", None)
    with pytest.raises(ResultsError, match=r"--json: .* is a directory"):
        check_writable(tmp_path, None, None)
    check_writable(Path("-"), tmp_path / "x.csv", None)


def minimal(**changed: Any) -> dict[str, Any]:
    spread = {"mean": 1.0, "p50": 1.0, "p90": 1.0, "p99": None}
    return {
        **{"policy": "p", "speed": 1, "workers": 8, "goodput": 0.5, "token_hit_rate": 0.1, "rejected": 0},
        **{"ttft_ms": spread, "tpot_ms": spread, "e2e_ms": spread, "ci95": {"goodput": [0.4, 0.6]}},
        **changed,
    }


def test_the_figures_that_every_row_has_are_enough(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps([minimal(more="than is known")]), encoding="utf-8")
    (made,) = read_results([path])
    assert (made.figure("goodput"), made.figure("ttft_ms.p99"), made.figure("hit_by_tier.cpu")) == (
        0.5,
        None,
        None,
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no JSON: Input data was truncated"),
        ("[{", "no JSON: Input data was truncated"),
        ("{}", "Expected `array`, got `object`"),
        ("[]", "an empty list"),
        ("[" * 100_000, "r.json: "),
        ('["\udcff"]', "r.json: "),
        (
            json.dumps([minimal(), minimal(goodput="high")]),
            r"Expected `float \| null`, got `str` - at `\$\[1\].goodput`",
        ),
        (json.dumps([minimal(goodput=1.5)]), r"Expected `float` <= 1.0 - at `\$\[0\].goodput`"),
        (json.dumps([minimal(speed=0)]), r"\$\[0\].speed"),
        (json.dumps([minimal(policy="")]), r"\$\[0\].policy"),
        (json.dumps([{"policy": "p"}]), "missing required field `speed`"),
        (json.dumps([minimal(series={"load": {"at_s": [1, 2], "requests": [[1]]}})]), "1 values for 2 times"),
    ],
)
def test_files_that_are_no_results_are_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ResultsError, match=message) as raised:
        read_results([path])
    assert str(path) in str(raised.value)
    assert "kvroute simulate --json" in str(raised.value)


def test_a_missing_or_gigantic_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ResultsError, match=r"none.json: No such file or directory; a file that"):
        read_results([tmp_path / "none.json"])
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 10)
    big = tmp_path / "big.json"
    big.write_text("[" + " " * 20, encoding="utf-8")
    with pytest.raises(ResultsError, match=r"big.json: more than"):
        read_results([big])
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 10_000)
    monkeypatch.setattr(files, "MAX_ROWS", 1)
    big.write_text(json.dumps([minimal(), minimal()]), encoding="utf-8")
    with pytest.raises(ResultsError, match="2 rows of results; at most 1 are taken"):
        read_results([big])


def shown(rows: list[Row]) -> str:
    console = Console(width=250, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_results(rows, console, ["a remark"])
    return console.export_text()


def test_the_table_shows_intervals_and_tells_infinite_from_unknown() -> None:
    lines = shown(
        [row(0.4, 0.6, against=("first", results(0.3, 0.3))), row(0.5, rejected=0.5, **{"ttft_ms.p99": inf})]
    )
    assert "50.0 [40.0, 60.0]" in lines
    assert "+20.0 [+10.0, +30.0]" in lines
    assert "5/-/-/5" in lines  # nobody measured p50
    assert "5/inf/inf/inf" in lines
    assert "rejected %" in lines
    assert "preempted" not in lines
    assert "a remark" in lines
    assert "ttft (hold=false)" in lines
