"""The pictures of one run: what it learnt and where its time went; what it chose and sent is beside this file."""

from __future__ import annotations

from typing import Any

from matplotlib.patches import Patch

from oktopk.workbench.recording.stages import LOOP_STAGES, REDUCTION_STAGES
from oktopk.workbench.report import draw
from oktopk.workbench.report.axis import STEPS, Scale, TimeScale, epoch_points, finish, mark_skipped, moved, places
from oktopk.workbench.report.choosing import counts, sparsity, thresholds
from oktopk.workbench.report.draw import BLUE, GREEN, ORANGE, PURPLE, SKY, SURFACE, VERMILION, Absent, Drawing
from oktopk.workbench.report.run import LOCAL, Run
from oktopk.workbench.report.sending import sent_bytes
from oktopk.workbench.report.summary import metric_label, per_step, phases_of, stage_ms
from oktopk.workbench.report.traffic import messages, rank_bytes, rank_seconds, who_to_whom

_COLOURS = {
    **dict(zip(LOOP_STAGES, (SKY, GREEN, BLUE, ORANGE), strict=True)),
    **dict(zip(REDUCTION_STAGES, (SKY, GREEN, PURPLE, ORANGE, BLUE, VERMILION), strict=True)),
}
_HATCHES = {"loop": "", "reduction": "///"}
"""The two sides have the same colours; stripes tell them apart."""


def run_drawings(run: Run) -> list[Drawing | Absent]:
    """In the order of the page; within `draw.look()`."""
    time = TimeScale(run)
    return [
        loss(run, "steps", STEPS),
        loss(run, "time", time),
        metrics(run, "steps", STEPS),
        metrics(run, "time", time),
        sparsity(run),
        counts(run),
        thresholds(run),
        sent_bytes(run),
        messages(run),
        stages(run),
        rank_bytes(run),
        rank_seconds(run),
        who_to_whom(run),
    ]


def loss(run: Run, over: str, scale: Scale) -> Drawing | Absent:
    name, title = f"loss-over-{over}", f"Training loss over {over}"
    points = [(step, step.loss) for step in run.steps if step.loss is not None]
    if not points:
        return Absent(name, title, "No step has a loss.")
    steps, losses = [step for step, _ in points], [value for _, value in points]
    figure, (axes,) = draw.panels(title)
    draw.line(axes, places(steps, scale), losses, "each step, first worker", color=SKY, marker="o", markersize=3)
    by_epoch = epoch_points(run, scale, [epoch.loss for epoch in run.epochs])
    validation = epoch_points(run, scale, [epoch.val_loss for epoch in run.epochs])
    if by_epoch[0]:
        draw.line(axes, *by_epoch, "epoch, all workers", color=BLUE, marker="s")
    if validation[0]:
        draw.line(axes, *validation, "validation", color=VERMILION, marker="^", linestyle="--")
    axes.set_ylabel("loss")
    draw.log_where_it_helps(axes, [*losses, *by_epoch[1], *validation[1]], ratio=30.0)
    mark_skipped(axes, run, scale)
    finish(axes, run, scale)
    draw.legend(figure, axes)
    caption = f"The loss {moved(losses[0], losses[-1])} at {scale.words(scale.of_step(steps[-1]))}"
    if validation[0]:
        caption += f"; the validation loss is {validation[1][-1]:.4g} at the end"
    return Drawing(name, title, f"{caption}.", figure)


def metrics(run: Run, over: str, scale: Scale) -> Drawing | Absent:
    """A panel for each: metrics of different kinds have no common axis."""
    name, title = f"metrics-over-{over}", f"Validation over {over}"
    series = {
        metric: epoch_points(run, scale, [e.metrics.get(metric) for e in run.epochs]) for metric in run.metric_names
    }
    series = {metric: points for metric, points in series.items() if points[0]}
    if not series:
        return Absent(name, title, "No epoch has a validation metric.")
    figure, grid = draw.panels(title, len(series), 1.6 * (1 + len(series)))
    for index, (axes, (metric, points)) in enumerate(zip(grid, series.items(), strict=True)):
        draw.line(axes, *points, metric, **draw.style(index))
        axes.set_ylabel(metric_label(metric))
        finish(axes, run, scale, say_border=index == 0)
        axes.label_outer()
    said = [f"{metric_label(metric)} {moved(points[1][0], points[1][-1])}" for metric, points in series.items()]
    caption = f"From the first validation to the last, {'; '.join(said)}."
    return Drawing(name, title, caption, figure)


def stages(run: Run) -> Drawing | Absent:
    """Two bars for each phase: the loop, and beside it the reduction, which local steps do not have."""
    name, title = "stages", "Time of a step by stage"
    found = {phase: stage_ms(run, phase) for phase in phases_of(run) if run.taken(phase)}
    if not any(sum(side.values()) for sides in found.values() for side in sides.values()):
        return Absent(name, title, "No step has times.")
    figure, (axes,) = draw.panels(title, height=2.5 + 0.65 * len(found))
    labels: list[str] = []
    for phase, sides in found.items():
        for side, by_stage in sides.items():
            if phase == LOCAL and not by_stage:
                continue
            left = 0.0
            for stage, value in by_stage.items():
                axes.barh(len(labels), value, left=left, **_look(stage, side))
                left += value
            axes.annotate(f" {per_step(left)}", (left, len(labels)), va="center")
            labels.append(f"{phase} {side}")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.14)
    axes.set_xlabel("milliseconds, mean of a step")
    columns = [*(("loop", stage) for stage in LOOP_STAGES), *(("reduction", stage) for stage in REDUCTION_STAGES)]
    handles = [Patch(label=stage, **_look(stage, side)) for side, stage in columns]
    for place in (
        2,
        5,
    ):  # legends fill their columns downwards: the loop has two of two rows, the reduction two of three
        handles.insert(place, Patch(facecolor="none", edgecolor="none", label=""))
    draw.put_legend(figure, handles, [str(handle.get_label()) for handle in handles], columns=4)
    caption = " ".join(_stage_words(phase, sides) for phase, sides in found.items())
    return Drawing(name, title, caption, figure)


def _look(stage: str, side: str) -> dict[str, Any]:
    return {"facecolor": _COLOURS[stage], "edgecolor": SURFACE, "linewidth": 0.6, "hatch": _HATCHES[side]}


def _stage_words(phase: str, sides: dict[str, dict[str, float]]) -> str:
    loop, reduction = sides["loop"], sides["reduction"]
    parts: list[str] = []
    for words, by_stage in ((f"A {phase} step takes", loop), ("the reduction beside it takes", reduction)):
        if by_stage:
            top = max(by_stage, key=by_stage.__getitem__)
            parts.append(
                f"{words} {per_step(sum(by_stage.values()))} ms, the largest part {top} ({per_step(by_stage[top])} ms)"
            )
    return f"{'; '.join(parts)}." if parts else ""
