"""A whole training run as a job of a world's workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from oktopk.registry import make_communicator
from oktopk.workbench.bench.options import Options
from oktopk.workbench.console.tables import figure
from oktopk.workbench.console.words import UsageError
from oktopk.workbench.train.config import make_config
from oktopk.workbench.train.main import train
from oktopk.workbench.train.show import Silent
from oktopk.workbench.train.trainer import TrainingStopped
from oktopk.workbench.worlds import membership as launch
from oktopk.workbench.worlds.jobs import Job, Station, Tell
from oktopk.workbench.worlds.membership import Member, choose_device

if TYPE_CHECKING:
    from oktopk.workbench.train.trainer import Trainer

FINISHED, DIVERGED = "finished", "diverged"


def measure(station: Station, options: Options, job: Job, tell: Tell) -> str:
    """Train by `job["config"]`; how it ended. UsageError where the task does not validate `job["metric"]`."""
    among = launch.Place("study", station.rank, station.size, station.rank, station.size)
    comm = make_communicator("torch", options.timeout_s)
    try:
        train(make_config(job["config"]), Member(among, comm, choose_device(options.device, among)), _Told(job, tell))
    except TrainingStopped:  # on all workers in the same step: they can go on with another run
        return DIVERGED
    finally:
        comm.close()
    return FINISHED


class _Told(Silent):
    """Says every epoch."""

    def __init__(self, job: Job, tell: Tell) -> None:
        self._metric: str = job["metric"]
        self._tell = tell
        self._num_epochs = 0

    def plan(self, trainer: Trainer) -> None:
        super().plan(trainer)
        if self._metric not in trainer.metrics:
            known = ", ".join(trainer.metrics)
            raise UsageError(f"metric={self._metric!r}: {trainer.config.task} has none of that name; it has {known}")
        self._num_epochs = -(-trainer.num_steps // trainer.steps_per_epoch)

    def epoch_done(self, record: Mapping[str, Any], metrics: Mapping[str, str]) -> None:
        found = ", ".join(f"{key} {figure(record[key])}" for key in metrics if key in record)
        self._tell(f"epoch {record['epoch'] + 1} of {self._num_epochs}: {found or 'loss ' + figure(record['loss'])}")
