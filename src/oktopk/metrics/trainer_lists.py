"""The three lists that users of this system know: trainer.sparsities, .compression_ratios, .communication_sizes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from oktopk.metrics.step_stats import StepStats

logger = logging.getLogger("oktopk")


class MetricLists(Protocol):
    """What a trainer must have."""

    sparsities: list[float]
    compression_ratios: list[float]
    communication_sizes: list[float]


class TrainerLists:
    """A listener that appends to the trainer's lists, for every bucket and step of both phases.

    Steps that were skipped applied nothing and are left out. Without a trainer rank 0 says so, once.
    """

    def __init__(self, trainer: MetricLists | None, rank: int = 0) -> None:
        self._trainer = trainer
        self._spoken = rank != 0

    def __call__(self, stats: StepStats) -> None:
        if stats.skipped:
            return
        if self._trainer is not None:
            self._trainer.sparsities.append(stats.sparsity)
            self._trainer.compression_ratios.append(stats.compression_ratio)
            self._trainer.communication_sizes.append(float(stats.communication_size))
        if not self._spoken:
            self._spoken = True
            self._speak(stats)

    def _speak(self, stats: StepStats) -> None:
        if self._trainer is None:
            logger.warning(
                "no trainer is set: sparsity, compression ratio and communication size are not collected "
                "(set_trainer(...) collects them, add_listener(...) sees every step)"
            )
        else:
            logger.debug(
                "first metric tracked: step %d, bucket %s, %s, sparsity %.6f",
                stats.step,
                stats.bucket,
                stats.phase,
                stats.sparsity,
            )


def mean_or_none(values: Sequence[float]) -> float | None:
    """The mean; None, never NaN, where there is nothing to average."""
    return sum(values) / len(values) if values else None


def format_mean(values: Sequence[float], spec: str = ".4f") -> str:
    mean = mean_or_none(values)
    return "n/a" if mean is None else format(mean, spec)
