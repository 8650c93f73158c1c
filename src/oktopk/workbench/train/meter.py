"""What an epoch took and gave: seconds by stage, losses, bytes, metrics."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from oktopk.metrics.step_stats import StepStats
from oktopk.metrics.trainer_lists import mean_or_none
from oktopk.workbench.recording.profile import Profiler
from oktopk.workbench.recording.stages import LOOP_STAGES, REDUCTION_STAGES
from oktopk.workbench.train.runlog import TRAFFIC, stats_record

if TYPE_CHECKING:
    from oktopk.workbench.train.trainer import Trainer


class EpochMeter:
    """Adds up an epoch: seconds, losses, bytes."""

    def __init__(self, trainer: Trainer, profiler: Profiler) -> None:
        self._trainer = trainer
        self._profiler = profiler
        self._first_metric = len(trainer.sparsities)
        self._start = time.monotonic()
        self._seconds: dict[str, float] = dict.fromkeys(LOOP_STAGES, 0.0)
        self._moved: dict[str, int] = dict.fromkeys(TRAFFIC, 0)
        self._reducing: dict[str, float] = dict.fromkeys(REDUCTION_STAGES, 0.0)
        self._last: dict[str, float] = dict(self._seconds)
        self._num_steps = 0
        self.losses: list[float] = []

    @contextlib.contextmanager
    def time(self, stage: str) -> Generator[None]:
        start = time.monotonic()
        with self._profiler.stage(stage):
            yield
        self._seconds[stage] += time.monotonic() - start

    def record_step(self, loss: float, told: list[StepStats]) -> dict[str, Any]:
        """The line of metrics.jsonl."""
        trainer, position = self._trainer, self._trainer.position
        skipped = any(stats.skipped for stats in told)
        if not skipped:
            self.losses.append(loss)
        seconds = {stage: total - self._last[stage] for stage, total in self._seconds.items()}
        self._last = dict(self._seconds)
        self._num_steps += 1
        for stats in told:
            for key in TRAFFIC:
                self._moved[key] += getattr(stats, key)
            for stage, value in stats.seconds.items():
                self._reducing[stage] += value
        sent = sum(stats.bytes_sent for stats in told)
        if position.bytes_sent is not None:
            position.bytes_sent += sent
        return {
            "step": position.step,
            "epoch": position.epoch,
            "time_s": trainer.elapsed_s(),
            "phase": _phase(told),
            "loss": None if skipped else loss,
            "lr": trainer.optimizer.param_groups[0]["lr"],
            "skipped": skipped,
            "sparsity": None if skipped else _whole_sparsity(told),
            "bytes_sent": sent,
            "samples": trainer.samples_per_step,
            "seconds": seconds,
            "buckets": [stats_record(stats) for stats in told],
        }

    def summary(self, loss: float | None) -> dict[str, Any]:
        """The row of epochs.csv."""
        trainer, first = self._trainer, self._first_metric
        elapsed = time.monotonic() - self._start
        memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return {
            "epoch": trainer.position.epoch,
            "step": trainer.position.step,
            "time_s": trainer.elapsed_s(),
            "steps": self._num_steps,
            "loss": loss,
            "lr": trainer.optimizer.param_groups[0]["lr"],
            "sparsity": mean_or_none(trainer.sparsities[first:]),
            "compression_ratio": mean_or_none(trainer.compression_ratios[first:]),
            "communication_size": mean_or_none(trainer.communication_sizes[first:]),
            "bytes_sent": self._moved["bytes_sent"],
            "sent_of_dense": trainer.sent_of_dense(),
            **{f"{stage}_s": total for stage, total in self._seconds.items()},
            "communication_s": self._reducing["exchange"],
            "samples_per_s": self._num_steps * trainer.samples_per_step / elapsed,
            "memory_mb": memory_mb,
        }

    def of_this_worker(self) -> list[float]:
        """By RANK_COLUMNS, from `steps` on."""
        return [self._num_steps, *self._moved.values(), *self._seconds.values(), *self._reducing.values()]


def _phase(told: list[StepStats]) -> str:
    """Of the whole step; `local` where nothing was exchanged."""
    if not told:
        return "local"
    return "sparse" if any(stats.phase == "sparse" for stats in told) else "dense"


def _whole_sparsity(told: list[StepStats]) -> float | None:
    """Of all buckets together."""
    n = sum(stats.n for stats in told)
    applied = sum(stats.n if stats.phase == "dense" else stats.global_count for stats in told)
    return 1.0 - applied / n if n else None
