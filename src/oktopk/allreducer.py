"""AllReducer: schedule, error feedback, a reducer for each bucket, checks and statistics, composed."""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, Unpack, get_args

import torch
from torch.utils.hooks import RemovableHandle

from oktopk.bucket import Bucket, Layout, Slot
from oktopk.checks.conservation import Guard
from oktopk.checks.finite import NonFiniteGradientError, Verdict, agree, largest_safe
from oktopk.comm.base import Communicator
from oktopk.comm.counting import CountingCommunicator
from oktopk.feedback.momentum import Momentum
from oktopk.feedback.residual import Owed, Residual, write_mean
from oktopk.feedback.update import Update
from oktopk.kernels.base import Seen, UpdateRule
from oktopk.lanes import Lanes
from oktopk.metrics.meter import Cost, Meter
from oktopk.metrics.step_stats import StepStats
from oktopk.metrics.trainer_lists import MetricLists, TrainerLists
from oktopk.reduce.base import Reducer, Reduction
from oktopk.reduce.dense import Dense
from oktopk.reduce.description import ReducerFactory
from oktopk.reduce.narrow import PACKINGS
from oktopk.registry import describe, make_communicator, make_kernels
from oktopk.schedule import NEVER, Outline, Schedule
from oktopk.select.base import Accumulated
from oktopk.settings import Settings, SettingsKeywords, lists_settings, settings_from

logger = logging.getLogger("oktopk")
Listener = Callable[[StepStats], None]
Watcher = Callable[[int, Bucket], None]
Exchanges = Literal["gradients", "updates"]
_FORMAT = 3
_PARTS = {"step": int, "num_skipped_steps": int, "feedback": Mapping, "reducers": Mapping}


