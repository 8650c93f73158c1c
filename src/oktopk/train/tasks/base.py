"""What the loop needs to know of a task."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, its data and what to make of them, on one worker."""

    model: nn.Module
    num_batches: int
    """In each epoch, the same on every worker."""
    batch_size: int
    batches: Callable[[int, int], Iterator[Any]]
    """(epoch, first) -> this worker's batches of that epoch from number `first` on; the same whenever asked."""
    loss: Callable[[Any], Tensor]
    """The mean loss of a batch, finite unless training went wrong."""
    validate: Callable[[], dict[str, float | None]]
    """Figures on held-out data, over all workers and the same on each; None where there is nothing to average."""
    remarks: Callable[[], list[str]]
    """What was left out so far, in words."""
