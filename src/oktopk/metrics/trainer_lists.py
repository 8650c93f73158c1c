"""The three lists that users of the original system know: sparsities, compression ratios, communication sizes."""

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

    Steps that were skipped applied nothing and are left out.
    """

    def __init__(self, trainer: MetricLists, rank: int = 0) -> None:
        self._trainer = trainer
        self._spoken = rank != 0

    def __call__(self, stats: StepStats) -> None:
        if stats.skipped:
            return
        self._trainer.sparsities.append(stats.sparsity)
        self._trainer.compression_ratios.append(stats.compression_ratio)
        self._trainer.communication_sizes.append(float(stats.communication_size))
        if not self._spoken:
            self._spoken = True
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
