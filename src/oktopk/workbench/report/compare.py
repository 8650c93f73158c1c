"""Several runs in one picture: loss and metric against steps, time and bytes sent."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

from oktopk.workbench.console.tables import byte_count
from oktopk.workbench.report import draw
from oktopk.workbench.report.axis import STEPS, Scale, TimeScale
from oktopk.workbench.report.draw import Absent, Drawing
from oktopk.workbench.report.run import Epoch, Run, Step
from oktopk.workbench.report.summary import metric_label


class _SentScale(Scale):
    """Bytes that the first worker of a run had sent by then."""

    label = "sent by the first worker"

    def __init__(self, run: Run) -> None:
        self._steps = [step.step for step in run.steps]
        self._sums = [0, *accumulate(step.bytes_sent for step in run.steps)]

    def of_step(self, step: Step) -> float:
        return float(self._sums[bisect_right(self._steps, step.step)])

    def of_epoch(self, epoch: Epoch) -> float | None:
        return None if epoch.step is None else float(self._sums[bisect_right(self._steps, epoch.step - 1)])

    def words(self, place: float) -> str:
        return byte_count(place)


def compare_drawings(runs: Sequence[Run]) -> list[Drawing | Absent]:
    """Within `draw.look()`."""
    time = TimeScale(*runs)
    scales: dict[str, Callable[[Run], Scale]] = {
        "steps": lambda _: STEPS,
        "time": lambda _: time,
        "bytes sent": _SentScale,
    }
    metric = next(iter(dict.fromkeys(name for run in runs for name in run.metric_names)), "val_loss")
    return [
        *(_compare(runs, "loss", over, scale, _losses) for over, scale in scales.items()),
        *(
            _compare(runs, metric, over, scale, lambda run, x: _values(run, x, metric))
            for over, scale in scales.items()
        ),
    ]


_Points = list[tuple[float, float]]


def _losses(run: Run, scale: Scale) -> _Points:
    """Of epochs, over all workers; of steps where no epoch was finished."""
    return _values(run, scale, "loss") or [
        (scale.of_step(step), step.loss) for step in run.steps if step.loss is not None
    ]


def _values(run: Run, scale: Scale, key: str) -> _Points:
    pairs = [(scale.of_epoch(epoch), _value(epoch, key)) for epoch in run.epochs]
    return [(x, y) for x, y in pairs if x is not None and y is not None]


def _value(epoch: Epoch, key: str) -> float | None:
    return epoch.loss if key == "loss" else epoch.val_loss if key == "val_loss" else epoch.metrics.get(key)


def _compare(
    runs: Sequence[Run],
    what: str,
    over: str,
    scale_of: Callable[[Run], Scale],
    points_of: Callable[[Run, Scale], _Points],
) -> Drawing | Absent:
    label = {"loss": "training loss", "val_loss": "validation loss"}.get(what, metric_label(what))
    name, title = f"compare-{what}-over-{over}".replace(" ", "-"), f"All runs: {label} over {over}"
    found = {run.name: points_of(run, scale_of(run)) for run in runs}
    there = {run_name: points for run_name, points in found.items() if points}
    if not there:
        return Absent(name, title, f"No run has a {label}.")
    figure, (axes,) = draw.panels(title, height=3.0 + 0.2 * len(there))
    for index, (run_name, points) in enumerate(there.items()):
        xs, ys = [x for x, _ in points], [y for _, y in points]
        draw.line(axes, xs, ys, draw.shorten(run_name), **draw.style(index))
    axes.set_ylabel(label)
    draw.log_where_it_helps(axes, [y for points in there.values() for _, y in points], ratio=30.0)
    axes.set_xlabel(scale_of(runs[0]).label)
    draw.few_ticks(axes, whole=over == "steps")
    if over == "bytes sent":
        draw.formatted(axes.xaxis, byte_count)
    draw.legend(figure, axes)
    words = scale_of(runs[0]).words
    ends = [f"{points[-1][1]:.4g} at {words(points[-1][0])} in {run_name}" for run_name, points in there.items()]
    return Drawing(name, title, f"At its end the {label} is {'; '.join(ends)}.", figure)
