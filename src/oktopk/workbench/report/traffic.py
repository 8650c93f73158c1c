"""Pictures of who sends, who waits and to whom: from ranks.csv and from the profiles of all workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from oktopk.workbench.console.tables import byte_count
from oktopk.workbench.recording.profile import NAMES, NOBODY, OPERATIONS
from oktopk.workbench.report import draw
from oktopk.workbench.report.draw import BLUE, GREEN, INK, ORANGE, SURFACE, VERMILION, Absent, Drawing
from oktopk.workbench.report.run import Run
from oktopk.workbench.report.summary import quotient

_ASK_FOR_PROFILE = "Run with --profile to see this."
_ASK_FOR_RANKS = "There is no ranks.csv in this run's folder: it was written by an older version, or ended too early."
_MOST_WRITTEN = 6
_MOST_CELLS = 64 * 64


# --- with --profile


def messages(run: Run) -> Drawing | Absent:
    """How large messages are, a box for each operation: all workers' together."""
    name, title = "message-sizes", "Message sizes by operation"
    if not run.profiles:
        return Absent(name, title, _ASK_FOR_PROFILE)
    sizes = {operation: _sizes(run, code) for code, operation in enumerate(NAMES) if operation in OPERATIONS}
    sizes = {operation: found for operation, found in sizes.items() if found.size}
    if not sizes:
        return Absent(name, title, "No message with anything in it was sent.")
    figure, (axes,) = draw.panels(title, height=1.5 + 0.55 * len(sizes))
    boxes = [_box(found) for found in sizes.values()]
    thin = {"color": INK, "linewidth": 1.2}
    axes.bxp(
        boxes, orientation="horizontal", showfliers=False, patch_artist=True, widths=0.55,
        boxprops={"facecolor": BLUE, "edgecolor": INK}, medianprops={"color": ORANGE, "linewidth": 2.5},
        whiskerprops=thin, capprops=thin,
    )  # fmt: skip
    axes.set_yticks(range(1, len(sizes) + 1), [f"{key}\n{found.size:,} messages" for key, found in sizes.items()])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.minorticks_off()
    draw.formatted(axes.xaxis, byte_count)
    axes.set_xlabel("size of a message (box: middle half, line: all)")
    most = max(sizes, key=lambda key: float(sizes[key].sum()))
    caption = (
        f"{sum(found.size for found in sizes.values()):,} messages; most bytes go by {most}, whose median message is "
        f"{byte_count(float(np.median(sizes[most])))} and whose largest is {byte_count(float(sizes[most].max()))}."
    )
    return Drawing(name, title, caption, figure)


def _box(sizes: np.ndarray[tuple[int], np.dtype[np.float64]]) -> dict[str, Any]:
    low, q1, median, q3, high = np.percentile(sizes, (0, 25, 50, 75, 100))
    return {"whislo": low, "q1": q1, "med": median, "q3": q3, "whishi": high}


