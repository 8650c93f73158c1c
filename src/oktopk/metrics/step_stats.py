"""What one reduction did and cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from oktopk.reduce.base import Phase


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """What one reduction of one bucket did and cost, on this rank.

    Attributes:
        step: The step, counted from 0.
        bucket: Its first and last parameter.
        phase: `dense` or `sparse`.
        n: Elements in the bucket.
        k: Elements wanted; n in a dense step.
        local_count: Elements that this rank chose.
        global_count: Elements that were applied.
        local_threshold: The magnitude from which on this rank chose.
        global_threshold: The magnitude from which on sums were applied.
        bytes_sent: Bytes that left this rank, headers and agreements included; likewise the other three.
        seconds: Wall-clock seconds by stage, see `oktopk.metrics.meter.STAGES`; together the time of the reduction.
        skipped: The step was skipped on all ranks; nothing was applied.
        unused: Parameters that no rank had a gradient for; nothing was applied to them.
        refreshed: The mean gradient was exchanged beside a sparse update; the bytes hold both.
    """

    step: int
    bucket: str
    phase: Phase
    n: int
    k: int
    local_count: int
    global_count: int
    local_threshold: float | None = None
    global_threshold: float | None = None
    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    skipped: bool = False
    unused: tuple[str, ...] = ()
    refreshed: bool = False

    @property
    def sparsity(self) -> float:
        return 0.0 if self.phase == "dense" else 1.0 - self.global_count / self.n

    @property
    def compression_ratio(self) -> float:
        """n / count; where nothing was applied, n (as for one element), so that means stay finite."""
        return 1.0 if self.phase == "dense" else self.n / max(1, self.global_count)

    @property
    def communication_size(self) -> int:
        """Bytes by the users' definition: 4 for each dense element, 8 for each sparse one that was applied."""
        sparse = 0 if self.phase == "dense" else 8 * self.global_count
        return sparse + (4 * self.n if self.phase == "dense" or self.refreshed else 0)
