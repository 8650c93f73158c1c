"""A run as plain values; what is missing is None."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from oktopk.workbench.recording.profile import Header
from oktopk.workbench.report.values import Values

LOCAL = "local"
"""The phase of a step after which nothing was exchanged."""


@dataclass(frozen=True)
class Bucket:
    """One reduction of one step."""

    name: str
    phase: str
    n: int
    k: int
    local_count: int
    global_count: int
    local_threshold: float | None
    global_threshold: float | None
    compression_ratio: float | None
    seconds: Mapping[str, float]
    bytes_sent: int = 0
    bytes_received: int = 0


@dataclass(frozen=True)
class Step:
    """One line of metrics.jsonl."""

    step: int
    epoch: int | None
    phase: str
    time_s: float
    loss: float | None
    sparsity: float | None
    skipped: bool
    samples: int
    bytes_sent: int
    seconds: Mapping[str, float]
    buckets: Sequence[Bucket]


@dataclass(frozen=True)
class Epoch:
    """One row of epochs.csv; `step` and `time_s` are those of its end."""

    epoch: int
    step: int | None
    time_s: float | None
    loss: float | None
    val_loss: float | None
    metrics: Mapping[str, float | None]


@dataclass(frozen=True)
class Profile:
    """One worker's file, without records that no version writes."""

    header: Header
    records: np.ndarray[Any, Any]


@dataclass(frozen=True)
class Run:
    folder: Path
    name: str
    config: Values
    facts: Values
    """run.json; empty where there is none."""
    steps: Sequence[Step]
    epochs: Sequence[Epoch]
    ranks: Mapping[int, Mapping[str, float]]
    """The sums of each worker's rows in ranks.csv."""
    profiles: Sequence[Profile]
    problems: Sequence[str]
    """What could not be read, a sentence each."""
    has_time: bool = True
    """False for runs before `time_s`: times are then sums of the training loop's stages."""
    num_logs: int = 0

    @property
    def workers(self) -> int | None:
        """Of run.json; before it there was a log for each, and `workers` is only what one process may start itself."""
        return self.facts.whole("workers") or self.num_logs or self.config.whole("workers")

    @property
    def reducer(self) -> str | None:
        """Runs of earlier versions called it compressor."""
        return next(
            (name for key in ("reducer", "compressor") if (name := self.facts.text(key) or self.config.text(key))), None
        )

    @property
    def density(self) -> float | None:
        found = self.facts.number("density")
        return self.config.number("density") if found is None else found

    @property
    def num_parameters(self) -> int | None:
        """Of run.json; else what a step exchanged at most."""
        found = self.facts.whole("num_parameters")
        if found is not None or not self.steps:
            return found
        return max(sum(bucket.n for bucket in step.buckets) for step in self.steps)

    @property
    def metric_names(self) -> list[str]:
        """Those that have at least one value."""
        names = dict.fromkeys(name for epoch in self.epochs for name in epoch.metrics)
        return [name for name in names if any(epoch.metrics.get(name) is not None for epoch in self.epochs)]

    def taken(self, phase: str | None = None) -> list[Step]:
        """Steps that were not skipped, of one phase or of all."""
        return [step for step in self.steps if not step.skipped and phase in (None, step.phase)]
