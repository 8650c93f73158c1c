"""Pictures of what was chosen: sparsity, elements against k, thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from oktopk.workbench.console.tables import elements
from oktopk.workbench.report import draw
from oktopk.workbench.report.axis import finish, moved, places
from oktopk.workbench.report.draw import BLUE, GREEN, INK, Absent, Drawing
from oktopk.workbench.report.run import Run, Step
from oktopk.workbench.report.summary import share, thousands

_MOST_BUCKETS = 6
_NO_SPARSE = "No step was sparse."


def sparsity(run: Run) -> Drawing | Absent:
    name, title = "sparsity", "Sparsity over steps"
    points = [(step, step.sparsity) for step in run.steps if step.sparsity is not None]
    if not points:
        return Absent(name, title, "No step has a sparsity.")
    figure, (axes,) = draw.panels(title)
    draw.line(axes, places([step for step, _ in points]), [y for _, y in points], "sparsity", color=BLUE, marker="o")
    axes.set_ylabel("part not applied")
    axes.set_ylim(-0.03, 1.05)
    finish(axes, run)
    found = [value for step, value in points if step.phase == "sparse"]
    caption = "All exchanges were dense: every element was applied."
    if all(step.phase == "dense" for step in run.steps):
        caption = "All steps were dense: every element of the gradient was applied."
    if found:
        caption = (
            f"In {len(found):,} sparse step{'s' * (len(found) > 1)} {sum(found) / len(found):.2%} of the gradient was "
            f"left for later on average, from {min(found):.2%} to {max(found):.2%}."
        )
    return Drawing(name, title, caption, figure)


def counts(run: Run) -> Drawing | Absent:
    name, title = "chosen-and-applied", "Elements chosen and applied, against k"
    steps = run.taken("sparse")
    if not steps:
        return Absent(name, title, _NO_SPARSE)
    figure, (axes,) = draw.panels(title)
    means: dict[str, float] = {}
    highest = 1
    for key, label, look in (
        ("local_count", "chosen, first worker", {"color": GREEN, "marker": "o"}),
        ("global_count", "applied", {"color": BLUE, "marker": "s", "linestyle": "--"}),
        ("k", "k", {"color": INK, "linestyle": ":"}),
    ):
        sums = [sum(getattr(bucket, key) for bucket in step.buckets if bucket.phase == "sparse") for step in steps]
        draw.line(axes, places(steps), sums, label, **look)
        means[key] = sum(sums) / len(sums)
        highest = max(highest, *sums)
    axes.set_ylabel("elements")
    draw.formatted(axes.yaxis, lambda value: elements(round(value)))
    axes.set_ylim(0, 1.15 * highest)
    axes.set_xlim(*_all_steps(run))
    finish(axes, run)
    draw.legend(figure, axes)
    k, chosen, applied = means["k"], means["local_count"], means["global_count"]
    of_k = [f" ({share(each / k)} of k)" if k else "" for each in (chosen, applied)]
    caption = (
        f"In a sparse step k is {thousands(k)} on average; the first worker chose {thousands(chosen)}{of_k[0]}, and "
        f"{thousands(applied)}{of_k[1]} were applied."
    )
    return Drawing(name, title, caption, figure)


def thresholds(run: Run) -> Drawing | Absent:
    """A line for each bucket, or the median and the range of many."""
    name, title = "thresholds", "Thresholds over steps"
    steps = run.taken("sparse")
    by_side = {side: _series(steps, f"{side}_threshold") for side in ("local", "global")}
    by_side = {side: series for side, series in by_side.items() if series}
    if not by_side:
        return Absent(name, title, "This reducer has no thresholds." if steps else _NO_SPARSE)
    figure, grid = draw.panels(title, len(by_side), 2.2 + 1.3 * len(by_side))
    buckets = list(dict.fromkeys(bucket for series in by_side.values() for bucket in series))
    said: list[str] = []
    for axes, (side, series) in zip(grid, by_side.items(), strict=True):
        xs, known = _known(places(steps), series)
        medians = np.nanmedian(known, axis=0)
        if len(buckets) <= _MOST_BUCKETS:
            for bucket, values in series.items():
                label = draw.shorten(bucket, 44) or "the gradient"
                draw.line(axes, places(steps), values, label, **draw.style(buckets.index(bucket)))
        else:
            _median_and_range(axes, xs, known)
        axes.set_ylabel(side)
        draw.log_where_it_helps(axes, [value for values in series.values() for value in values])
        axes.set_xlim(*_all_steps(run))
        finish(axes, run, say_border=False)
        axes.label_outer()
        said.append(f"the {side} threshold {moved(float(medians[0]), float(medians[-1]))}")
    draw.legend(figure, grid[0])
    of = f" (median of {len(buckets)} buckets)" if len(buckets) > 1 else ""
    return Drawing(name, title, f"From the first sparse step to the last, {' and '.join(said)}{of}.", figure)


_Array = np.ndarray[Any, np.dtype[np.float64]]
_Series = dict[str, list[float | None]]
"""By bucket, a value or None for each step."""


def _series(steps: Sequence[Step], key: str) -> _Series:
    found: _Series = {}
    for place, step in enumerate(steps):
        for bucket in step.buckets:
            value = getattr(bucket, key)
            if value is not None:
                found.setdefault(bucket.name, [None] * len(steps))[place] = value
    return found


def _known(xs: Sequence[float], series: _Series) -> tuple[_Array, _Array]:
    """The steps for which any bucket has a value, and a row for each bucket, NaN where it has none."""
    values = np.array([[np.nan if y is None else y for y in each] for each in series.values()], dtype=float)
    there = np.flatnonzero(~np.isnan(values).all(axis=0))
    return np.asarray(xs, dtype=float)[there], values[:, there]


def _median_and_range(axes: Axes, xs: _Array, values: _Array) -> None:
    low, high = np.nanmin(values, axis=0), np.nanmax(values, axis=0)
    draw.band(axes, xs, low, high, color=BLUE, alpha=0.2, label=f"range of {len(values)} buckets")
    draw.line(axes, list(xs), list(np.nanmedian(values, axis=0)), "median", color=BLUE)


def _all_steps(run: Run) -> tuple[float, float]:
    """The dense steps too: the border is to be seen."""
    first, last = run.steps[0].step, run.steps[-1].step
    edge = 0.03 * max(1, last - first)
    return first - edge, last + edge
