"""The loop: epochs of steps over DistributedOptimizer, measured, logged, saved."""

from __future__ import annotations

import datetime
import json
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from oktopk.adapters.grouping import make_groups
from oktopk.adapters.local_steps import LocalSteps
from oktopk.checks.finite import NonFiniteGradientError
from oktopk.metrics.step_stats import StepStats
from oktopk.schedule import Outline
from oktopk.settings import DensitySchedule
from oktopk.workbench.recording.gradients import GradientRecorder
from oktopk.workbench.recording.profile import Profiler
from oktopk.workbench.report.summary import ring_bytes
from oktopk.workbench.train import checkpoint
from oktopk.workbench.train.auto import AUTO, Auto
from oktopk.workbench.train.averaging import averaged_buffers
from oktopk.workbench.train.budget import Budget, expect
from oktopk.workbench.train.config import TrainConfig
from oktopk.workbench.train.meter import EpochMeter
from oktopk.workbench.train.optimizers import TrainOptimizer, agreed_parameters, make_optimizer
from oktopk.workbench.train.runlog import FolderLog, NullLog, RunLog
from oktopk.workbench.train.schedule import density_ramp, learning_rate
from oktopk.workbench.train.show import Display
from oktopk.workbench.train.tasks.base import Workload
from oktopk.workbench.worlds.membership import Member

logger = logging.getLogger("oktopk")


class TrainingStopped(RuntimeError):
    """Training went wrong on all workers in the same step; the message says where, and what to try."""


@dataclass
class Position:
    """How far training is."""

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    time_s: float = 0.0
    """Of training in earlier runs that this one resumes."""
    bytes_sent: int | None = 0
    """By this worker since step 0, resumed parts included; None where an old checkpoint does not say."""


