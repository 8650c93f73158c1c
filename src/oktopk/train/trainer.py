"""The loop: epochs of steps over DistributedOptimizer, measured, logged, saved."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oktopk.allreducer import Plan
from oktopk.distributed_optimizer import DistributedOptimizer
from oktopk.precheck import NonFiniteGradientError
from oktopk.train import checkpoint
from oktopk.train.config import TrainConfig
from oktopk.train.launch import Member
from oktopk.train.meter import EpochMeter
from oktopk.train.runlog import FolderLog, NullLog, RunLog
from oktopk.train.show import Display
from oktopk.train.tasks.base import Workload
from oktopk.types import StepStats

logger = logging.getLogger("oktopk")


class TrainingStopped(RuntimeError):
    """Training went wrong on all workers in the same step; the message says where, and what to try."""


@dataclass
class Position:
    """How far training is."""

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0


class Trainer:
    """`sparsities`, `compression_ratios` and `communication_sizes` fill up, one entry for each bucket and step."""

    def __init__(self, config: TrainConfig, member: Member, workload: Workload, display: Display) -> None:
        self.sparsities: list[float] = []
        self.compression_ratios: list[float] = []
        self.communication_sizes: list[float] = []
        self.config = config
        self._member = member
        self._workload = workload
        self._display = display
        self._model = workload.model
        self._told: list[StepStats] = []
        self.position = Position()
        self.optimizer = self._make_optimizer()
        self.steps_per_epoch = max(1, workload.num_batches // config.nsteps_update)
        whole = config.epochs * self.steps_per_epoch
        self.num_steps = min(whole, config.max_steps) if config.max_steps else whole
        self._checkpoints = config.run_folder / "checkpoints"
        self._remarked: set[str] = set()

    def plan(self) -> Plan:
        return self.optimizer.allreducer.plan(self.num_steps)

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self._model.parameters())

    @property
    def samples_per_step(self) -> int:
        """Over all workers."""
        return self._workload.batch_size * self.config.nsteps_update * self._member.place.size

    # --- the run

    def run(self) -> dict[str, Any]:
        """Train to the end; returns the last epoch's record. Raises TrainingStopped for NaN, on all workers."""
        if self.config.pretrain:
            self._load_weights(Path(self.config.pretrain))
        if self.config.resume:
            self._resume()
        self._display.plan(self)
        log = self._open_log()
        record: dict[str, Any] = {}
        try:
            while self.position.step < self.num_steps:
                record = self._epoch(log)
            return record
        finally:
            log.close()
            self.optimizer.stop()

    def _epoch(self, log: RunLog) -> dict[str, Any]:
        position, meter = self.position, EpochMeter(self)
        self._set_learning_rate()
        last = min(self.steps_per_epoch, position.step_in_epoch + self.num_steps - position.step)
        batches = self._workload.batches(position.epoch, position.step_in_epoch * self.config.nsteps_update)
        with self._display.epoch(position.epoch, last - position.step_in_epoch) as progress:
            for _ in range(position.step_in_epoch, last):
                record = self._step(batches, meter)
                log.step(record)
                progress(record)
                position.step += 1
                position.step_in_epoch += 1
        finished = position.step_in_epoch == self.steps_per_epoch
        done = position.step == self.num_steps
        record = meter.summary(self._mean_over_workers(meter.losses))
        if done or (position.epoch + 1) % self.config.validate_every == 0:
            with averaged_buffers(self._model, self._member):
                record.update(
                    {f"val_{key}" if key == "loss" else key: v for key, v in self._workload.validate().items()}
                )
        self._say_remarks()
        log.epoch(record)
        self._display.epoch_done(record)
        if finished:
            position.epoch, position.step_in_epoch = position.epoch + 1, 0
        if done or (self.config.checkpoint_every and position.epoch % self.config.checkpoint_every == 0):
            self._save()
        return record

    def _step(self, batches: Iterator[Any], meter: EpochMeter) -> dict[str, Any]:
        parts = self.config.nsteps_update
        total = 0.0
        self.optimizer.zero_grad()
        for part in range(parts):
            with meter.time("io"):
                batch = next(batches)
            self.optimizer.local = part < parts - 1
            with meter.time("forward"):
                loss = self._workload.loss(batch) / parts
                value = float(loss.detach())
            with meter.time("backward"):
                # a loss that is not finite must reach the check of the gradients, whatever its own gradient is
                (loss if value - value == 0.0 else loss * float("nan")).backward()
            total += value
        try:
            with meter.time("wait"):
                self.optimizer.step()
        except NonFiniteGradientError as error:
            raise TrainingStopped(self._why_stopped(total, error)) from error
        told, self._told[:] = list(self._told), []
        return meter.record_step(total, told)

    def _why_stopped(self, loss: float, error: NonFiniteGradientError) -> str:
        lr = self.optimizer.param_groups[0]["lr"]
        kept = "no checkpoint was written yet"
        if (self._checkpoints / "latest.json").is_file():
            kept = f"the last good checkpoint is {checkpoint.latest(self._checkpoints)}"
        return (
            f"training stopped at step {self.position.step}, learning rate {lr:g}; this worker has a loss of {loss:g}; "
            f"{error}; {kept}"
        )

    # --- parts

    def _make_optimizer(self) -> DistributedOptimizer:
        config = self.config
        sgd = torch.optim.SGD(
            self._model.parameters(), lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay
        )
        optimizer = DistributedOptimizer(
            sgd,
            self._model.named_parameters(),
            config.compressor,
            comm=self._member.comm,
            trainer=self,
            norm_clip=config.norm_clip or None,
            bucket_cap_mb=config.bucket_cap_mb,
            **config.allreducer_settings(),
        )
        optimizer.add_listener(self._told.append)
        return optimizer

    def _set_learning_rate(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr / self.config.lr_decay**self.position.epoch

    def _mean_over_workers(self, losses: list[float]) -> float | None:
        sums = torch.tensor([sum(losses), float(len(losses))], dtype=torch.float64, device=self._member.device)
        self._member.comm.all_reduce(sums)
        return float(sums[0] / sums[1]) if float(sums[1]) else None

    def _say_remarks(self) -> None:
        for remark in self._workload.remarks():
            kind = remark.lstrip("0123456789 ")[:40]
            if kind not in self._remarked:
                self._remarked.add(kind)
                logger.warning("worker %d: %s", self._member.place.rank, remark)

    def _open_log(self) -> RunLog:
        if not self._member.is_first:
            return NullLog()
        position = self.position
        return FolderLog(self.config.run_folder, self.config.as_dict(), position.step, position.epoch)

    # --- checkpoints

    @property
    def fingerprint(self) -> str:
        """What a checkpoint must share with the run: the task and its parameters' shapes."""
        shapes = [tuple(p.shape) for p in self._model.parameters()]
        return f"{self.config.task}, {self.num_parameters} parameters in {len(shapes)} tensors"

    def _save(self) -> None:
        state = self.optimizer.state_dict()
        own = {
            "allreducer": state.pop("oktopk"),
            "buffers": {name: buffer.clone() for name, buffer in self._model.named_buffers()},
            "rng": torch.get_rng_state(),
        }
        shared = {
            "fingerprint": self.fingerprint,
            "config": json.dumps(self.config.as_dict()),
            "epoch": self.position.epoch,
            "step_in_epoch": self.position.step_in_epoch,
            "model": self._model.state_dict(),
            "optimizer": state,
        }
        path = checkpoint.save(self._checkpoints, self.position.step, shared, own, self._member.comm)
        logger.info("checkpoint %s", path)

    def _resume(self) -> None:
        place = self._member.place
        path = checkpoint.latest(self._checkpoints)
        saved = checkpoint.load(path, place.rank, place.size, self.fingerprint)
        self._model.load_state_dict(saved.shared["model"])
        for name, buffer in self._model.named_buffers():
            buffer.copy_(saved.own["buffers"][name])
        self.optimizer.load_state_dict({**saved.shared["optimizer"], "oktopk": saved.own["allreducer"]})
        torch.set_rng_state(saved.own["rng"])
        self.position = Position(saved.shared["step"], saved.shared["epoch"], saved.shared["step_in_epoch"])
        if self.position.step >= self.num_steps:
            raise checkpoint.CheckpointError(
                f"{path}: is at step {self.position.step}, and this run ends at step {self.num_steps}; "
                "ask for more epochs or steps"
            )

    def _load_weights(self, path: Path) -> None:
        weights = checkpoint.read_weights(path)
        try:
            self._model.load_state_dict(weights)
        except (RuntimeError, AttributeError) as error:
            reason = str(error).strip().splitlines()[-1].strip()
            raise checkpoint.CheckpointError(f"pretrain={str(path)!r}: does not fit this model ({reason})") from error


@contextlib.contextmanager
def averaged_buffers(model: torch.nn.Module, member: Member) -> Generator[None]:
    """Validate with the mean of all workers' batch-norm statistics; each has its own back afterwards."""
    floating = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    own: list[Tensor] = [buffer.clone() for buffer in floating]
    for buffer in floating:
        member.comm.all_reduce(buffer)
        buffer /= member.place.size
    yield
    for buffer, before in zip(floating, own, strict=True):
        buffer.copy_(before)
