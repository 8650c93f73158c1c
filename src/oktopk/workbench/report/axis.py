"""What pictures over steps or over time share: places on the x axis, marks of phases and skipped steps, words."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from matplotlib.axes import Axes

from oktopk.workbench.report.draw import INK, VERMILION, few_ticks
from oktopk.workbench.report.run import LOCAL, Epoch, Run, Step

_MOST_BORDERS = 8


class Scale:
    """Step numbers along the x axis."""

    label = "step"

    def of_step(self, step: Step) -> float:
        return step.step

    def of_epoch(self, epoch: Epoch) -> float | None:
        return epoch.step

    def words(self, place: float) -> str:
        return f"step {place:.0f}"


class TimeScale(Scale):
    """Time of training, in a unit that fits the longest of these runs."""

    def __init__(self, *runs: Run) -> None:
        longest = max((run.steps[-1].time_s for run in runs if run.steps), default=0.0)
        units = (("hours", 3600.0, 7200.0), ("minutes", 60.0, 180.0), ("seconds", 1.0, 0.0))
        self._unit, self._seconds = next((unit, size) for unit, size, least in units if longest >= least)
        self.label = f"{self._unit} of training"

    def of_step(self, step: Step) -> float:
        return step.time_s / self._seconds

    def of_epoch(self, epoch: Epoch) -> float | None:
        return None if epoch.time_s is None else epoch.time_s / self._seconds

    def words(self, place: float) -> str:
        return f"{place:.3g} {self._unit}"


STEPS = Scale()


def places(steps: Sequence[Step], scale: Scale = STEPS) -> list[float]:
    return [scale.of_step(step) for step in steps]


def epoch_points(run: Run, scale: Scale, values: Sequence[float | None]) -> tuple[list[float], list[float]]:
    """Where an epoch's end and its value are both known."""
    found = [
        (place, value)
        for epoch, value in zip(run.epochs, values, strict=True)
        if (place := scale.of_epoch(epoch)) is not None and value is not None
    ]
    return [place for place, _ in found], [value for _, value in found]


def finish(axes: Axes, run: Run, scale: Scale = STEPS, say_border: bool = True) -> None:
    """The x axis, and where dense steps end and sparse ones begin; local steps belong to the exchange they lead to."""
    axes.set_xlabel(scale.label)
    few_ticks(axes, whole=not isinstance(scale, TimeScale))
    found = list(zip(run.steps, _exchanges_ahead(run.steps), strict=True))
    borders = [later for earlier, later in pairwise(found) if earlier[1] != later[1]]
    for index, (step, phase) in enumerate(borders[:_MOST_BORDERS]):
        x = scale.of_step(step)
        axes.axvline(x, color=INK, linestyle=(0, (1, 2)), linewidth=1.2)
        if index == 0 and say_border:
            low, high = axes.get_xlim()
            right = x - low > 0.6 * (high - low)
            axes.annotate(
                f"{phase} from here", (x, 1.0), xycoords=("data", "axes fraction"), va="bottom", fontsize=9,
                ha="right" if right else "left",
            )  # fmt: skip


def _exchanges_ahead(steps: Sequence[Step]) -> list[str]:
    """For each step the phase of the exchange that is its own or comes next; after the last one, that one's."""
    exchanges = [step.phase for step in steps if step.phase != LOCAL]
    ahead = exchanges[-1] if exchanges else LOCAL
    found: list[str] = []
    for step in reversed(steps):
        ahead = ahead if step.phase == LOCAL else step.phase
        found.append(ahead)
    return found[::-1]


def mark_skipped(axes: Axes, run: Run, scale: Scale) -> None:
    """Crosses at the foot: a skipped step has no loss to be drawn at."""
    skipped = places([step for step in run.steps if step.skipped], scale)
    if skipped:
        foot = axes.get_xaxis_transform()
        axes.plot(skipped, [0.03] * len(skipped), "x", color=VERMILION, transform=foot, label="skipped", clip_on=False)


def moved(first: float, last: float) -> str:
    if f"{first:.4g}" == f"{last:.4g}":
        return f"is {last:.4g}"
    return f"{'falls' if last < first else 'rises'} from {first:.4g} to {last:.4g}"
