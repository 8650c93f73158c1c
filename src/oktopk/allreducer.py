"""AllReducer: warm-up policy, error feedback, a reducer for each bucket, checks and statistics, composed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from oktopk.bucket import Bucket, Slot
from oktopk.checks.conservation import Guard
from oktopk.checks.finite import NonFiniteGradientError, Verdict, agree, largest_safe
from oktopk.comm.base import Communicator
from oktopk.comm.counting import CountingCommunicator, Traffic
from oktopk.feedback.apply import write_mean
from oktopk.feedback.residual import ErrorFeedback, MomentumResidual, Residual
from oktopk.lanes import Lane, Lanes
from oktopk.metrics.step_stats import Phase, StepStats
from oktopk.metrics.stopwatch import StageClock, Stopwatch
from oktopk.metrics.trainer_lists import MetricLists, TrainerLists
from oktopk.reduce.base import Reduction
from oktopk.reduce.dense import Dense
from oktopk.reduce.timing import TimedExchange
from oktopk.registry import (
    ReducerFactory,
    canonical_name,
    make_communicator,
    make_kernels,
    make_selector,
    reducer_factory,
)
from oktopk.schedule import NEVER, Phases, Plan
from oktopk.select.timing import TimedSelector
from oktopk.settings import WIRE_DTYPES, Settings

logger = logging.getLogger("oktopk")
Listener = Callable[[StepStats], None]
Watcher = Callable[[int, Bucket], None]
_FORMAT = 2


class AllReducer:
    """Reduces buckets, step by step. All ranks call `reduce` for the same buckets in the same order, then `end_step`.

    `compressor` is a name from the registry, or a function that makes a Reducer from ReducerSettings. `comm` is
    "auto", "torch", "mpi" or a Communicator. Further settings: see `oktopk.settings.Settings`. Not thread-safe:
    one thread at a time.
    """

    def __init__(
        self,
        compressor: str | ReducerFactory = "oktopk",
        *,
        comm: str | Communicator = "auto",
        trainer: MetricLists | None = None,
        **settings: Any,
    ) -> None:
        if not (isinstance(compressor, str) or callable(compressor)):
            raise ValueError(f"compressor={compressor!r}: must be a name or a function that makes a Reducer")
        self.settings = Settings.of(settings)
        self.compressor = (
            canonical_name(compressor)
            if isinstance(compressor, str)
            else getattr(compressor, "__name__", repr(compressor))
        )
        factory = reducer_factory(compressor) if isinstance(compressor, str) else compressor
        self._kernels = make_kernels(self.settings.selector)
        self._selecting, self._packing = Stopwatch(), Stopwatch()
        selector = TimedSelector(make_selector(self._kernels), self._selecting)
        exchange = TimedExchange(self._kernels, WIRE_DTYPES[self.settings.wire_dtype], self._packing)
        self.comm = CountingCommunicator(
            make_communicator(comm, self.settings.timeout_s) if isinstance(comm, str) else comm
        )
        self._feedback: ErrorFeedback = (
            MomentumResidual(self.settings.momentum_correction, self._kernels)
            if self.settings.momentum_correction
            else Residual(self._kernels)
        )
        self._guard = Guard(self.settings.guard_every)
        self._dense = Dense()
        self._lanes = Lanes(factory, self.settings, selector, exchange, self.comm)
        self._started: dict[tuple[Slot, ...], _Started] = {}
        self._phases = Phases(self.settings, self.compressor)
        self._listeners: list[Listener] = []
        self._watchers: list[Watcher] = []
        self._trainer_lists = TrainerLists(trainer, self.comm.rank)
        self._untold: list[StepStats] = []
        self._closing: list[Callable[[], None]] = []
        self._skipping = False
        self._last_warning: str | None = None
        self.step = 0
        self.num_skipped_steps = 0
        self.last_step_skipped = False

    # --- what users ask for

    def set_trainer(self, trainer: MetricLists) -> None:
        """From now on fill this trainer's lists."""
        self._trainer_lists = TrainerLists(trainer, self.comm.rank)

    def add_listener(self, listener: Listener) -> None:
        """`listener(StepStats)` after every reduction, on the thread that reduces."""
        self._listeners.append(listener)

    def watch(self, watcher: Watcher) -> None:
        """`watcher(step, bucket)` before every reduction, on the thread that reduces: this rank's own gradient.

        To be looked at, not to be kept or changed.
        """
        self._watchers.append(watcher)

    def plan(self, num_steps: int) -> Plan:
        """Which of the steps 0..num_steps-1 will be dense and which sparse; logs a warning once, if there is one."""
        plan = self._phases.plan(num_steps)
        if plan.warning and plan.warning != self._last_warning:
            logger.warning(plan.warning)
        self._last_warning = plan.warning
        return plan

    def compress_from(self, step: int | None) -> None:
        """From this step on steps are sparse, whatever `warmup_steps` says; None: none is, until this is called again.

        To be called between two steps, on all ranks alike. A dense step applies all that is owed.
        """
        self._phases.decided_first_sparse_step = NEVER if step is None else step

    def state_dict(self) -> dict[str, Any]:
        """This rank's own state, of tensors and plain values only: residuals, thresholds, regions, step."""
        return {
            "format": _FORMAT,
            "compressor": self.compressor,
            "rank": self.comm.rank,
            "size": self.comm.size,
            "step": self.step,
            "num_skipped_steps": self.num_skipped_steps,
            "compress_from": self._phases.decided_first_sparse_step,
            "feedback": self._feedback.state_dict(),
            "reducers": self._lanes.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; ValueError for the state of another rank, world or compressor.

        Residuals follow the parameters whatever the buckets are. Thresholds and regions belong to a bucket's layout:
        a bucket with another layout starts by finding its own.
        """
        mine = {"format": _FORMAT, "compressor": self.compressor, "rank": self.comm.rank, "size": self.comm.size}
        for key, expected in mine.items():
            if state.get(key) != expected:
                raise ValueError(f"saved state has {key}={state.get(key)!r}, this AllReducer has {expected!r}")
        self._feedback.load_state_dict(state["feedback"])
        self._lanes.load_state_dict(state["reducers"])
        self._started.clear()
        self.step = int(state["step"])
        self.num_skipped_steps = int(state["num_skipped_steps"])
        self._phases.decided_first_sparse_step = state.get("compress_from")

    def on_close(self, action: Callable[[], None]) -> None:
        """Let `close` do this first."""
        self._closing.append(action)

    def close(self) -> None:
        """Release the communicator; nothing can be reduced afterwards."""
        while self._closing:
            self._closing.pop()()
        self.comm.close()

    # --- the way of a gradient

    def reduce(self, bucket: Bucket) -> StepStats:
        """Overwrite `bucket.gradient` with the mean over all ranks of what is applied in this step.

        Raises on every rank alike for NaN or Inf (policy `raise`): the step cannot be finished, go back to a saved
        state. Under `skip` the gradient becomes zero, here and for the rest of the step.
        """
        started = self._started.pop(bucket.slots, None)
        if self._skipping:
            return self._skip(bucket)
        clock = StageClock()
        self.comm.take()  # what others sent through it in the meantime is not ours
        lane, is_dense, k, acc = started or self._start(bucket)
        largest = lane.selector.largest()
        self._guard.before(self.step, acc)
        verdict = agree(bucket, acc, largest, self.comm)
        if verdict.nonfinite:
            return self._refuse(bucket, _culprits(verdict))
        clock.stage("compensate")
        held = [(slot, slot.part(acc).clone()) for slot in verdict.unused]
        for slot, _ in held:  # nobody has a gradient for it: it must not move in this step
            slot.part(acc).zero_()
        exchanged = Traffic.of(self.comm.take())
        self._selecting.take()
        self._packing.take()
        reduction = (self._dense if is_dense else lane.reducer).reduce(acc, self.comm, k)
        lane.selector.forget()
        clock.stage("reduce")
        rounding = write_mean(reduction.mean, bucket.gradient, self._kernels)
        contribution = reduction.contribution
        if held and contribution is acc:
            contribution = acc.clone()
        for slot, owed in held:
            slot.part(acc).copy_(owed)
        left = self._feedback.retain(bucket, acc, contribution, rounding)
        clock.stage("apply")
        traffic = Traffic.of(self.comm.take())
        self._guard.after(self.step, bucket, left, self.comm)
        self.comm.take()
        if self.settings.nonfinite == "raise":
            self._feedback.commit()
        seconds = clock.split(
            "reduce", select=self._selecting.take(), encode=self._packing.take(), exchange=traffic.seconds
        )
        return self._tell(bucket, k, reduction, exchanged.plus(traffic), seconds, verdict.unused)

    def prepare(self, bucket: Bucket) -> None:
        """Optional, before `reduce` of the same bucket: let a GPU begin with it while another one is exchanged."""
        if not self._skipping:
            self._started[bucket.slots] = self._start(bucket)

    def end_step(self) -> None:
        """After the last bucket of a step."""
        if self._skipping:
            self._feedback.roll_back()
            self.num_skipped_steps += 1
            self._untold = [replace(stats, skipped=True, global_count=0) for stats in self._untold]
        else:
            self._feedback.commit()
        self._tell_listeners()
        self.last_step_skipped, self._skipping = self._skipping, False
        self.step += 1

    def _start(self, bucket: Bucket) -> _Started:
        """Add up what is owed, looking out for what is worth sending."""
        for slot in bucket.slots:
            if slot.name in bucket.missing:
                slot.part(bucket.gradient).zero_()
        for watcher in self._watchers:
            watcher(self.step, bucket)
        lane = self._lanes.of(bucket)
        is_dense = self._phase(bucket) == "dense"
        k = bucket.numel if is_dense else self.settings.k_at(self.step, bucket.numel)
        limit = largest_safe(self.comm.size)

        def accumulate(residual: Tensor | None, gradient: Tensor, out: Tensor) -> None:
            lane.selector.accumulate(residual, gradient, out, 0 if is_dense else k, limit)

        return _Started(lane, is_dense, k, self._feedback.compensate(bucket, accumulate))

    def _phase(self, bucket: Bucket) -> Phase:
        return "dense" if bucket.dense else self._phases.at(self.step, bucket.numel)

    def _refuse(self, bucket: Bucket, reason: str) -> StepStats:
        """Every rank comes here in the same step."""
        self._feedback.roll_back()
        if self.settings.nonfinite == "raise":
            raise NonFiniteGradientError(
                f"step {self.step}, bucket {bucket.name}: {reason}. This step is not taken; lower the learning rate, "
                "clip the gradient, or set nonfinite='skip' to leave such steps out"
            )
        logger.warning("step %d is skipped on all ranks: %s", self.step, reason)
        self._skipping = True
        return self._skip(bucket)

    def _skip(self, bucket: Bucket) -> StepStats:
        bucket.gradient.zero_()
        traffic = Traffic.of(self.comm.take())
        stats = StepStats(
            step=self.step,
            bucket=bucket.name,
            phase=self._phase(bucket),
            n=bucket.numel,
            k=0,
            local_count=0,
            global_count=0,
            **traffic.counts(),
            skipped=True,
        )
        self._untold.append(stats)
        return stats

    def _tell(
        self,
        bucket: Bucket,
        k: int,
        reduction: Reduction,
        traffic: Traffic,
        seconds: Mapping[str, float],
        unused: tuple[Slot, ...],
    ) -> StepStats:
        stats = StepStats(
            step=self.step,
            bucket=bucket.name,
            phase=reduction.phase,
            n=bucket.numel,
            k=k,
            local_count=reduction.local_count,
            global_count=reduction.global_count,
            local_threshold=reduction.local_threshold,
            global_threshold=reduction.global_threshold,
            **traffic.counts(),
            seconds=seconds,
            unused=tuple(slot.name for slot in unused),
        )
        self._untold.append(stats)
        if self.settings.nonfinite == "raise":  # else nobody knows before the end of the step whether it counts
            self._tell_listeners()
        return stats

    def _tell_listeners(self) -> None:
        untold, self._untold = self._untold, []
        for stats in untold:
            for listener in (self._trainer_lists, *self._listeners):
                listener(stats)


class _Started(NamedTuple):
    """A bucket whose gradient was added to what is owed."""

    lane: Lane
    is_dense: bool
    k: int
    acc: Tensor


def _culprits(verdict: Verdict) -> str:
    return "NaN, Inf or a value too large to sum in the gradient of " + ", ".join(
        f"{name!r} on rank {rank}" for rank, name in verdict.nonfinite.items()
    )
