"""The pictures of a study: what every variant reached, and on the way there, against bytes and seconds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from oktopk.workbench.console.tables import Row
from oktopk.workbench.study.definition import Study
from oktopk.workbench.study.outcome import Outcome, Point
from oktopk.workbench.study.summary import mean_and_std

# Okabe and Ito's colours, which people with any kind of colour vision can tell apart
_COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_GREY = "#8c8c8c"
_MOST_CURVES = len(_COLOURS)


def draw_finals(study: Study, rows: Sequence[Row], path: Path) -> None:
    """A line for each variant: every run, their mean and deviation, and that of the first variant behind all."""
    figure = Figure(figsize=(8.6, 1.6 + 0.34 * len(rows)), dpi=150, facecolor="white")
    axes = figure.add_subplot()
    mean, std = rows[0]["mean"], rows[0]["std"] or 0.0
    if mean is not None and rows[0]["variant"] == study.baseline:
        axes.axvspan(mean - std, mean + std, color="#000000", alpha=0.08, linewidth=0)
        axes.axvline(mean, color=_GREY, linewidth=1)
    for place, row in enumerate(rows):
        good = row["within"] is not False
        colour = "#0072B2" if good else "#D55E00"
        axes.plot(row["finals"], [place] * len(row["finals"]), ".", color=colour, alpha=0.5)
        if row["mean"] is not None:
            axes.errorbar(row["mean"], place, xerr=row["std"] or 0.0, fmt="o" if good else "X", color=colour, capsize=3)
        if row["diverged"]:
            axes.annotate(
                f"{row['diverged']} diverged", (1.0, place), xycoords=("axes fraction", "data"), ha="right",
                va="center", fontsize=8, color=colour,
            )  # fmt: skip
    axes.set_yticks(range(len(rows)), [row["variant"] for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    better = "higher" if study.higher_is_better else "lower"
    axes.set_xlabel(f"{study.metric} at the end ({better} is better)")
    _title(
        axes,
        f"{study.name}: what each variant reaches",
        f"small: each run; bars: one standard deviation; grey: {study.baseline}; crosses: further behind",
    )
    _save(figure, path)


def draw_curves(study: Study, outcomes: Sequence[Outcome], link: str, path: Path) -> None:
    """Means over seeds of the first variants, against steps, bytes and simulated seconds."""
    figure = Figure(figsize=(12.6, 4.8), dpi=150, facecolor="white")
    ways: tuple[tuple[str, Callable[[Point], float], bool], ...] = (
        ("steps", lambda point: point.step, False),
        ("bytes sent by a worker", lambda point: point.bytes_sent, True),
        (f"simulated seconds at {link}", lambda point: point.simulated_s or math.nan, True),
    )
    kept = [each for each in outcomes if each.final is not None]
    names = [name for name in study.variants if any(each.variant == name for each in kept)]
    for place, (label, across, is_log) in enumerate(ways):
        axes = figure.add_subplot(1, len(ways), place + 1)
        for name, colour in zip(names[:_MOST_CURVES], _COLOURS, strict=False):
            curves = [each.curve for each in kept if each.variant == name]
            whole = min(len(curve) for curve in curves)
            at = list(range(whole))
            xs = [statistics.fmean(across(curve[i]) for curve in curves) for i in at]
            found = [mean_and_std([curve[i].value for curve in curves]) for i in at]
            ys, stds = [mean or 0.0 for mean, _ in found], [std or 0.0 for _, std in found]
            axes.plot(xs, ys, color=colour, linewidth=1.6, label=name)
            low, high = ([y + sign * std for y, std in zip(ys, stds, strict=True)] for sign in (-1, 1))
            axes.fill_between(xs, low, high, color=colour, alpha=0.12, linewidth=0)
        axes.axhline(study.target, color=_GREY, linestyle=":", linewidth=1)
        if is_log:
            axes.set_xscale("log")
            axes.xaxis.set_minor_formatter(NullFormatter())  # they would lie on top of each other
        axes.set_xlabel(label)
        _plain(axes)
        if place == 0 and names:
            axes.set_ylabel(study.metric)
            figure.legend(*axes.get_legend_handles_labels(), loc="lower left", ncols=4, frameon=False, fontsize=8)
    some = f"the first {_MOST_CURVES} of {len(names)} variants, " if len(names) > _MOST_CURVES else ""
    title = f"{study.name}: {some}mean over seeds, one standard deviation shaded, target dotted"
    figure.suptitle(title, x=0.01, ha="left")
    _save(figure, path, below=0.1)


def _title(axes: Axes, title: str, below: str) -> None:
    axes.set_title(title, loc="left", fontsize=12, pad=22)
    axes.text(0.0, 1.0, below, transform=axes.transAxes, fontsize=8.5, color="#555555", va="bottom")
    _plain(axes)


def _plain(axes: Axes) -> None:
    axes.grid(color="#e6e6e6")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _save(figure: Figure, path: Path, below: float = 0.0) -> None:
    """`below`: the part of the height that is kept free for a legend."""
    figure.tight_layout(rect=(0.0, below, 1.0, 1.0))
    temporary = path.with_name(f".{path.name}")
    figure.savefig(str(temporary), format="png", metadata={"Software": None})
    temporary.replace(path)
