"""What the loop needs to know of a task."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from oktopk.workbench.train.config import TrainConfig
from oktopk.workbench.worlds.membership import Member


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, its data and what to make of them, on one worker."""

    model: nn.Module
    num_batches: int
    """In each epoch, the same on every worker."""
    batches: Callable[[int, int], Iterator[Any]]
    """(epoch, first) -> this worker's batches of that epoch from number `first` on; the same whenever asked."""
    loss: Callable[[Any], Tensor]
    """The mean loss of a batch, finite unless training went wrong."""
    validate: Callable[[], dict[str, float | None]]
    """Figures on held-out data, over all workers and the same on each; None where there is nothing to average.

    `loss`, and the metrics named below.
    """
    metrics: Mapping[str, str]
    """What `validate` measures beside the loss, with the name that people know it by."""
    remarks: Callable[[], list[str]]
    """What was left out so far, in words."""
    state: Callable[[], dict[str, Tensor]] = dict[str, Tensor]
    """What training carries from batch to batch beside the model, for a checkpoint; empty at the start of an epoch."""
    load_state: Callable[[Mapping[str, Tensor]], None] = lambda _: None


def data_folder(config: TrainConfig, member: Member, generate: Callable[[Path], None]) -> Path:
    """The user's, or `data` in the run's folder, which the first worker lets `generate` fill."""
    if config.data_dir:
        return Path(config.data_dir)
    folder = config.run_folder / "data"
    if member.is_first:
        generate(folder)
    member.comm.barrier()
    return folder