class Trainer:
    """`sparsities`, `compression_ratios` and `communication_sizes` fill up, one entry for each bucket and step."""

    def __init__(
        self, config: TrainConfig, member: Member, workload: Workload, display: Display, profiler: Profiler
    ) -> None:
        self.sparsities: list[float] = []
        self.compression_ratios: list[float] = []
        self.communication_sizes: list[float] = []
        self.config = config
        self._member = member
        self._workload = workload
        self._display = display
        self._profiler = profiler
        self._model = workload.model
        self._told: list[StepStats] = []
        self.position = Position()
        self.auto = self._decide() if config.reducer == AUTO else None
        self.optimizer = self._make_optimizer()
        self.steps_per_epoch = max(1, workload.num_batches // config.nsteps_update)
        whole = config.epochs * self.steps_per_epoch
        self.num_steps = min(whole, config.max_steps) if config.max_steps else whole
        self._checkpoints = config.run_folder / "checkpoints"
        self._remarked: set[str] = set()
        self._start = time.monotonic()
        profiler.step = lambda: self.position.step

    @property
    def metrics(self) -> Mapping[str, str]:
        """What is validated beside the loss, by the names that people know."""
        return self._workload.metrics

    @property
    def density(self) -> float:
        return self.auto.density if self.auto else self.config.density

    def outline(self) -> Outline:
        return self.optimizer.allreducer.outline(self.num_steps)

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self._model.parameters())

    @property
    def samples_per_step(self) -> int:
        """Over all workers."""
        return self.config.batch_size * self.config.nsteps_update * self._member.place.size

    def elapsed_s(self) -> float:
        """Since training began, resumed parts added up."""
        return self.position.time_s + time.monotonic() - self._start

    def sent_of_dense(self) -> float | None:
        """What this worker sent so far, as a part of what dense fp32 training sends; None where that is nothing."""
        position = self.position
        dense = position.step * ring_bytes(self.num_parameters, self._member.place.size)
        return None if position.bytes_sent is None or not dense else position.bytes_sent / dense

    def budget(self) -> Budget | None:
        """What the whole run will send; None for one worker."""
        allreducer = self.optimizer.allreducer
        return expect(self.config, self._model, allreducer, self.num_steps) if allreducer.comm.size > 1 else None

    # --- the run

    def run(self) -> dict[str, Any]:
        """Train to the end; returns the last epoch's record. Raises TrainingStopped for NaN, on all workers."""
        if self.config.pretrain:
            self._load_weights(Path(self.config.pretrain))
        if self.config.resume:
            self._resume()
        self._display.plan(self)
        self._record_gradients()
        log = self._open_log()
        self._start = time.monotonic()
        record: dict[str, Any] = {}
        try:
            while self.position.step < self.num_steps:
                record = self._epoch(log)
            log.about(status="finished")
            return record
        except BaseException as error:
            log.about(status="failed", reason=str(error) or type(error).__name__)
            raise
        finally:
            log.close()
            self.optimizer.close()

    def _epoch(self, log: RunLog) -> dict[str, Any]:
        position, meter = self.position, EpochMeter(self, self._profiler)
        last = min(self.steps_per_epoch, position.step_in_epoch + self.num_steps - position.step)
        batches = self._workload.batches(position.epoch, position.step_in_epoch * self.config.nsteps_update)
        with self._display.epoch(position.epoch, last - position.step_in_epoch) as progress:
            for _ in range(position.step_in_epoch, last):
                self._set_learning_rate()
                record = self._step(batches, meter)
                log.step(record)
                self._look_again(record, log)
                progress(record)
                position.step += 1
                position.step_in_epoch += 1
        if isinstance(self.optimizer, LocalSteps):  # the workers are about to exchange figures
            self.optimizer.wait()
        finished = position.step_in_epoch == self.steps_per_epoch
        done = position.step == self.num_steps
        record = meter.summary(self._mean_over_workers(meter.losses))
        if done or (position.epoch + 1) % self.config.validate_every == 0:
            agreed = agreed_parameters(self.optimizer)
            with self._profiler.stage("validate"), averaged_buffers(self._model, self._member), agreed:
                record.update(
                    {f"val_{key}" if key == "loss" else key: v for key, v in self._workload.validate().items()}
                )
        self._say_remarks()
        log.epoch(record, self._of_all_workers(meter.of_this_worker()))
        self._display.epoch_done(record, self._workload.metrics)
        if finished:
            position.epoch, position.step_in_epoch = position.epoch + 1, 0
        every = self.config.checkpoint_every
        if every >= 0 and (done or (every and position.epoch % every == 0)):
            self._save()
        return record

    def _step(self, batches: Iterator[Any], meter: EpochMeter) -> dict[str, Any]:
        parts = self.config.nsteps_update
        total = 0.0
        self.optimizer.zero_grad()
        for part in range(parts):
            with meter.time("io"):
                batch = next(batches)
            if not isinstance(self.optimizer, LocalSteps):  # these add up by themselves
                self.optimizer.local = part < parts - 1
            with meter.time("forward"):
                loss = self._workload.loss(batch) / parts
                value = float(loss.detach())
            with meter.time("backward"):
                # a loss that is not finite must reach the check of the gradients, whatever its own gradient is
                (loss if value - value == 0.0 else loss * float("nan")).backward()
                if self._member.device.type == "cuda":  # else the GPU's part of it would count as waiting
                    torch.cuda.synchronize(self._member.device)
            total += value
        try:
            with meter.time("wait"):
                self.optimizer.step()
                if isinstance(self.optimizer, LocalSteps) and self.position.step + 1 == self.num_steps:
                    self.optimizer.synchronize()
        except NonFiniteGradientError as error:
            raise TrainingStopped(self._why_stopped(total, error)) from error
        told = list(self._told)
        del self._told[: len(told)]  # an exchange that is under way may be told of meanwhile
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

    def _decide(self) -> Auto:
        if self.config.resume:
            return Auto.of_run(self.config.run_folder)
        named = list(self._model.named_parameters())
        groups = make_groups(named, self.config.bucket_cap_mb, self.config.dense_vectors)
        sizes = [group.layout.numel for group in groups if not group.dense]
        return Auto.decide(self.config, self._member, sizes)

    def _look_again(self, record: dict[str, Any], log: RunLog) -> None:
        if self.auto is None:
            return
        answer = self.auto.after_step(record, self.optimizer.allreducer, self._member.comm)
        if answer:
            self._display.note(f"auto, step {record['step']}: {answer}")
            log.about(auto=self.auto.as_dict(), **self._in_use())

    def _in_use(self) -> dict[str, Any]:
        outline = self.outline()
        reducer = self.optimizer.allreducer.reducer if outline.sparse_steps else "dense"
        return {"reducer": reducer, "dense_steps": len(outline.dense_steps)}

    def _make_optimizer(self) -> TrainOptimizer:
        config = self.config
        density: float | DensitySchedule = self.density
        if config.density_ramp_steps:
            density = density_ramp(self.density, config.warmup_steps, config.density_ramp_steps)
        reducer = self.auto.reducer if self.auto else config.reducer
        comm = self._member.comm
        optimizer = make_optimizer(config, self._model, reducer=reducer, density=density, comm=comm, trainer=self)
        if self.auto and not self.auto.compresses:
            optimizer.allreducer.compress_from(None)
        optimizer.add_listener(self._told.append)
        return optimizer

    def _set_learning_rate(self) -> None:
        position = self.position
        num_epochs = self.num_steps / self.steps_per_epoch
        rate = learning_rate(self.config, position.epoch, position.step_in_epoch / self.steps_per_epoch, num_epochs)
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def _mean_over_workers(self, losses: list[float]) -> float | None:
        sums = torch.tensor([sum(losses), float(len(losses))], dtype=torch.float64, device=self._member.device)
        self._member.comm.all_reduce(sums)
        return float(sums[0] / sums[1]) if float(sums[1]) else None

    def _of_all_workers(self, figures: list[float]) -> list[list[float]]:
        place = self._member.place
        all_figures = torch.zeros(place.size, len(figures), dtype=torch.float64, device=self._member.device)
        all_figures[place.rank] = torch.tensor(figures, dtype=torch.float64)
        self._member.comm.all_reduce(all_figures)
        return cast("list[list[float]]", all_figures.tolist())

    def _record_gradients(self) -> None:
        if self.config.record_gradients:
            sparse = self.outline().sparse_steps
            first = sparse.start if sparse else self.position.step
            folder = self.config.run_folder / "gradients" / f"rank_{self._member.place.rank}"
            steps = range(first, first + self.config.record_gradients)
            self.optimizer.allreducer.watch(GradientRecorder(folder, steps))

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
        columns = tuple(self._workload.metrics)
        log = FolderLog(self.config.run_folder, self.config.as_dict(), columns, position.step, position.epoch)
        log.about(
            started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            task=self.config.task,
            num_parameters=self.num_parameters,
            workers=self._member.place.size,
            num_steps=self.num_steps,
            steps_per_epoch=self.steps_per_epoch,
            density=self.density,
            **self._in_use(),
            auto=self.auto.as_dict() if self.auto else None,
        )
        return log

    # --- checkpoints

    @property
    def fingerprint(self) -> str:
        """What a checkpoint must share with the run: the task and its parameters' shapes."""
        shapes = [tuple(p.shape) for p in self._model.parameters()]
        return f"{self.config.task}, {self.num_parameters} parameters in {len(shapes)} tensors"

    def _save(self) -> None:
        own: dict[str, Any] = {
            "buffers": {name: buffer.clone() for name, buffer in self._model.named_buffers()},
            "rng": torch.get_rng_state(),
            "workload": self._workload.state(),
        }
        if self._member.device.type == "cuda":
            own["cuda_rng"] = torch.cuda.get_rng_state(self._member.device)
        shared: dict[str, Any] = {
            "fingerprint": self.fingerprint,
            "config": json.dumps(self.config.as_dict()),
            "epoch": self.position.epoch,
            "step_in_epoch": self.position.step_in_epoch,
            "time_s": self.elapsed_s(),
        }
        state = self.optimizer.training_state_dict()
        alike = () if isinstance(self.optimizer, LocalSteps) else ("optimizer",)
        for key, part in state.items():
            (shared if key in alike else own)[key] = part
        if self.position.bytes_sent is not None:  # an exchange that was under way has just been taken up
            own["bytes_sent"] = self.position.bytes_sent + sum(stats.bytes_sent for stats in self._told)
        with agreed_parameters(self.optimizer):
            shared["model"] = {name: value.clone() for name, value in self._model.state_dict().items()}
        with self._profiler.stage("checkpoint"):
            path = checkpoint.save(self._checkpoints, self.position.step, shared, own, self._member.comm)
        logger.info("checkpoint %s", path)

    def _resume(self) -> None:
        place = self._member.place
        path = checkpoint.latest(self._checkpoints)
        saved = checkpoint.load(path, place.rank, place.size, self.fingerprint)
        self._model.load_state_dict(saved.shared["model"])
        for name, buffer in self._model.named_buffers():
            buffer.copy_(saved.own["buffers"][name])
        self.optimizer.load_training_state_dict({**saved.shared, **saved.own})
        torch.set_rng_state(saved.own["rng"])
        if self._member.device.type == "cuda" and "cuda_rng" in saved.own:  # older checkpoints have none
            torch.cuda.set_rng_state(saved.own["cuda_rng"], self._member.device)
        self._workload.load_state(saved.own.get("workload", {}))
        shared = saved.shared
        self.position = Position(
            shared["step"],
            shared["epoch"],
            shared["step_in_epoch"],
            float(shared.get("time_s", 0.0)),
            saved.own.get("bytes_sent"),
        )
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
