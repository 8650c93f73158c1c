"""What a step sends, against a dense ring and against what papers say of the reducer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from oktopk.reduce.description import Bound
from oktopk.registry import find
from oktopk.workbench.console.tables import byte_count
from oktopk.workbench.report import draw
from oktopk.workbench.report.axis import finish, places
from oktopk.workbench.report.draw import BLUE, GREEN, INK, VERMILION, Absent, Drawing
from oktopk.workbench.report.run import LOCAL, Run
from oktopk.workbench.report.summary import average, bound_bytes, dense_bytes, least_bytes, share


@dataclass(frozen=True)
class _Limits:
    """Bytes of each sparse step by the bounds."""

    own: list[float]
    own_least: list[float] | None
    least: list[float]


def sent_bytes(run: Run) -> Drawing | Absent:
    name, title, size = "bytes-per-step", "Bytes sent by the first worker in a step", run.workers
    if not run.steps:
        return Absent(name, title, "No step was logged.")
    if size == 1:
        return Absent(name, title, "One worker sends nothing.")
    steps = [step for step in run.steps if step.phase != LOCAL]
    if not steps:
        return Absent(name, title, "All steps were local: nothing was exchanged.")
    figure, (axes,) = draw.panels(title, height=3.6)
    sent = [float(step.bytes_sent) for step in steps]
    draw.line(axes, places(steps), sent, "sent", color=BLUE, marker="o")
    shown = list(sent)
    caption = f"A step sends {byte_count(average(sent))} on average."
    sparse, description = run.taken("sparse"), find(run.reducer or "")
    bound = description.bound if description else None
    if size is not None:
        ring = [dense_bytes(step, size) for step in steps]
        draw.line(axes, places(steps), ring, "dense ring", color=INK, linestyle="--")
        shown += ring
    limits = _limits(run, bound, size) if size and bound and sparse else None
    if limits and bound:
        draw.line(axes, places(sparse), limits.own, f"bound {bound.formula}", color=VERMILION, linestyle="-.")
        draw.line(axes, places(sparse), limits.least, "least 2k(P-1)/P", color=GREEN, linestyle=":")
        if limits.own_least:
            draw.band(axes, places(sparse), limits.own_least, limits.own, color=VERMILION, alpha=0.15)
        shown += [*limits.own, *(limits.own_least or []), *limits.least]
    if size is not None:
        caption = _words(run, size, bound, limits)
    if len(steps) < len(run.steps):
        caption += f" {len(run.steps) - len(steps):,} of {len(run.steps):,} steps are local and send nothing."
    axes.set_ylabel("bytes")
    draw.log_where_it_helps(axes, shown, ratio=5.0)
    draw.formatted(axes.yaxis, byte_count)
    finish(axes, run)
    draw.legend(figure, axes)
    return Drawing(name, title, caption, figure)


def _limits(run: Run, bound: Bound, size: int) -> _Limits:
    steps = run.taken("sparse")

    def by(elements: Callable[[float, float, int], float]) -> list[float]:
        return [bound_bytes(step, size, lambda bucket: elements(bucket.n, bucket.k, size)) for step in steps]

    least = [least_bytes(step, size) for step in steps]
    return _Limits(by(bound.elements), by(bound.least) if bound.least else None, least)


def _words(run: Run, size: int, bound: Bound | None, limits: _Limits | None) -> str:
    phase = "sparse" if run.taken("sparse") else "dense"
    steps = run.taken(phase)
    mean = average(step.bytes_sent for step in steps)
    ring = average(dense_bytes(step, size) for step in steps)
    if mean is None or not ring:
        return "No step sent anything."
    words = f"A {phase} step sends {byte_count(mean)} on average, {share(mean / ring)} of a dense ring"
    own, least = (average(each) for each in (limits.own, limits.least)) if limits else (None, None)
    if bound and own:
        words += f" ({byte_count(ring)}) and {mean / own:.2f} times the bound of {run.reducer}, {bound.formula}"
    if least and mean < least:
        words += "; it lies below the least because bounds count 4 bytes for every value and index, and ours need fewer"
    return f"{words}."
