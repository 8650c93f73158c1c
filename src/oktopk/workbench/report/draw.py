"""How pictures look, and how one becomes a PNG and an SVG that lies within a page."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice, product
from typing import Any
from xml.etree import ElementTree

import matplotlib.style
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

# Okabe and Ito's colours, which people with any kind of colour vision can tell apart; markers and dashes help in print
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"
COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)
INK, GRID, SURFACE = "#1a1a1a", "#e3e3e3", "#fffffe"
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES = ("-", "--", "-.", ":")
PAGE_COLOURS = {
    INK: "currentColor", GRID: "var(--grid)", SURFACE: "var(--surface)", BLUE: "var(--blue)",
    VERMILION: "var(--vermilion)", GREEN: "var(--green)", PURPLE: "var(--purple)", ORANGE: "var(--orange)",
    SKY: "var(--sky)",
}  # fmt: skip
"""What a page puts in the place of a colour, so that it can have others at night."""

WIDTH, HEIGHT = 5.0, 3.2
_MOST_POINTS = 400
_FEW_POINTS = 40
_LOOK: dict[str, Any] = {
    "font.size": 10,
    "axes.titlesize": 10,
    "figure.titlesize": 11,
    "figure.constrained_layout.use": True,
    "figure.facecolor": "white",
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "legend.handlelength": 2.4,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "hatch.linewidth": 1.2,
    "text.parse_math": False,  # names come from files
    "svg.fonttype": "none",
    "svg.hashsalt": "oktopk",
    **{f"{part}.color": INK for part in ("text", "xtick", "ytick")},
    **{f"axes.{part}": INK for part in ("edgecolor", "labelcolor")},
}
_Array = np.ndarray[Any, np.dtype[np.float64]]
_Values = Sequence[float] | _Array
_SVG = "{http://www.w3.org/2000/svg}"
_LINK = "{http://www.w3.org/1999/xlink}href"


@dataclass(frozen=True)
class Drawing:
    """A picture; `name` is that of its file."""

    name: str
    title: str
    caption: str
    figure: Figure


@dataclass(frozen=True)
class Absent:
    """Why there is no such picture."""

    name: str
    title: str
    why: str


@contextmanager
def look() -> Generator[None]:
    """Within this, figures are made and saved as ours."""
    with matplotlib.style.context(["default", _LOOK]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # names come from files
        yield


def panels(title: str, count: int = 1, height: float = HEIGHT) -> tuple[Figure, list[Axes]]:
    """One below the other, with a common x axis."""
    figure = Figure(figsize=(WIDTH, height))
    figure.suptitle(title, x=0.02, ha="left")
    grid = figure.subplots(count, 1, sharex=True, squeeze=False)
    return figure, [axes for row in grid for axes in row]


def style(index: int) -> dict[str, Any]:
    """Another colour, marker and dashes for each line."""
    pairs = list(islice(cycle(product(DASHES, range(len(COLOURS)))), index + 1))
    dashes, place = pairs[-1]
    return {"color": COLOURS[place], "marker": MARKERS[place], "linestyle": dashes}


def line(axes: Axes, xs: Sequence[float], ys: Sequence[float | None], label: str, **look: Any) -> None:
    """A line through the points that exist; of very many, means with their range behind it."""
    x = np.array([x for x, y in zip(xs, ys, strict=True) if y is not None], dtype=float)
    y = np.array([y for y in ys if y is not None], dtype=float)
    if len(x) > _MOST_POINTS:
        band(axes, x, y, y, color=look.get("color"), alpha=0.2)
        x, y = (_by_parts(each, np.mean) for each in (x, y))
    if len(x) == 1 and "marker" not in look:  # a line through one point cannot be seen
        look = {**look, "marker": "_", "markersize": 14}
    if len(x) > _FEW_POINTS:
        look = {**look, "markevery": max(1, len(x) // 8)}
    axes.plot(x, y, label=f" {label}" if label.startswith("_") else label, **look)


def band(axes: Axes, xs: _Values, low: _Values, high: _Values, **look: Any) -> None:
    """From the lowest to the highest."""
    x, bottom, top = (np.asarray(each, dtype=float) for each in (xs, low, high))
    if len(x) > _MOST_POINTS:
        x, bottom, top = _by_parts(x, np.mean), _by_parts(bottom, np.min), _by_parts(top, np.max)
    axes.fill_between(x, bottom, top, linewidth=0, **look)


def _by_parts(values: _Array, pick: Callable[[_Array], Any]) -> _Array:
    """One value for each of as many parts as a picture can show."""
    return np.array([pick(part) for part in np.array_split(values, _MOST_POINTS)], dtype=float)


def legend(figure: Figure, axes: Axes) -> None:
    """Above the axes, where no data is; nothing for a single line."""
    handles, labels = axes.get_legend_handles_labels()
    longest = max(map(len, labels))
    if len(labels) > 1:
        put_legend(figure, handles, labels, columns=1 if longest > 24 else 2 if longest > 12 else 3)


def put_legend(figure: Figure, handles: Sequence[Artist], labels: Sequence[str], columns: int) -> None:
    """With the figure's title as its own: two things at the same edge would lie on each other."""
    title = figure.get_suptitle()
    figure.suptitle("").set_in_layout(False)
    figure.legend(
        handles, labels, ncols=columns, title=title, title_fontsize=11, alignment="left", loc="outside upper left",
        borderaxespad=0.2, columnspacing=1.2,
    )  # fmt: skip