class AllReducer:
    """Averages buckets over all ranks, step by step, and accounts for every value that was not sent.

    All ranks call `reduce` for the same buckets in the same order, then `end_step`. One thread at a time. Adapters do
    that for you: `oktopk.attach` for DDP, `oktopk.DistributedOptimizer` around any optimizer.

    Attributes:
        settings: What it was made with.
        reducer: The name of its reducer.
        comm: Its communicator.
        exchanges: What its buckets hold, "gradients" or "updates".
        step: The step that is under way or comes next, counted from 0.
        num_skipped_steps: Steps that all ranks left out because of NaN or Inf.
        last_step_skipped: Whether the last step was one of them.

    Example:
        >>> allreducer = oktopk.AllReducer("oktopk", density=0.02, warmup_steps=10)
        >>> layout = oktopk.Layout.of([("weight", 512)])
        >>> stats = allreducer.reduce(oktopk.Bucket(gradient, layout))  # gradient now holds the mean
        >>> allreducer.end_step()
    """

    @lists_settings
    def __init__(
        self,
        reducer: str | ReducerFactory = "oktopk",
        *,
        comm: str | Communicator | Callable[[float], Communicator] = "auto",
        trainer: MetricLists | None = None,
        exchanges: Exchanges = "gradients",
        settings: Settings | None = None,
        **keywords: Unpack[SettingsKeywords],
    ) -> None:
        """Make an AllReducer; a collective call unless `comm` is a Communicator.

        Args:
            reducer: A name from the registry, or a function that makes a Reducer from ReducerSettings.
            comm: "auto" (torch.distributed where it is initialized, else MPI where mpirun or srun started us, else
                one rank), "torch", "mpi"; a function that makes a Communicator from `timeout_s`; or a Communicator,
                which stays yours.
            trainer: Its lists `sparsities`, `compression_ratios` and `communication_sizes` are filled.
            exchanges: "gradients": a dense step applies all that is owed. "updates": buckets hold changes of the
                parameters, or gradients with an `update` that makes them so. A dense step then leaves what is owed as
                it is: changes that are hundreds of steps old do harm when they are applied at once.
            settings: All settings in one object; or give them as keywords, which override it:
            **keywords: See Settings.

        Raises:
            ValueError: An unknown name or setting, or a value that cannot be.
        """
        if exchanges not in get_args(Exchanges):
            raise ValueError(f"exchanges={exchanges!r}: must be 'gradients' or 'updates'")
        if not (isinstance(reducer, str) or callable(reducer)):
            raise ValueError(f"reducer={reducer!r}: must be a name or a function that makes a Reducer")
        self.settings = settings_from(settings, keywords)
        if isinstance(reducer, str):
            description = describe(reducer)
            self.reducer, factory = description.name, description.factory
        else:
            self.reducer, factory = getattr(reducer, "__name__", repr(reducer)), reducer
        self._kernels = make_kernels(self.settings.kernels)
        self._meter = Meter()
        given = not (isinstance(comm, str) or callable(comm))
        if isinstance(comm, str):
            comm = make_communicator(comm, self.settings.timeout_s)
        inner = comm(self.settings.timeout_s) if callable(comm) else comm
        self.comm = CountingCommunicator(inner, self._meter.record)
        self.exchanges: Exchanges = exchanges
        momentum = self.settings.momentum_correction
        if momentum and exchanges == "updates":
            raise ValueError(f"momentum_correction={momentum!r}: updates hold their momentum already; set it to 0")
        self._correction = UpdateRule(momentum=momentum) if momentum else None
        self._feedback = Residual(self._kernels, Momentum("sent" if exchanges == "gradients" else "applied"))
        self._guard = Guard(self.settings.guard_every)
        self._dense = Dense(PACKINGS[self.settings.dense_dtype])
        self._lanes = Lanes(factory, self.settings, self._kernels, self.comm, self._meter)
        self._schedule = Schedule(self.settings, self.reducer, whole_is_dense=exchanges == "updates")
        self._started: dict[Layout, _Started] = {}
        self._listeners: OrderedDict[int, Listener] = OrderedDict()
        self._watchers: OrderedDict[int, Watcher] = OrderedDict()
        self._trainer_lists = TrainerLists(trainer, inner.rank) if trainer is not None else None
        self._untold: list[StepStats] = []
        self._on_load: list[tuple[Callable[[], None], Callable[[], None]]] = []
        self._skipping = False
        self._last_warning: str | None = None
        self.busy = False
        """Between the first bucket of a step and its end; set by whoever hands buckets in."""
        self.step = 0
        self.num_skipped_steps = 0
        self.last_step_skipped = False
        self._made_here = None if given else weakref.finalize(self, inner.release)
        if self._made_here is not None:
            self._made_here.atexit = False

    # --- what users ask for

    def set_trainer(self, trainer: MetricLists) -> None:
        """From now on fill this trainer's lists."""
        self._trainer_lists = TrainerLists(trainer, self.comm.rank)

    def add_listener(self, listener: Listener) -> RemovableHandle:
        """Call `listener(StepStats)` after every reduction, on the thread that reduces.

        Returns:
            A handle whose `remove()` ends it.
        """
        return _add(self._listeners, listener)

    def watch(self, watcher: Watcher) -> RemovableHandle:
        """Call `watcher(step, bucket)` before every reduction, on the thread that reduces.

        The bucket holds this rank's own gradient, to be looked at, not to be kept or changed.

        Returns:
            A handle whose `remove()` ends it.
        """
        return _add(self._watchers, watcher)

    def outline(self, num_steps: int) -> Outline:
        """Say which of the steps 0..num_steps-1 will be dense and which sparse; logs its warning once."""
        outline = self._schedule.outline(num_steps)
        if outline.warning and outline.warning != self._last_warning:
            logger.warning(outline.warning)
        self._last_warning = outline.warning
        return outline

    def compress_from(self, step: int | None) -> None:
        """From this step on steps are sparse, whatever `warmup_steps` says; None: none is, until this is called again.

        To be called between two steps, on all ranks alike. A dense step applies all that is owed; where updates are
        exchanged, it leaves what is owed as it is.
        """
        self._schedule.decided_first_sparse_step = NEVER if step is None else step

    def state_dict(self) -> dict[str, Any]:
        """This rank's own state, of tensors and plain values only: residuals, thresholds, regions, step.

        Raises:
            RuntimeError: In the middle of a step, when the state is not whole.
        """
        if self.busy:
            raise RuntimeError("state_dict() in the middle of a step: call it after the step, or before backward()")
        return {
            "format": _FORMAT,
            "reducer": self.reducer,
            "rank": self.comm.rank,
            "size": self.comm.size,
            "exchanges": self.exchanges,
            "step": self.step,
            "num_skipped_steps": self.num_skipped_steps,
            "compress_from": self._schedule.decided_first_sparse_step,
            "feedback": self._feedback.state_dict(),
            "reducers": self._lanes.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken, also after an error.

        Residuals follow the parameters whatever the buckets are. Thresholds and regions belong to a bucket's layout:
        a bucket with another layout starts by finding its own.

        Raises:
            ValueError: The state of another rank, world or reducer, or a damaged one; nothing was changed.
        """
        mine = {
            "format": _FORMAT, "reducer": self.reducer, "rank": self.comm.rank, "size": self.comm.size,
            "exchanges": self.exchanges,
        }  # fmt: skip
        for key, expected in mine.items():
            found = state.get(key, "gradients" if key == "exchanges" else None)  # older states do not say
            if found != expected:
                raise ValueError(f"saved state has {key}={found!r}, this AllReducer has {expected!r}")
        for key, kind in _PARTS.items():
            if not isinstance(state.get(key), kind):
                raise ValueError(f"saved state has {key}={state.get(key)!r}: it is damaged; load an earlier one")
        if state["feedback"].get("velocity") and self._correction is None and self.exchanges == "gradients":
            raise ValueError(
                "the saved state has momentum correction, these settings have not: set momentum_correction"
            )
        for settle, _ in self._on_load:
            settle()
        self._feedback.load_state_dict(state["feedback"])
        self._lanes.load_state_dict(state["reducers"])
        self._started.clear()
        self._untold.clear()
        self._skipping = self.busy = False
        self.step = state["step"]
        self.num_skipped_steps = state["num_skipped_steps"]
        self.last_step_skipped = False
        self._schedule.decided_first_sparse_step = state.get("compress_from")
        for _, forget in self._on_load:
            forget()

    def on_load(self, settle: Callable[[], None], forget: Callable[[], None]) -> None:
        """Let `load_state_dict` call these, before and after.

        Args:
            settle: An adapter waits until nobody reduces any more.
            forget: It drops what it holds of an unfinished step.
        """
        self._on_load.append((settle, forget))

    def close(self) -> None:
        """Release the communicator, if it was made here. Nothing can be reduced afterwards.

        The garbage collector does the same where nobody calls this.
        """
        if self._made_here is not None and self._made_here.detach():
            self.comm.close()

    # --- the way of a gradient

    def reduce(self, bucket: Bucket, update: Update | None = None) -> StepStats:
        """Overwrite `bucket.flat` with the mean over all ranks of what is applied in this step.

        Args:
            bucket: This rank's values.
            update: Makes a change of the parameters of the gradient that the bucket holds, where this AllReducer
                exchanges updates. The bucket then holds the mean change afterwards, in fp32.

        Returns:
            What it did and cost.

        Raises:
            NonFiniteGradientError: On every rank alike, for NaN or Inf under the policy `raise`. The step cannot be
                finished: load a saved state. Under `skip` the gradient becomes zero, here and for the rest of the step.
            GuardViolation: On every rank alike, where a guard found that the law does not hold.
        """
        self.busy = True
        if self._skipping:
            return self._skip(bucket, Cost())
        started = self._started.pop(bucket.layout, None) or self._start(bucket, update)
        owed, cost = started.owed, started.cost
        with self._meter.measure(cost):
            with self._meter.stage("combine" if started.reducer is self._dense else "select"):
                owed.acc.fetch()
            with self._meter.meeting():
                verdict = agree(bucket, owed.acc, self.comm)
            if verdict.nonfinite:
                return self._refuse(bucket, verdict, cost)
            owed.hold(verdict.unused)
            self._guard.before(self.step, owed)
            reduction = started.reducer.reduce(owed.acc, self.comm, started.k)
            with self._meter.stage("apply"):
                rounding = write_mean(reduction.mean, bucket.flat, self._kernels)
                left = self._feedback.retain(owed, reduction, rounding)
        self._guard.after(self.step, bucket, left, self.comm)
        if update is not None and owed.apart:
            with self._meter.measure(cost), self._meter.stage("apply"):
                update.learn(bucket.flat, verdict.unused)
                bucket.flat.copy_(self._feedback.follow(owed, bucket.flat, update.rule("dense"), self.comm))
        if self.settings.nonfinite == "raise":
            self._feedback.commit()
        return self._tell(bucket, started, reduction, verdict.unused)

    def prepare(self, bucket: Bucket, update: Update | None = None) -> None:
        """Optional, before `reduce` of the same bucket: let a GPU begin with it while another one is exchanged."""
        if not self._skipping and not (update is not None and update.wants_mean):  # which others must take part in
            self._started[bucket.layout] = self._start(bucket, update)

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
        self.busy = False

    def _start(self, bucket: Bucket, update: Update | None) -> _Started:
        """Add up what is owed, looking out for what is worth sending."""
        if bucket.missing:
            for slot in bucket.slots:
                if slot.name in bucket.missing:
                    slot.part(bucket.flat).zero_()
        for watcher in tuple(self._watchers.values()):
            watcher(self.step, bucket)
        lane = self._lanes.of(bucket)
        is_dense = self._schedule.phase(self.step, bucket) == "dense"
        k = bucket.numel if is_dense else self.settings.k_at(self.step, bucket.numel)
        limit = largest_safe(self.comm.size)
        started = _Started(self._dense if is_dense else lane.reducer, k)
        with self._meter.measure(started.cost):
            if is_dense and self.exchanges == "updates":
                started.owed = self._feedback.set_apart(bucket, lane.selector, limit)
                return started
            rule = self._correction
            if update is not None:
                started.refreshed = update.wants_mean and self._exchange_mean(bucket, update)
                rule = update.rule("sparse")
            started.owed = self._feedback.compensate(bucket, lane.selector, 0 if is_dense else k, limit, rule)
        return started

    def _exchange_mean(self, bucket: Bucket, update: Update) -> bool:
        """Exchange the mean gradient beside the update; left out where it is not finite: the reduction then says so."""
        gradient = bucket.flat.detach().to(torch.float32)
        largest = Seen(float(gradient.abs().max()), None)
        with self._meter.meeting():
            verdict = agree(bucket, Accumulated(gradient, seen=lambda: largest), self.comm)
        if not verdict.nonfinite:
            mean = self._dense.reduce(Accumulated(gradient), self.comm, bucket.numel).mean
            with self._meter.stage("apply"):
                update.learn(mean, verdict.unused)
        return not verdict.nonfinite

    def _refuse(self, bucket: Bucket, verdict: Verdict, cost: Cost) -> StepStats:
        """Every rank comes here in the same step."""
        self._feedback.roll_back()
        reason = "NaN, Inf or a value too large to sum in the gradient of " + ", ".join(
            f"{name!r} on rank {rank}" for rank, name in verdict.nonfinite.items()
        )
        if self.settings.nonfinite == "raise":
            raise NonFiniteGradientError(
                f"step {self.step}, bucket {bucket.name}: {reason}. This step is not taken; lower the learning rate, "
                "clip the gradient, or set nonfinite='skip' to leave such steps out"
            )
        logger.warning("step %d is skipped on all ranks: %s", self.step, reason)
        self._skipping = True
        return self._skip(bucket, cost)

    def _skip(self, bucket: Bucket, cost: Cost) -> StepStats:
        bucket.flat.zero_()
        stats = StepStats(
            step=self.step,
            bucket=bucket.name,
            phase=self._schedule.phase(self.step, bucket),
            n=bucket.numel,
            k=0,
            local_count=0,
            global_count=0,
            **cost.traffic.counts(),
            seconds=cost.seconds,
            skipped=True,
        )
        self._untold.append(stats)
        return stats

    def _tell(self, bucket: Bucket, started: _Started, reduction: Reduction, unused: tuple[Slot, ...]) -> StepStats:
        cost = started.cost
        stats = StepStats(
            step=self.step,
            bucket=bucket.name,
            phase=reduction.phase,
            n=bucket.numel,
            k=started.k,
            local_count=reduction.local_count,
            global_count=reduction.global_count,
            local_threshold=reduction.local_threshold,
            global_threshold=reduction.global_threshold,
            **cost.traffic.counts(),
            seconds=cost.seconds,
            unused=tuple(slot.name for slot in unused),
            refreshed=started.refreshed,
        )
        self._untold.append(stats)
        if self.settings.nonfinite == "raise":  # else nobody knows before the end of the step whether it counts
            self._tell_listeners()
        return stats

    def _tell_listeners(self) -> None:
        untold, self._untold = self._untold, []
        for stats in untold:
            if self._trainer_lists is not None:
                self._trainer_lists(stats)
            for listener in tuple(self._listeners.values()):
                listener(stats)


class _Started:
    """A bucket whose gradient was added to what is owed."""

    owed: Owed

    def __init__(self, reducer: Reducer, k: int) -> None:
        self.reducer = reducer
        self.k = k
        self.cost = Cost()
        self.refreshed = False


def _add(calls: OrderedDict[int, Any], call: Callable[..., None]) -> RemovableHandle:
    handle = RemovableHandle(calls)
    calls[handle.id] = call
    return handle
