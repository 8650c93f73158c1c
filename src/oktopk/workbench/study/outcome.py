"""What came of one run, read from its folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from oktopk.workbench.bench.train_run import FINISHED
from oktopk.workbench.console.words import UsageError
from oktopk.workbench.report.load import load_run
from oktopk.workbench.report.run import Run as LoadedRun
from oktopk.workbench.study.definition import Run, Study
from oktopk.workbench.study.running import Done


@dataclass(frozen=True)
class Point:
    """A validation."""

    step: int
    value: float
    time_s: float
    """Since training began."""
    bytes_sent: float
    """By the average worker until then."""
    simulated_s: float | None = None
    """How long it would have taken over the study's link."""


@dataclass(frozen=True)
class Outcome:
    variant: str
    seed: int
    status: str
    alone: bool
    """It had the machine to itself: its times mean something."""
    final: float | None
    """None for a run that diverged, or whose last validation gave no number: what it had before does not count."""
    curve: Sequence[Point]
    bytes_sent: float
    """By the average worker, in the whole run."""

    def first_reached(self, study: Study) -> Point | None:
        return next((point for point in self.curve if study.reached(point.value)), None)

    def with_times(self, at_step: Sequence[float]) -> Outcome:
        """`at_step[n]`: seconds after n steps."""
        return replace(
            self, curve=[replace(point, simulated_s=at_step[min(point.step, len(at_step) - 1)]) for point in self.curve]
        )


def load(run: Run, study: Study, done: Done) -> tuple[Outcome, LoadedRun]:
    """With the run that it is of; UsageError where the task has no such metric."""
    found = load_run(run.folder)
    known = {key for epoch in found.epochs for key in epoch.metrics}
    if found.epochs and study.metric not in known:
        has = ", ".join(sorted(known)) or "none"
        raise UsageError(f"metric={study.metric!r}: {run.config.task} has none of that name; it has {has}")
    own = [0, *accumulate(step.bytes_sent for step in found.steps)]
    sent = [sums.get("bytes_sent", 0.0) for sums in found.ranks.values()]

    def after(step: int) -> int:
        """What the first worker had sent then; a log that was cut short ends before its last epoch does."""
        return own[min(step, len(own) - 1)]

    ends = [epoch.step for epoch in found.epochs if epoch.step is not None]
    in_epochs = after(ends[-1]) if ends else 0
    # of the average worker, to the first, whose every step is logged; of the others whole epochs are known
    share = sum(sent) / len(sent) / in_epochs if sent and in_epochs else 1.0
    curve = [
        Point(epoch.step, value, epoch.time_s, share * after(epoch.step))
        for epoch in found.epochs
        if epoch.step is not None
        and epoch.time_s is not None
        and (value := epoch.metrics.get(study.metric)) is not None
    ]
    final = found.epochs[-1].metrics.get(study.metric) if found.epochs and done.status == FINISHED else None
    return Outcome(run.variant, run.seed, done.status, done.alone, final, curve, share * own[-1]), found
