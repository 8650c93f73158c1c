"""The picture of the volume table: elements that leave a rank, against the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from oktopk.reduce.description import lower_bound
from oktopk.registry import describe
from oktopk.workbench.console.tables import Row, elements
from oktopk.workbench.simulate.rows import MODEL, MOVED

# Okabe and Ito's colours, which people with any kind of colour vision can tell apart; markers tell them apart in print
_STYLES = {
    "dense": ("#000000", "s"),
    "topkA": ("#E69F00", "D"),
    "topkA2": ("#E69F00", "<"),
    "topkAopt": ("#E69F00", ">"),
    "topkDSA": ("#009E73", "v"),
    "gtopk": ("#CC79A7", "P"),
    "gaussiank": ("#56B4E9", "^"),
    "gaussiankconcat": ("#56B4E9", "X"),
    "gaussiankSA": ("#56B4E9", "*"),
    "oktopk": ("#0072B2", "o"),
}
_GREY = "#8c8c8c"
_LEAST_GAP = 0.042  # between two names, as a part of the height
_POINTS_PER_DOUBLING = 4


def draw(rows: Sequence[Row], path: Path, source: str) -> None:
    """Write the PNG. Lines are formulas, markers what the busiest rank sent; hollow ones and dashes are the model's."""
    figure = Figure(figsize=(8.6, 5.4), dpi=150, facecolor="white")
    axes = figure.add_subplot()
    several = [row for row in rows if row["ranks"] > 1]
    sizes = sorted({int(row["ranks"]) for row in several})
    ends = [_one_reducer(axes, [row for row in several if row["reducer"] == name], sizes) for name in _names(several)]
    n, k = int(rows[0]["n"]), int(rows[0]["k"])
    grid = _grid(sizes)
    axes.plot(grid, [lower_bound(k, size) for size in grid], color=_GREY, linestyle=":", linewidth=1.6)
    ends.append((lower_bound(k, grid[-1]), "lower bound", _GREY))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: elements(round(value)))
    axes.grid(color="#e6e6e6")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("ranks, P")
    axes.set_ylabel("elements sent by the busiest rank in one step (4-byte words)")
    axes.set_title(f"What one allreduce sends: n = {elements(n)}, k = {elements(k)}", loc="left", fontsize=12, pad=24)
    axes.text(
        0.0, 1.03, f"markers: measured, lines: formulas{_about_models(rows)}; {source}",
        transform=axes.transAxes, fontsize=9, color="#555555",
    )  # fmt: skip
    _name_lines(axes, ends, sizes[-1])
    figure.savefig(path, bbox_inches="tight")


def _one_reducer(axes: Axes, rows: Sequence[Row], sizes: Sequence[int]) -> tuple[float, str, str]:
    """Where its formula ends, its name and colour."""
    name = str(rows[0]["reducer"])
    color, marker = _STYLES.get(name, (_GREY, "."))
    formula, n, k = describe(name).bound.elements, rows[0]["n"], rows[0]["k"]
    moved = max((int(row["ranks"]) for row in rows if row["how"] == MOVED), default=sizes[0])
    width = 2.2 if name == "oktopk" else 1.2
    for grid, line in ((_grid([sizes[0], moved]), "-"), (_grid([moved, sizes[-1]]), "--")):
        axes.plot(grid, [formula(n, k, size) for size in grid], color=color, linestyle=line, linewidth=width)
    for how, face in ((MOVED, color), (MODEL, "white")):
        points = [(row["ranks"], row["max_elements"]) for row in rows if row["how"] == how]
        axes.plot(
            [x for x, _ in points], [y for _, y in points], color=color, marker=marker, markerfacecolor=face,
            linestyle="none", markersize=7 if name == "oktopk" else 6, zorder=3,
        )  # fmt: skip
    return formula(n, k, sizes[-1]), name, color


def _name_lines(axes: Axes, ends: list[tuple[float, str, str]], right: int) -> None:
    """Each formula's name at its end, moved up where two would lie on each other."""
    low, high = (math.log(limit) for limit in axes.get_ylim())
    lowest = -1.0
    for y, name, color in sorted(ends):
        place = max((math.log(y) - low) / (high - low), lowest + _LEAST_GAP)
        lowest = place
        axes.annotate(
            name, (right, math.exp(low + place * (high - low))), xytext=(12, 0), textcoords="offset points",
            color=color, va="center", fontsize=9.5, annotation_clip=False,
            fontweight="bold" if name == "oktopk" else "normal",
        )  # fmt: skip


def _grid(sizes: Sequence[int]) -> list[int]:
    """Numbers of ranks from the first to the last, close enough for a smooth line."""
    first, last = sizes[0], sizes[-1]
    steps = max(1, math.ceil(_POINTS_PER_DOUBLING * math.log2(last / first)))
    return sorted({round(first * (last / first) ** (step / steps)) for step in range(steps + 1)})


def _names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(str(row["reducer"]) for row in rows))


def _about_models(rows: Sequence[Row]) -> str:
    return ", hollow and dashed: by model" if any(row["how"] == MODEL for row in rows) else ""
