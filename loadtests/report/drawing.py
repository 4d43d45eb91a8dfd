"""What all figures have in common: colours, size, and their way into the page as inline SVG."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from hashlib import sha1
from io import BytesIO, StringIO
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

INK, GRID = "#1b1d21", "#d4d7dc"
SERIES = ("#0072b2", "#d55e00", "#008a63", "#b0468d", "#8a6d00", "#4b49b8", "#626262", "#0093b8")
"""After Okabe and Ito, darkened until each has a contrast of 3 to white."""
DASHES: tuple[Any, ...] = ("solid", (0, (5, 1.6)), (0, (1.2, 1.2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
TIERS = ("#0b3c5d", "#2f7fb5", "#8fc1e3", "#d9e8f2")
"""From dark to light, so that they differ in grey too: GPU, CPU, disk, peer."""

LIGHT = {
    "ink": INK,
    "grid": GRID,
    **{f"s{place}": colour for place, colour in enumerate(SERIES)},
    **{f"t{place}": colour for place, colour in enumerate(TIERS)},
}
"""The page's variables; figures are drawn in these colours."""
DARK = {
    "ink": "#e6e8eb",
    "grid": "#3d424a",
    **dict(zip(("s0", "s1", "s2", "s3"), ("#5cb3ee", "#ff8b45", "#3ccfa0", "#f08acb"), strict=True)),
    **dict(zip(("s4", "s5", "s6", "s7"), ("#d9bd4a", "#a6a4ff", "#b9bcc2", "#5fdcf5"), strict=True)),
    **dict(zip(("t0", "t1", "t2", "t3"), ("#d9e8f2", "#8fc1e3", "#2f7fb5", "#1d4a6b"), strict=True)),
}

WIDTH_IN = 4.0
"""Of most figures: two stand side by side on a desktop, and one fills a phone with text large enough."""
FONT_PT = 11

_SETTINGS: Any = {
    "font.size": FONT_PT,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "svg.fonttype": "none",
    **{
        name: INK
        for name in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    },
    "axes.titlesize": FONT_PT,
    "axes.labelsize": FONT_PT,
    "xtick.labelsize": FONT_PT - 1,
    "ytick.labelsize": FONT_PT - 1,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "legend.frameon": False,
    "text.parse_math": False,
}


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure of the page. `name` is its file's, without ending; `text` says what is to be seen in it."""

    name: str
    caption: str
    text: str
    figure: Figure
    by_policy: bool = True
    """Whether colours and markers stand for policies, so that the page's legend is needed."""


def colour(place: int) -> str:
    return SERIES[place % len(SERIES)]


def line_style(place: int) -> dict[str, Any]:
    """Colour, dashes and marker: 168 policies differ in one of them at least."""
    return {
        "color": colour(place),
        "linestyle": DASHES[place % len(DASHES)],
        "marker": MARKERS[place % len(MARKERS)],
        "markersize": 5,
        "linewidth": 1.7,
    }


@contextmanager
def style(**more: Any) -> Iterator[None]:
    """What is drawn inside has the report's look: matplotlib gives it when a text or line is made."""
    # Half a second to import.
    from matplotlib import rc_context

    with rc_context(_SETTINGS | more):
        yield


def new_figure(
    height_in: float, rows: int = 1, columns: int = 1, width_in: float = WIDTH_IN, **sharing: Any
) -> tuple[Figure, list[Axes]]:
    """Axes row by row."""
    # `Figure` instead of pyplot: no global state and no display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, **sharing).flat)


def to_png(picture: Picture, legend: Iterable[tuple[str, int]]) -> bytes:
    """On white, with the policies named below, since a file is seen without the page."""
    from matplotlib.lines import Line2D

    content = BytesIO()
    with style():
        title = picture.figure.suptitle(picture.caption, fontsize=FONT_PT, wrap=True)
        lines = [Line2D([], [], label=label, **line_style(place)) for label, place in legend]
        shown = lines if picture.by_policy else []
        below = picture.figure.legend(handles=shown, loc="outside lower center", ncols=2) if shown else None
        picture.figure.savefig(content, format="png", dpi=150, facecolor="white", bbox_inches="tight")
        title.remove()
        if below is not None:
            below.remove()
    return content.getvalue()


def to_svg(picture: Picture) -> str:
    """An element for the page: its colours are the page's variables, its ids begin with the figure's name."""
    content = StringIO()
    with style(**{"svg.hashsalt": picture.name}):
        picture.figure.savefig(content, format="svg", dpi=144)
    return _inline(content.getvalue(), picture.name)


def _inline(svg: str, name: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = svg.replace("xlink:href", "href")
    # Without its namespaces, which HTML knows by itself, and its size, which is up to the page.
    svg = re.sub(r'<svg[^>]*viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" aria-hidden="true">', svg, count=1)
    svg = _with_own_ids(svg, sha1(name.encode(), usedforsecurity=False).hexdigest()[:8])
    svg = re.sub(r'(?<= d=")[^"]*', lambda path: _rounded(path.group()), svg)
    svg = re.sub(r'(?<= (?:x|y)=")[-\d.]+', lambda number: _rounded(number.group()), svg)
    svg = re.sub(r"font-family: [^;\"]*; ", "", svg)
    for variable, value in LIGHT.items():
        svg = svg.replace(value, f"var(--{variable})")
    return re.sub(r"\n\s*", "\n", svg)


def _with_own_ids(svg: str, prefix: str) -> str:
    """Those that are referred to, or say where a knee is, differ from the other figures'; the rest goes."""
    wanted = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))

    def keep(found: re.Match[str]) -> str:
        name = found.group(1)
        return f' id="{prefix}-{name}"' if name in wanted or name.startswith("knee") else ""

    svg = re.sub(r' id="([^"]*)"', keep, svg)
    return svg.replace('href="#', f'href="#{prefix}-').replace("url(#", f"url(#{prefix}-")


def _rounded(numbers: str) -> str:
    return re.sub(r"-?\d+\.\d+", lambda number: f"{float(number.group()):.1f}".removesuffix(".0"), numbers)


def plain_logs(axis: Axis) -> None:
    """Ticks as 0.1, 1, 10 rather than powers, which would need mathematical type."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(numticks=7))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def swatches(styles: Iterable[int]) -> str:
    """Each policy's line and marker as a symbol `policy-N`, for legends and tables."""
    return "".join(map(_symbol, styles))


@cache
def _symbol(place: int) -> str:
    with style():
        figure, (axes,) = new_figure(0.2, width_in=0.42)
        figure.set_layout_engine("none")
        axes.set(position=(0, 0, 1, 1), xlim=(-1, 1), ylim=(-1, 1))
        axes.set_axis_off()
        axes.plot((-0.95, 0, 0.95), (0, 0, 0), **{**line_style(place), "markevery": [1]})
    svg = to_svg(Picture(f"swatch-{place}", "", "", figure))
    return svg.replace("<svg", f'<symbol id="policy-{place}"').replace("</svg>", "</symbol>")


def short(label: str, letters: int = 26) -> str:
    """For figures, whose room is fixed; line ends would break their layout."""
    label = " ".join(label.split())
    return label if len(label) <= letters else f"{label[: letters - 1]}…"
