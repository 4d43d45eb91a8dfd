"""The page of `kvroute report`: its figures and numbers, hostile names, missing figures, what is refused."""

from __future__ import annotations

import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from kvroute.cli_report import report
from kvroute.loadtests.report import page as page_module
from kvroute.loadtests.report.page import Report, make_report, to_html, write_report
from kvroute.loadtests.results.files import ResultsError
from kvroute.loadtests.results.rows import Row
from tests.loadtests.report_rows import rows

POLICIES = ("round_robin", "dynamo", "ttft")


class Dom(HTMLParser):
    """What the tests ask a page: elements with their attributes, and its tables by caption."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[tuple[str, list[list[str]]]] = []
        self._open = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "table":
            self.tables.append(("", []))
        if tag == "tr":
            self.tables[-1][1].append([])
        if tag in ("td", "th"):
            self.tables[-1][1][-1].append("")
        if tag in ("td", "th", "caption", "small", "span"):
            self._open = tag

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th", "caption", "table"):
            self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open == "caption":
            self.tables[-1] = (data, self.tables[-1][1])
        elif self._open and self.tables and self.tables[-1][1]:
            self.tables[-1][1][-1][-1] += f"|{data}" if self._open == "small" else data

    def values(self, attribute: str) -> list[str]:
        return [value for _, found in self.elements if (value := found.get(attribute)) is not None]

    def table(self, caption: str) -> dict[str, dict[str, str]]:
        """By policy and column, of the first one whose caption begins so."""
        lines = next(lines for name, lines in self.tables if name.startswith(caption))
        return {line[0]: dict(zip(lines[0][1:], line[1:], strict=True)) for line in lines[1:]}


def made(data: list[dict[str, Any]]) -> Report:
    return make_report(msgspec.convert(data, list[Row]), ["results.json"])


@pytest.fixture(scope="module")
def data() -> list[dict[str, Any]]:
    """At the second speed without what most figures are drawn from, to save time."""
    made = rows(POLICIES, (1.0, 2.0), ("conversation",))
    return [{**row, "series": {}} if row["speed"] == 2 else row for row in made]


@pytest.fixture(scope="module")
def full(data: list[dict[str, Any]]) -> Report:
    return made(data)


@pytest.fixture(scope="module")
def page(full: Report) -> str:
    return to_html(full)


@pytest.fixture(scope="module")
def dom(page: str) -> Dom:
    return Dom(page)


def bare(policy: str = "ttft", **figures: Any) -> dict[str, Any]:
    """What every row has, and nothing measured."""
    nothing = dict.fromkeys(("goodput", "token_hit_rate", "rejected"))
    latencies: dict[str, Any] = {"ttft_ms": {}, "tpot_ms": {}, "e2e_ms": {}}
    return {"policy": policy, "speed": 1.0, "workers": 8, **nothing, **latencies, "ci95": {}, **figures}


def test_every_figure_is_there_and_described(dom: Dom) -> None:
    kinds = [name for _, found in dom.elements if (name := found.get("id") or "").startswith("figure-")]
    group = "figure-1-conversation-8-workers-simulated"
    each = ("ttft", "itl", "hits", "predicted", "gantt-2", "gantt-0", "load")
    assert kinds == [
        *(f"{group}-goodput", f"{group}-good-per-s"),
        *(f"{group}-x1-{kind}" for kind in each),
        f"{group}-x2-hits",
    ]
    described = [found["aria-label"] for _, found in dom.elements if found.get("role") == "img"]
    assert len(described) == len(kinds)
    assert all(described)
    assert sum(tag == "h1" for tag, _ in dom.elements) == 1
    assert ("html", {"lang": "en"}) in dom.elements


def test_no_id_is_there_twice_and_every_reference_has_its_end(dom: Dom, page: str) -> None:
    ids = Counter(dom.values("id"))
    assert max(ids.values()) == 1
    targets = {href[1:] for href in dom.values("href") if href.startswith("#")}
    targets |= set(re.findall(r"url\(#([^)]+)\)", page))
    assert targets <= set(ids)


def test_it_refers_to_nothing_outside(dom: Dom, page: str) -> None:
    assert "http" not in page
    references = [*dom.values("src"), *dom.values("href"), *re.findall(r"url\(([^)]*)\)", page)]
    assert len(references) > 100
    assert [at for at in references if not at.startswith(("#", "data:"))] == []
    assert not {"script", "link", "iframe", "img", "object"} & {tag for tag, _ in dom.elements} - {"link"}
    assert [found.get("href") for tag, found in dom.elements if tag == "link"] == ["data:,"]
    assert "@import" not in page
    assert "@font-face" not in page


def test_cells_have_the_rows_numbers_with_their_intervals(dom: Dom, data: list[dict[str, Any]]) -> None:
    last = data[2]
    goodput, bounds = 100 * last["goodput"], [100 * bound for bound in last["ci95"]["goodput"]]
    shown = dom.table("Goodput, % of all offered requests: TTFT 2 s, TPOT 25 ms")["ttft"]
    assert shown["goodput"] == f"{goodput:.1f}|{bounds[0]:.1f} – {bounds[1]:.1f}"
    assert shown["30 s / 300 ms"].startswith("93.0|")
    ttft = dom.table("TTFT, ms")["ttft"]
    assert ttft["p99"].split("|")[0].replace("\u202f", "") == f"{last['ttft_ms']['p99']:.0f}"
    cache = dom.table("Cache")["ttft"]
    assert cache["GPU"].startswith(f"{100 * last['hit_by_tier']['gpu']:.1f}|")
    assert cache["prefill tokens skipped, M"].startswith("24.00|")
    load = dom.table("Load and router")["ttft"]
    assert (load["µs per decision"][:5], load["Little’s L / λW"][:7]) == ("22.0|", "1.0003|")


def test_paired_differences_stand_out_only_where_they_are_some(dom: Dom) -> None:
    differences = dom.table("Differences to round_robin")
    assert set(differences) == {"dynamo", "ttft"}
    assert differences["ttft"]["goodput, points"] == "▲ +8.0|+7.0 to +9.0"
    assert differences["ttft"]["TTFT mean, ms"] == "▲ −60|−60 to −60"
    assert differences["ttft"]["peak / mean"] == "0.00|−0.01 to +0.01"


def test_it_says_how_it_was_measured(page: str) -> None:
    for text in (
        "time held, queueing and prefill",
        "the first 10 % of the requests",
        "TTFT 2 s, TPOT 25 ms",
        "kvroute simulate --trace conversation.jsonl",
        "qwen3-32b-h200-tp2",
    ):
        assert text in page


def test_settings_that_differ_are_told_with_their_policies() -> None:
    one = bare(
        "a", setting={"command": ["kvroute", "replay", "a b"], "lag_ms": {"p50": 0.25, "p99": 4}, "seed": 1}
    )
    two = bare("b", setting={"url": "http://127.0.0.1:1", "lag_ms": {}, "seed": 1}, warm_up=0.5)
    (part,) = made([one, two]).groups
    told = dict(part.facts)
    assert told["Command"] == ["kvroute replay 'a b' (a)", "not recorded (b)"]
    assert told["lag_ms"] == ["p50 0.25, p99 4 (a)", "none (b)"]
    assert told["url"] == ["not recorded (a)", "http://127.0.0.1:1 (b)"]
    assert told["Warm-up, not counted"] == ["not recorded (a)", "the first 50 % of the requests (b)"]
    assert (told["seed"], told["TTFT includes"]) == (["1"], ["not recorded"])


def test_a_router_that_tells_no_workers_is_compared_with_those_that_do() -> None:
    told, untold = bare("a", source="live", workers=4), bare("b", source="live", workers="unknown")
    (part,) = made([told, untold]).groups
    assert part.group.title == "unnamed, 4 workers, live"
    assert [entry.label for entry in part.group.cells[0].entries] == ["a", "b"]
    two = made([told, bare("a", source="live", workers=8), untold]).groups
    assert [each.group.title for each in two][2] == "unnamed, workers unknown, live"


def test_hostile_names_are_only_text(tmp_path: Path) -> None:
    name = "<script>alert('1')</script>$x_{1}$&\"\n"
    hostile = rows((name, "b"), (1.0,), (f"{name}<img src=x>",))
    for row in hostile:
        row["options"] = {name: name}
        row["setting"] = {name: name}
        row["goodput_by_limit"] = {name: 0.5}
        row["hit_by_tier"] = {name: 0.2}
        row["series"]["load"]["workers"] = [name] * 8
    file_name = "<b>.json"
    everything = make_report(msgspec.convert(hostile, list[Row]), [file_name])
    page = to_html(everything)
    found = {tag for tag, _ in Dom(page).elements}
    assert not {"script", "img", "b"} & found
    assert "&lt;script&gt;alert(&#39;1&#39;)&lt;/script&gt;$x_{1}$&amp;&#34;" in page
    assert "&lt;b&gt;.json" in page
    assert all(re.fullmatch(r"[a-z0-9-]+", picture.name) for picture, _ in everything.pictures())


def test_what_nobody_measured_is_said_and_never_0() -> None:
    lost = bare("lossy", goodput=0.5, ttft_ms={"mean": 10.0, "p50": 20.0, "p90": 30.0}, failed=0.05)
    page = to_html(made([lost, bare("blind", tpot_ms={"mean": 5.0})]))
    dom = Dom(page)
    ttft = dom.table("TTFT, ms")
    assert (ttft["lossy"]["p99"], ttft["blind"]["p99"], ttft["blind"]["mean"]) == ("∞", "n/a", "n/a")
    assert set(dom.table("Goodput")["blind"].values()) == {"n/a"}
    assert dom.table("Goodput")["lossy"]["failed"] == "5.00"
    assert not [caption for caption, _ in dom.tables if caption.startswith(("Cache", "Load", "E2E", "ITL"))]
    assert "Rejected: not measured." in page
    assert "Failed: lossy 5 %; unknown of blind." in page
    assert "not measured</text>" in page
    assert not re.search(
        r"\b(nan|None|inf|null)\b", re.sub(r"<style>.*?</style>|<svg.*?</svg>", "", page, flags=re.S)
    )


def test_a_policy_looks_the_same_everywhere() -> None:
    one, other = bare("a", trace="first"), bare("b", trace="first")
    report = made([one, other, bare("b", trace="second"), bare("b", trace="second", options={"x": 1})])
    first, second = (part.group.labels for part in report.groups)
    assert first == {"a": 0, "b": 1}
    assert second == {"b": 1, "b (x=1)": 2}


def test_the_same_cell_twice_is_shown_twice() -> None:
    (part,) = made([bare("a", goodput=0.1), bare("a", goodput=0.2)]).groups
    assert [entry.label for entry in part.cells[0].cell.entries] == ["a", "a #2"]


def test_a_report_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ResultsError, match="1001 rows of results; a report takes at most 1000"):
        made([bare()] * 1001)
    monkeypatch.setattr(page_module, "MAX_DRAWN_CELLS", 2)
    cells = [
        bare(speed=speed, trace=trace, hit_by_tier={"gpu": 0.1})
        for trace in "ab"
        for speed in (1.0, 2.0, 3.0)
    ]
    many = made(cells)
    drawn = [[bool(cell.pictures) for cell in part.cells] for part in many.groups]
    assert drawn == [[True, True, False], [False] * 3]
    assert many.undrawn_cells == 4


@pytest.mark.soak
def test_twelve_policies_on_two_traces_at_three_speeds_are_under_3_mb() -> None:
    page = to_html(made(rows()))
    assert 1e6 < len(page.encode()) < 3e6


def run(*arguments: str) -> tuple[int, str, str]:
    app = typer.Typer()
    app.command()(report)
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.stdout, result.stderr


def test_the_command_writes_the_page_and_every_figure_as_png(tmp_path: Path) -> None:
    some = [bare("a", goodput=0.5, speed=1.0), bare("a", goodput=0.4, speed=2.0)]
    for place, row in enumerate(some):
        (tmp_path / f"{place}.json").write_text(json.dumps([row]), encoding="utf-8")
    out, folder = tmp_path / "report.html", tmp_path / "figures" / "png"
    inputs = [str(tmp_path / f"{place}.json") for place in range(2)]
    code, told, err = run(*inputs, "--out", str(out), "--png", str(folder))
    assert (code, err) == (0, "")
    assert told == f"{out}: 2 figures, {out.stat().st_size / 1e6:.1f} MB\n"
    assert "0.json, 1.json" in out.read_text(encoding="utf-8")
    names = sorted(path.name for path in folder.iterdir())
    assert names == [f"1-unnamed-8-workers-simulated-{kind}.png" for kind in ("good-per-s", "goodput")]
    assert all(path.read_bytes().startswith(b"\x89PNG\r\n") for path in folder.iterdir())


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "results.json: No such file or directory"),
        ("{", "results.json: "),
        ("not json", "no JSON"),
        ("[]", "an empty list"),
        ('[{"policy": "a"}]', "required field `speed` - at `$[0]`"),
        (json.dumps([bare(goodput=1.5)]), "`float` <= 1.0 - at `$[0].goodput`"),
    ],
)
def test_bad_results_are_named(tmp_path: Path, content: str | None, problem: str) -> None:
    path = tmp_path / "results.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    code, out, err = run(str(path), "--out", str(tmp_path / "report.html"))
    assert (code, out) == (2, "")
    assert err.startswith(f"kvroute: {path}: ")
    assert problem in err
    assert not (tmp_path / "report.html").exists()


def test_where_nothing_can_be_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps([bare()]), encoding="utf-8")
    assert run(str(path), "--out", str(tmp_path)) == (
        *(2, ""),
        f"kvroute: --out: {tmp_path} is a directory; the path of a file is expected\n",
    )
    missing = tmp_path / "no" / "report.html"
    assert run(str(path), "--out", str(missing))[2] == (
        f"kvroute: --out: {missing}: {missing.parent} does not exist; the path of a file is expected\n"
    )
    code, _, err = run(str(path), "--out", str(tmp_path / "report.html"), "--png", str(path))
    assert (code, err) == (2, f"kvroute: --png: {path} is no directory; a folder, new or not, is expected\n")
    assert not (tmp_path / "report.html").exists()
    code, _, err = run(str(path), "--out", "/dev/full")
    assert (code, err) == (2, "kvroute: --out: /dev/full: No space left on device; it was not written\n")


def test_nothing_to_draw_is_a_page_too(tmp_path: Path) -> None:
    assert write_report(made([bare()]), tmp_path / "a.html") == 1
    assert "Goodput was not measured." in (tmp_path / "a.html").read_text(encoding="utf-8")