def log_where_it_helps(axes: Axes, values: Sequence[float | None], ratio: float = 20.0) -> None:
    there = [value for value in values if value is not None]
    if there and min(there) > 0 and max(there) / min(there) > ratio:
        axes.set_yscale("log")
        axes.set_ylabel(f"{axes.get_ylabel()} (log)")
        if max(there) / min(there) < 100.0:  # powers of ten alone would be one or two numbers
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        formatted(axes.yaxis, lambda value: f"{value:g}")


def formatted(axis: Axis, show: Callable[[float], str]) -> None:
    """Its numbers as people read them."""
    axis.set_major_formatter(formatter(show))


def formatter(show: Callable[[float], str]) -> FuncFormatter:
    def at(value: float, place: int | None) -> str:
        del place
        return show(value)

    return FuncFormatter(at)


def few_ticks(axes: Axes, whole: bool) -> None:
    """Along the x axis; `whole` numbers only, for steps."""
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=whole))
    low, high = axes.get_xlim()
    if whole and high - low < 1.0:
        axes.set_xlim(round(low) - 1.0, round(high) + 1.0)


def shorten(text: str, most: int = 34) -> str:
    half = (most - 3) // 2
    return text if len(text) <= most else f"{text[:half]}...{text[-half:]}"


# --- files


def settle(figure: Figure) -> None:
    """Find everything's place now: later each format that it is saved in would do so again."""
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)
        figure.set_layout_engine("none")


def png(figure: Figure) -> bytes:
    """In light colours, 150 dots an inch."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150, metadata={"Software": None})
    return buffer.getvalue()


def svg(figure: Figure, prefix: str, label: str) -> str:
    """For within a page: the colours are the page's, ids begin with `prefix`, the width is that of its place."""
    buffer = io.BytesIO()
    figure.savefig(
        buffer, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
    )
    ElementTree.register_namespace("", _SVG[1:-1])
    root = ElementTree.fromstring(buffer.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{_SVG}metadata", f"{_SVG}style"):
                parent.remove(child)
    used = set(re.findall(r"#([\w-]+)", " ".join(value for each in root.iter() for value in each.attrib.values())))
    for element in root.iter():
        _adopt(element, prefix, used)
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.attrib |= {"role": "img", "aria-label": label}
    return ElementTree.tostring(root, encoding="unicode")


def _adopt(element: ElementTree.Element, prefix: str, used: set[str]) -> None:
    """One element into the page."""
    own = element.attrib.pop("id", None)
    if own in used:
        element.set("id", prefix + own)
    link = element.attrib.pop(_LINK, None)
    if link:
        element.set("href", f"#{prefix}{link[1:]}")
    for key, value in element.attrib.items():
        if "url(#" in value:
            element.set(key, value.replace("url(#", f"url(#{prefix}"))
    plain = [f"{key}: {element.attrib.pop(key)}" for key in ("fill", "stroke") if element.get(key) in PAGE_COLOURS]
    given = "; ".join([*plain, *filter(None, [element.get("style")])])  # only a style may ask the page for a colour
    if given:
        given = re.sub(r"#[0-9a-f]{6}\b", lambda found: PAGE_COLOURS.get(found[0], found[0]), given)
        element.set("style", re.sub(r"(\d+(?:\.\d+)?px) ['\w][^;]*", r"\1 var(--font)", given))