def _sizes(run: Run, code: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Of the messages that were sent; where a record holds several, each has the mean."""
    found: list[np.ndarray[tuple[int], np.dtype[np.float64]]] = [np.empty(0)]
    for profile in run.profiles:
        records = profile.records
        mine = records[(records["name"] == code) & (records["messages_sent"] > 0) & (records["bytes_sent"] > 0)]
        each = mine["bytes_sent"].astype(np.float64) / mine["messages_sent"]
        found.append(np.repeat(each, mine["messages_sent"].astype(np.int64)))
    return np.concatenate(found)


def who_to_whom(run: Run) -> Drawing | Absent:
    name, title = "who-to-whom", "Bytes from each worker to each other"
    if not run.profiles:
        return Absent(name, title, _ASK_FOR_PROFILE)
    size = max(profile.header.size for profile in run.profiles)
    moved = np.zeros((size, size))
    unknown = 0
    for profile in run.profiles:
        records = profile.records
        known = records[(records["peer"] >= 0) & (records["peer"] < size)]
        np.add.at(moved[profile.header.rank], known["peer"].astype(np.int64), known["bytes_sent"].astype(np.float64))
        unknown += int(records[records["peer"] == NOBODY]["bytes_sent"].sum())
    others = f"{byte_count(unknown)} more went by collectives whose ways only the library below knows."
    if not moved.any():
        return Absent(name, title, f"No worker sent to a certain other; {others}")
    figure, (axes,) = draw.panels(title, height=4.2)
    shown = np.ma.masked_equal(moved, 0.0)
    mesh = axes.pcolormesh(
        shown, cmap="cividis", edgecolors=SURFACE, linewidth=1.0, rasterized=moved.size > _MOST_CELLS
    )
    mesh.set_clim(0.0, float(moved.max()))
    axes.set_aspect("equal")
    axes.invert_yaxis()
    axes.grid(visible=False)
    for side, label in ((axes.xaxis, "to worker"), (axes.yaxis, "from worker")):
        ranks = np.arange(0, size, max(1, -(-size // 12)))
        side.set_ticks(ranks + 0.5, [str(rank) for rank in ranks])
        side.set_label_text(label)
    if size <= _MOST_WRITTEN:
        _write_cells(axes, moved)
    bar = figure.colorbar(mesh, format=draw.formatter(byte_count))
    if bar.solids is not None:
        bar.solids.set_rasterized(False)  # an SVG without pictures in it
        bar.solids.set_edgecolor("face")
    source, target = divmod(int(moved.argmax()), size)
    caption = f"Most goes from worker {source} to worker {target}: {byte_count(float(moved.max()))}; {others}"
    return Drawing(name, title, caption, figure)


def _write_cells(axes: Axes, moved: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> None:
    bright = 0.5 * float(moved.max())
    for source, target in np.argwhere(moved):
        value = float(moved[source, target])
        colour = "#000000" if value > bright else "#ffffff"
        axes.text(target + 0.5, source + 0.5, byte_count(value), ha="center", va="center", color=colour, fontsize=9)


# --- ranks.csv


def rank_bytes(run: Run) -> Drawing | Absent:
    name, title = "bytes-by-worker", "Bytes by worker"
    if not run.ranks:
        return Absent(name, title, _ASK_FOR_RANKS)
    series = {"sent": _column(run, "bytes_sent"), "received": _column(run, "bytes_received")}
    if not any(map(sum, series.values())):
        return Absent(name, title, "No worker sent anything.")
    sent = series["sent"]
    top = max(range(len(sent)), key=sent.__getitem__)
    times = quotient(sent[top], sum(sent) / len(sent)) or 1.0
    caption = f"No worker sends over 1% more than the mean; the most is {byte_count(sent[top])}."
    if times > 1.01:
        caption = f"Worker {list(run.ranks)[top]} sends most, {byte_count(sent[top])}, {times:.2f} times the mean."
    return _by_rank(name, title, caption, run, series, (BLUE, GREEN), "bytes", byte_count)


def rank_seconds(run: Run) -> Drawing | Absent:
    name, title = "waiting-by-worker", "Seconds of waiting and exchanging by worker"
    if not run.ranks:
        return Absent(name, title, _ASK_FOR_RANKS)
    series = {"wait, training loop": _column(run, "wait_s"), "exchange, beside it": _column(run, "exchange_s")}
    if not any(map(sum, series.values())):
        return Absent(name, title, "No worker waited.")
    wait = series["wait, training loop"]
    ranks = list(run.ranks)
    longest, shortest = (pick(range(len(wait)), key=wait.__getitem__) for pick in (max, min))
    caption = f"Worker {ranks[longest]} waits longest, {wait[longest]:.3g} s"
    if len(wait) > 1:
        caption += f", worker {ranks[shortest]} shortest, {wait[shortest]:.3g} s"
    return _by_rank(
        name, title, f"{caption}.", run, series, (ORANGE, VERMILION), "seconds", lambda value: f"{value:.3g}"
    )


def _column(run: Run, key: str) -> list[float]:
    return [row.get(key, 0.0) for row in run.ranks.values()]


def _by_rank(
    name: str,
    title: str,
    caption: str,
    run: Run,
    series: dict[str, list[float]],
    colours: Sequence[str],
    unit: str,
    show: Callable[[float], str],
) -> Drawing:
    """Bars side by side, stripes on the second of each pair."""
    figure, (axes,) = draw.panels(title)
    for index, ((label, values), colour) in enumerate(zip(series.items(), colours, strict=True)):
        xs = np.array(list(run.ranks)) + 0.4 * (index - 0.5)
        hatch = "///" * index
        axes.bar(xs, values, width=0.4, facecolor=colour, edgecolor=SURFACE, linewidth=0.4, hatch=hatch, label=label)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("worker")
    axes.set_ylabel(unit)
    draw.formatted(axes.yaxis, show)
    draw.legend(figure, axes)
    return Drawing(name, title, caption, figure)
