"""Pictures from the JSON files that `oktopk bench` writes: python benchmarks/plots.py [--results DIR] [--out DIR]."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
Row = dict[str, Any]

# Okabe and Ito's colours, which people with any kind of colour vision can tell apart; markers tell them apart in print
BLACK, ORANGE, SKY, GREEN, BLUE, VERMILION, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
STYLES = {
    "dense-fp32": (BLACK, "o", "-"),
    "dense-bf16": (SKY, "s", "-"),
    "ddp-fp16": (PURPLE, "^", "-"),
    "powersgd": (ORANGE, "D", "-"),
    "oktopk-fp32": (BLUE, "o", "-"),
    "oktopk-bf16": (VERMILION, "s", "-"),
}
OTHERS = [(GREEN, marker, line) for line in ("--", ":", "-.") for marker in ("v", "P", "X", "*")]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of the JSON files")
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs" / "performance", help="folder of the PNGs")
    parser.add_argument("--density", type=float, default=0.01, help="which of ours to show (default %(default)s)")
    given = parser.parse_args(arguments)
    rows = load(given.results)
    if not rows:
        print(f"plots: {given.results}: holds no results; run `oktopk bench allreduce` first", file=sys.stderr)
        return 2
    given.out.mkdir(parents=True, exist_ok=True)
    pictures: dict[str, Callable[[list[Row], float], Figure | None]] = {
        "time-against-n": time_against_n,
        "time-against-ranks": time_against_ranks,
        "time-against-bandwidth": time_against_bandwidth,
        "bytes-per-pair": bytes_per_pair,
    }
    with plt.style.context("default"), plt.rc_context(LOOK):
        for name, draw in pictures.items():
            figure = draw(rows, given.density)
            if figure is None:
                print(f"{name}: left out, no rows for it")
                continue
            path = given.out / f"{name}.png"
            figure.savefig(path, dpi=150, bbox_inches="tight")
            plt.close(figure)
            print(path)
    return 0


LOOK = {
    "figure.facecolor": "white",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
}


def load(folder: Path) -> list[Row]:
    """All rows; those of `quick` only where nothing else was measured."""
    files = sorted(folder.glob("*.json"))
    chosen = [file for file in files if file.stem != "quick"] or files
    return [row for file in chosen for row in json.loads(file.read_text())["rows"]]


# --- the pictures


def time_against_n(rows: list[Row], density: float) -> Figure | None:
    mine = shown([row for row in rows if row["bench"] == "allreduce"], density)
    panels = [(f"{size} processes", of(mine, ranks=size)) for size in values(mine, "ranks")]
    return draw(
        [panel for panel in panels if len(values(panel[1], "n")) > 1],
        x=lambda row: row["n"],
        labels=("elements in the gradient, n", "milliseconds for one allreduce"),
        tick=lambda x: f"{x / 1e6:g}M" if x >= 1e6 else f"{x / 1e3:g}k",
        title=f"One allreduce on one machine, density {chosen_density(rows, density):g}",
    )


def time_against_ranks(rows: list[Row], density: float) -> Figure | None:
    mine = shown([row for row in rows if row["bench"] == "allreduce"], density)
    panels = [(f"n = {n / 1e6:g}M", of(mine, n=n)) for n in values(mine, "n")]
    return draw(
        [panel for panel in panels if len(values(panel[1], "ranks")) > 1],
        x=lambda row: row["ranks"],
        labels=("processes, P", "milliseconds for one allreduce"),
        tick=lambda x: f"{x:g}",
        title=f"One allreduce on one machine, density {chosen_density(rows, density):g}",
    )


def time_against_bandwidth(rows: list[Row], density: float) -> Figure | None:
    linked = [row for row in rows if row["bench"] == "links" and row["rate_mbit_per_s"]]
    mine = shown(linked, density)
    panels = [
        (f"{size} processes, n = {n / 1e6:g}M", of(mine, ranks=size, n=n))
        for n in values(mine, "n")
        for size in values(of(mine, n=n), "ranks")
    ]
    return draw(
        [panel for panel in panels if len(values(panel[1], "rate_mbit_per_s")) > 1],
        x=lambda row: row["rate_mbit_per_s"],
        labels=("speed of each link", "milliseconds for one allreduce"),
        tick=lambda x: f"{x / 1e3:g} Gbit/s" if x >= 1e3 else f"{x:g} Mbit/s",
        title=f"One allreduce over slower links, density {chosen_density(rows, density):g}",
    )


def bytes_per_pair(rows: list[Row], density: float) -> Figure | None:
    del density
    measured = [row for row in rows if row.get("bytes_per_pair") is not None and row.get("device", "cpu") == "cpu"]
    largest = max((row["n"] for row in measured), default=0)
    mine = [{**row, "contender": row["wire"]} for row in measured if row["n"] == largest]
    return draw(
        [("", mine)] if len(values(mine, "density")) > 1 else [],
        x=lambda row: row["density"],
        y=lambda row: row["bytes_per_pair"],
        labels=("density", "bytes for one value and its index"),
        tick=lambda x: f"{x:g}",
        title="What a pair costs on the wire",
        log_y=False,
    )


# --- how they are drawn


def draw(
    panels: list[tuple[str, list[Row]]],
    x: Callable[[Row], float],
    labels: tuple[str, str],
    tick: Callable[[float], str],
    title: str,
    y: Callable[[Row], float] = lambda row: row["median_ms"],
    log_y: bool = True,
) -> Figure | None:
    """A panel for each selection of rows, a line for each contender in it, its name at its end; None for no panels."""
    if not panels:
        return None
    figure, grid = plt.subplots(1, len(panels), figsize=(5.6 * len(panels), 4.4), sharey=True, squeeze=False)
    others = iter(OTHERS)
    styles = dict(STYLES)
    all_ends: list[tuple[Axes, list[tuple[float, str, str]]]] = []
    for axes, (name, rows) in zip(grid[0], panels, strict=True):
        ends: list[tuple[float, str, str]] = []
        for contender in dict.fromkeys(row["contender"] for row in rows):
            if contender not in styles:
                styles[contender] = next(others, OTHERS[-1])
            color, marker, line = styles[contender]
            points = sorted(
                ((x(row), y(row), row) for row in of(rows, contender=contender)), key=lambda point: point[:2]
            )
            xs, ys = [point[0] for point in points], [point[1] for point in points]
            width = 2.4 if contender.startswith("oktopk") else 1.4
            axes.plot(xs, ys, color=color, marker=marker, linestyle=line, linewidth=width, markersize=5)
            if all("p10_ms" in point[2] for point in points):
                lows, highs = [point[2]["p10_ms"] for point in points], [point[2]["p90_ms"] for point in points]
                axes.fill_between(xs, lows, highs, color=color, alpha=0.12, linewidth=0)
            ends.append((ys[-1], contender, color))
        places = sorted({x(row) for row in rows})
        axes.set_xscale("log")
        axes.set_xticks(places, [tick(place) for place in places])
        axes.minorticks_off()
        if log_y:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        else:
            axes.set_ylim(bottom=0.0)
        axes.set_xlabel(labels[0])
        axes.set_title(name)
        axes.margins(x=0.06)
        all_ends.append((axes, ends))
    for axes, ends in all_ends:  # once every panel has had its say about the common height
        label_ends(axes, ends)
    grid[0][0].set_ylabel(labels[1])
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    figure.tight_layout()
    return figure


def label_ends(axes: Axes, ends: list[tuple[float, str, str]]) -> None:
    """Each line's name beside its last point, moved up where two would lie on each other."""
    right = axes.get_xticks()[-1]
    low, high = axes.get_ylim()
    log = axes.get_yscale() == "log"
    scale: Callable[[float], float] = math.log if log else float
    span = scale(high) - scale(low)
    lowest = -1.0
    for y, name, color in sorted(ends):
        place = max((scale(y) - scale(low)) / span, lowest + 0.055)
        lowest = place
        height = math.exp(scale(low) + place * span) if log else low + place * span
        axes.annotate(
            name, (right, height), xytext=(8, 0), textcoords="offset points", color=color, va="center", fontsize=9,
            annotation_clip=False, fontweight="bold" if name.startswith("oktopk") else "normal",
        )  # fmt: skip


# --- rows


def of(rows: list[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def values(rows: list[Row], key: str) -> list[Any]:
    return sorted({row[key] for row in rows})


def shown(rows: list[Row], density: float) -> list[Row]:
    """The peers, and ours at one density."""
    wanted = chosen_density(rows, density)
    return [row for row in rows if row["density"] is None or row["density"] == wanted]


def chosen_density(rows: list[Row], density: float) -> float:
    """The one that was measured and is nearest."""
    there = {row["density"] for row in rows if row.get("density") and row.get("median_ms")}
    return min(there, key=lambda each: abs(math.log(each / density)), default=density)


if __name__ == "__main__":
    sys.exit(main())
