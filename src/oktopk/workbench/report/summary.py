"""The numbers of a run: what the tables show and what the captions say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from oktopk.metrics.trainer_lists import mean_or_none
from oktopk.reduce.description import lower_bound
from oktopk.registry import describe
from oktopk.workbench.console.tables import byte_count
from oktopk.workbench.recording.stages import LOOP_STAGES, REDUCTION_STAGES
from oktopk.workbench.report.run import LOCAL, Bucket, Run, Step

PHASES = ("dense", "sparse")
"""Of steps that exchange something."""
WORD_BYTES = 4


@dataclass(frozen=True)
class Number:
    """One figure of a table; `key` is its name for programs."""

    key: str
    label: str
    value: float | None
    show: Callable[[float], str] = lambda value: f"{value:.4g}"

    @property
    def shown(self) -> str:
        return "n/a" if self.value is None else self.show(self.value)


def share(value: float) -> str:
    return f"{value:.1%}"


def per_step(value: float) -> str:
    """Milliseconds."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.2f}"


def thousands(value: float) -> str:
    return f"{value:,.0f}"


def average(values: Iterable[float | None]) -> float | None:
    """Of those that exist."""
    return mean_or_none([value for value in values if value is not None])


def quotient(value: float | None, by: float | None) -> float | None:
    """None where it does not exist."""
    return value / by if value is not None and by else None


def phases_of(run: Run) -> tuple[str, ...]:
    """Local steps are named where there are any."""
    return (*PHASES, LOCAL) if run.taken(LOCAL) else PHASES


# --- bytes


def ring_bytes(n: float, workers: int) -> float:
    """What a worker sends in a dense ring all-reduce of n elements."""
    return WORD_BYTES * describe("dense").bound.elements(n, n, workers)


def dense_bytes(step: Step, workers: int) -> float:
    """What this step would have sent, had it been dense."""
    return sum(ring_bytes(bucket.n, workers) for bucket in step.buckets)


def sent_of_dense(run: Run) -> float | None:
    """What the first worker sent in all steps, as a part of what dense fp32 training sends in as many."""
    if run.num_parameters is None or run.workers is None:
        return None
    dense = len(run.steps) * ring_bytes(run.num_parameters, run.workers)
    return quotient(sum(step.bytes_sent for step in run.steps), dense)


def bound_bytes(step: Step, workers: int, of: Callable[[Bucket], float]) -> float:
    """By `of` (elements) for the buckets that were sparse; what stayed dense is counted as a ring."""
    return sum(
        WORD_BYTES * of(bucket) if bucket.phase == "sparse" else ring_bytes(bucket.n, workers)
        for bucket in step.buckets
    )


def least_bytes(step: Step, workers: int) -> float:
    """What any sparse allreduce must send."""
    return bound_bytes(step, workers, lambda bucket: lower_bound(bucket.k, workers))


# --- times


def stage_ms(run: Run, phase: str) -> dict[str, dict[str, float]]:
    """Mean milliseconds a step by stage: of the training `loop`, and of the `reduction` beside it."""
    steps = run.taken(phase)
    sides: dict[str, list[Mapping[str, float]]] = {
        "loop": [step.seconds for step in steps],
        "reduction": [bucket.seconds for step in steps for bucket in step.buckets],
    }
    stages = {"loop": LOOP_STAGES, "reduction": REDUCTION_STAGES}
    return {
        side: {
            stage: 1e3 * sum(each.get(stage, 0.0) for each in sides[side]) / len(steps)
            for stage in stages[side]
            if any(stage in each for each in sides[side])
        }
        for side in sides
    }


def _loop_s(step: Step) -> float:
    return sum(step.seconds.get(stage, 0.0) for stage in LOOP_STAGES)


# --- the tables


def final_numbers(run: Run) -> list[Number]:
    """The table of final figures."""
    losses = [step.loss for step in run.steps if step.loss is not None]
    epoch_losses = [epoch.loss for epoch in run.epochs if epoch.loss is not None]
    validation = [epoch.val_loss for epoch in run.epochs if epoch.val_loss is not None]
    numbers = [
        Number("loss", "training loss, last step (first worker)", losses[-1] if losses else None),
        Number("epoch_loss", "training loss, last epoch (all workers)", epoch_losses[-1] if epoch_losses else None),
        Number("val_loss", "validation loss", validation[-1] if validation else None),
    ]
    for name in run.metric_names:
        values = [epoch.metrics.get(name) for epoch in run.epochs]
        numbers.append(Number(name, metric_label(name), [value for value in values if value is not None][-1]))
    for phase in PHASES:
        numbers.append(Number(f"steps_{phase}", f"{phase} steps", len(run.taken(phase)), thousands))
    local = run.taken(LOCAL)
    if local:
        numbers.append(Number("steps_local", "local steps, which exchange nothing", len(local), thousands))
    skipped = sum(step.skipped for step in run.steps)
    numbers.append(Number("steps_skipped", "skipped steps", skipped, thousands))
    for phase in PHASES:
        numbers += _phase_numbers(run, phase)
    if local:
        numbers.append(_step_ms(local, LOCAL))
    total = sum(step.bytes_sent for step in run.steps) if run.steps else None
    numbers.append(Number("bytes_total", "sent by the first worker in all", total, byte_count))
    numbers.append(Number("sent_of_dense", "sent in all, against dense training", sent_of_dense(run), share))
    rate = quotient(sum(step.samples for step in run.steps), sum(_loop_s(step) for step in run.steps))
    numbers.append(Number("samples_per_s", "samples a second, all workers, without validation", rate))
    return numbers


def metric_label(name: str) -> str:
    return name.upper() if len(name) <= 3 else name.replace("_", " ")


def _phase_numbers(run: Run, phase: str) -> list[Number]:
    steps = run.taken(phase)
    sent = average(step.bytes_sent for step in steps)
    ring = average(dense_bytes(step, run.workers) for step in steps) if run.workers else None
    ratios = [bucket.compression_ratio for step in steps for bucket in step.buckets]
    return [
        Number(f"sparsity_{phase}", f"sparsity, {phase} steps", average(step.sparsity for step in steps)),
        Number(f"compression_ratio_{phase}", f"compression ratio, {phase} steps", average(ratios)),
        Number(f"bytes_{phase}", f"sent in a {phase} step", sent, byte_count),
        Number(f"bytes_{phase}_of_ring", f"sent in a {phase} step, against a dense ring", quotient(sent, ring), share),
        _step_ms(steps, phase),
    ]


def _step_ms(steps: Sequence[Step], phase: str) -> Number:
    mean = average(1e3 * _loop_s(step) for step in steps)
    return Number(f"step_ms_{phase}", f"milliseconds for a {phase} step", mean, per_step)


def stage_numbers(run: Run) -> list[tuple[str, list[Number]]]:
    """Rows of the table of stages: a label, and a number for each phase of `phases_of`."""
    phases = phases_of(run)
    by_phase = {phase: stage_ms(run, phase) for phase in phases}
    rows: list[tuple[str, list[Number]]] = []
    for side, label, stages in (
        ("loop", "training loop", LOOP_STAGES),
        ("reduction", "reduction", REDUCTION_STAGES),
    ):
        for stage in stages:
            found = [by_phase[phase][side].get(stage) for phase in phases]
            rows.append(
                (
                    f"{label}: {stage}",
                    [
                        Number(f"ms_{phase}_{stage}", stage, value, per_step)
                        for phase, value in zip(phases, found, strict=True)
                    ],
                )
            )
    return rows
