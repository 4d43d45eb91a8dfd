"""The report: rows of results in, one HTML page and PNG files out."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from kvroute import __version__
from kvroute.loadtests.report.bars import hit_picture, prediction_picture
from kvroute.loadtests.report.curves import distribution_pictures, goodput_pictures
from kvroute.loadtests.report.drawing import DARK, LIGHT, Picture, style, swatches, to_png, to_svg
from kvroute.loadtests.report.facts import facts
from kvroute.loadtests.report.groups import Cell, Entry, Group, group
from kvroute.loadtests.report.reading import ranked, read_cell, read_group
from kvroute.loadtests.report.tables import Table, tables
from kvroute.loadtests.report.timelines import gantt_picture, load_picture
from kvroute.loadtests.results.files import ResultsError
from kvroute.loadtests.results.rows import Row

MAX_ROWS = 1000
MAX_DRAWN_CELLS = 12
TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True, slots=True)
class CellPart:
    cell: Cell
    sentences: list[str]
    tables: list[Table]
    pictures: list[Picture]


@dataclass(frozen=True, slots=True)
class GroupPart:
    name: str
    group: Group
    sentences: list[str]
    facts: list[tuple[str, list[str]]]
    pictures: list[Picture]
    cells: list[CellPart]


@dataclass(frozen=True, slots=True)
class Report:
    """Everything of it, drawn but not yet written."""

    files: tuple[str, ...]
    groups: list[GroupPart]
    undrawn_cells: int

    @property
    def policies(self) -> dict[str, int]:
        """Label and style of all."""
        found = {label: style for part in self.groups for label, style in part.group.labels.items()}
        return dict(sorted(found.items(), key=lambda item: item[1]))

    def pictures(self) -> Iterator[tuple[Picture, Group]]:
        """In their order on the page."""
        for part in self.groups:
            for picture in [*part.pictures, *(one for cell in part.cells for one in cell.pictures)]:
                yield picture, part.group


def make_report(rows: Sequence[Row], files: Sequence[str]) -> Report:
    """`files` are the names of those that the rows came from.

    ResultsError for too many rows. Of the first twelve cells everything is drawn; of others only their points
    in the curves of goodput, so that the page's size is bounded.
    """
    if len(rows) > MAX_ROWS:
        raise ResultsError(f"{len(rows)} rows of results; a report takes at most {MAX_ROWS}")
    groups, drawn = [], 0
    with style():
        for place, each in enumerate(group(rows), 1):
            groups.append(_group_part(each, f"{place}-{_slug(each.title)}", max(0, MAX_DRAWN_CELLS - drawn)))
            drawn += len(each.cells)
    return Report(tuple(files), groups, max(0, drawn - MAX_DRAWN_CELLS))


def _group_part(of: Group, name: str, to_draw: int) -> GroupPart:
    """With figures of its first `to_draw` cells."""
    cells = []
    for place, cell in enumerate(of.cells):
        pictures = _cell_pictures(cell, f"{name}-x{_slug(f'{cell.speed:g}')}") if place < to_draw else []
        cells.append(CellPart(cell, read_cell(cell), tables(cell), pictures))
    return GroupPart(name, of, read_group(of), facts(of), goodput_pictures(of, name), cells)


def _slug(text: str) -> str:
    """For names of files and ids of elements."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:48]


def _cell_pictures(cell: Cell, name: str) -> list[Picture]:
    gantts = [gantt_picture(cell, entry, name) for entry in _with_gantt(cell)]
    made = [
        *distribution_pictures(cell, name),
        hit_picture(cell, name),
        prediction_picture(cell, name),
        *gantts,
        load_picture(cell, name),
    ]
    return [picture for picture in made if picture is not None]


def _with_gantt(cell: Cell) -> list[Entry]:
    """The policy of most goodput and the one it was paired with, of those that have spans."""
    having = [entry for entry in cell.entries if entry.row.series.gantt.spans]
    ranks = [entry for entry in ranked(cell, "goodput", highest=True) if entry in having] or having
    best = ranks[:1]
    against = cell.named(best[0].row.paired.against) if best and best[0].row.paired is not None else None
    return best + ([against] if against is not None and against in having and against not in best else [])


def to_html(report: Report) -> str:
    """One page that refers to nothing outside of it."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # What matplotlib made is marked-up text; it escaped the names in it itself.
    return environment.get_template("report.html").render(
        report=report,
        version=__version__,
        light=LIGHT,
        dark=DARK,
        swatches=Markup(swatches(report.policies.values())),
        svg=lambda picture: Markup(to_svg(picture)),
    )


def check_places(out: Path, png_folder: Path | None) -> None:
    """Before anything is drawn, which takes time: ResultsError if nothing could be written there."""
    if out.is_dir():
        raise ResultsError(f"--out: {out} is a directory; the path of a file is expected")
    place = out if out.exists() else out.parent
    if not os.access(place, os.W_OK):
        what = "cannot be written" if place.exists() else "does not exist"
        raise ResultsError(f"--out: {out}: {place} {what}; the path of a file is expected")
    if png_folder is not None and png_folder.exists() and not png_folder.is_dir():
        raise ResultsError(f"--png: {png_folder} is no directory; a folder, new or not, is expected")


def write_report(report: Report, out: Path, png_folder: Path | None = None) -> int:
    """Write the page, and a PNG file per figure if a folder is named, which is made; the number of figures.

    ResultsError if something cannot be written.
    """
    page = to_html(report)
    _write(out, page.encode(), "--out")
    figures = list(report.pictures())
    if png_folder is not None:
        try:
            png_folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ResultsError(f"--png: {png_folder}: {error.strerror}; a folder is expected") from None
        for picture, of in figures:
            _write(png_folder / f"{picture.name}.png", to_png(picture, of.labels.items()), "--png")
    return len(figures)


def _write(path: Path, content: bytes, option: str) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ResultsError(f"{option}: {path}: {error.strerror}; it was not written") from None
