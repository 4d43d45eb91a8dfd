"""The report in a real browser: on a desktop, on a phone, in the dark and on paper.

KVROUTE_SCREENSHOTS names a folder to keep pictures in, for people to look at.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvroute.loadtests.report.page import make_report, write_report
from kvroute.loadtests.results.rows import Row
from tests.browser.chromium import Page, browser
from tests.loadtests.report_rows import rows

pytestmark = pytest.mark.browser

PHONE, DESKTOP, PAPER = (360, 800), (1280, 900), (703, 1000)
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
LEAST_TEXT_PX, LEAST_DRAWN_PX = 14, 11


@pytest.fixture(scope="module")
def report_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The page, of policies with long names too, and the number of its figures."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    names = (
        "round_robin",
        "a policy whose name goes on and on, and-has-a-part-that-cannot-be-broken",
        "lmetric",
        "ttft",
    )
    given = rows(names, (1.0, 1.5), ("conversation", "a_trace_with_a_very_long_name_" * 4))
    for row in given:
        row["setting"]["a_long_value"] = "x" * 300
    return path, write_report(make_report(msgspec.convert(given, list[Row]), ["results.json"]), path)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


def keep(page: Page, name: str) -> None:
    folder = os.environ.get("KVROUTE_SCREENSHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(Path(folder) / f"{name}.png")


def test_it_asks_for_nothing_and_complains_of_nothing(page: Page, report_file: tuple[Path, int]) -> None:
    path, figures = report_file
    page.open(path, *DESKTOP)
    asked = {told["request"]["url"] for told in page.told("Network.requestWillBeSent")}
    assert [url for url in asked if not url.startswith("data:")] == [path.resolve().as_uri()]
    for complaint in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
        assert page.told(complaint) == []
    drawn = """[...document.querySelectorAll('figure svg')]
        .filter(s => s.getBoundingClientRect().height > 100).length"""
    assert page.evaluate(drawn) == figures
    keep(page, "desktop")


@pytest.mark.parametrize("size", [PHONE, (320, 640), (768, 1024), DESKTOP])
def test_only_tables_scroll_sideways(
    page: Page, report_file: tuple[Path, int], size: tuple[int, int]
) -> None:
    page.open(report_file[0], *size)
    assert page.evaluate(OVERFLOW) == 0
    outside = """[...document.querySelectorAll('body *')].filter(e =>
        !e.closest('.scroll, svg') &&
        e.getBoundingClientRect().right > document.body.parentNode.clientWidth + 1)
        .map(e => e.outerHTML.slice(0, 80))"""
    assert page.evaluate(outside) == []
    scrolled = "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth).length"
    if size == PHONE:
        assert page.evaluate(scrolled) > 0
        keep(page, "phone")
        page.evaluate("document.querySelector('.tables').scrollIntoView()")
        keep(page, "phone-tables")


def test_text_is_large_enough_on_a_phone(page: Page, report_file: tuple[Path, int]) -> None:
    page.open(report_file[0], *PHONE)
    sizes = """[...document.querySelectorAll('body *')].filter(e => !e.closest('svg') &&
        [...e.childNodes].some(n => n.nodeType == 3 && n.data.trim()))
        .map(e => parseFloat(getComputedStyle(e).fontSize))"""
    assert min(page.evaluate(sizes)) >= LEAST_TEXT_PX
    drawn = """[...document.querySelectorAll('figure text')].map(t =>
        parseFloat(getComputedStyle(t).fontSize) * t.ownerSVGElement.getScreenCTM().a)"""
    assert min(page.evaluate(drawn)) >= LEAST_DRAWN_PX


def test_table_heads_do_not_cover_figures(page: Page, report_file: tuple[Path, int]) -> None:
    """At the start of a table, no text lies on the name of the policy beside it."""
    page.open(report_file[0], *PHONE)
    covered = """[...document.querySelectorAll('tbody tr')].filter(r =>
        r.children[0].getBoundingClientRect().right > r.children[1].getBoundingClientRect().left + 1
        || r.children[0].scrollWidth > r.children[0].clientWidth + 1).length"""
    assert page.evaluate(covered) == 0


def test_it_is_dark_where_that_is_preferred(page: Page, report_file: tuple[Path, int]) -> None:
    look = "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    page.open(report_file[0], *DESKTOP, dark=True)
    assert page.evaluate(look) == ["rgb(21, 23, 27)", "rgb(230, 232, 235)"]
    keep(page, "dark")
    fills = "[...document.querySelectorAll('figure text')].map(t => getComputedStyle(t).fill)"
    assert set(page.evaluate(fills)) == {"rgb(230, 232, 235)"}
    page.open(report_file[0], *DESKTOP)
    assert page.evaluate(look) == ["rgb(255, 255, 255)", "rgb(27, 29, 33)"]


def test_on_paper_nothing_is_cut_and_text_is_black(page: Page, report_file: tuple[Path, int]) -> None:
    page.open(report_file[0], *PAPER, dark=True)
    page.call("Emulation.setEmulatedMedia", media="print")
    assert page.evaluate(OVERFLOW) == 0
    cut = """[...document.querySelectorAll('table, figure svg')].filter(e =>
        e.getBoundingClientRect().right > document.body.parentNode.clientWidth + 1)
        .map(e => e.outerHTML.slice(0, 120))"""
    assert page.evaluate(cut) == []
    colours = """[...document.querySelectorAll('body, td, th, small, p, li, figcaption, dt, figure text')]
        .map(e => getComputedStyle(e).color)"""
    assert set(page.evaluate(colours)) == {"rgb(0, 0, 0)"}
    keep(page, "paper")


def test_a_pdf_has_every_figure_whole(page: Page, report_file: tuple[Path, int], tmp_path: Path) -> None:
    path, figures = report_file
    page.open(path, *DESKTOP)
    (tmp_path / "report.pdf").write_bytes(page.pdf())
    text = subprocess.run(
        ["pdftotext", "-layout", tmp_path / "report.pdf", "-"], capture_output=True, check=True, text=True
    ).stdout
    captions = page.evaluate("[...document.querySelectorAll('figcaption strong')].map(e => e.textContent)")
    assert len(captions) == figures
    # Lines are broken, and of two columns one line holds both: words in order are too much to ask for.
    words = set(re.findall(r"\w+", text))
    assert {word for caption in captions for word in re.findall(r"\w+", caption) if len(word) < 12} <= words
    axes = ("offered, requests/s", "TTFT, s", "ITL, s", "% of prompt tokens", "requests inside", "actual, s")
    assert {label: text.count(label) > 0 for label in axes} == dict.fromkeys(axes, True)
