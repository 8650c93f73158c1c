"""What optimizers share whose parameters are reduced in groups, by a background thread."""

from __future__ import annotations

import threading
import weakref
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from oktopk.adapters.grouping import Group, clip_
from oktopk.adapters.reduction_thread import ReductionThread, Ticket, mark, weakly
from oktopk.allreducer import AllReducer, Listener
from oktopk.bucket import Bucket
from oktopk.comm.base import Communicator, all_gather_int
from oktopk.metrics.trainer_lists import MetricLists

Named = list[tuple[str, Parameter]]


class Removable(Protocol):
    def remove(self) -> None: ...


class GroupedOptimizer(Optimizer):
    """Groups are handed to the thread in one order, which is the same on all ranks, whatever the order of gradients.

    Attributes:
        allreducer: The AllReducer that the groups pass.
    """

    allreducer: AllReducer

    def _connect(self, allreducer: AllReducer, named: Named, groups: list[Group]) -> None:
        """Call it once, at the end of construction; a collective call.

        Raises:
            ValueError: Ranks with other parameters.
        """
        self.allreducer = allreducer
        check_same_model(named, allreducer.comm)
        self._groups = groups
        self._group_of = {id(p): group for group in groups for p in group.parameters}
        self._thread = ReductionThread()
        self._lock = threading.Lock()
        """Autograd calls hooks on one thread for each device."""
        self._tickets: list[Ticket] = []
        """Of the groups that were handed in, in their order."""
        kind = type(self)
        allreducer.on_load(weakly(self._thread, ReductionThread.settle), weakly(self, kind._forget_step))
        self._hooks: list[Removable] = []
        self._end = weakref.finalize(self, remove_all, self._hooks)
        self._end.atexit = False

    # --- what they do differently

    def _fill(self, group: Group) -> Bucket:
        """On the thread: what a group hands in, its gradients."""
        return group.fill()

    def _prepare(self, group: Group, bucket: Bucket) -> None:
        """On the thread, maybe while another group is exchanged: see AllReducer.prepare."""
        del group
        self.allreducer.prepare(bucket)

    def _reduce(self, group: Group, bucket: Bucket) -> None:
        """On the thread: reduce a group that was filled."""
        del group
        self.allreducer.reduce(bucket)

    def _forget_step(self) -> None:
        """A state was loaded: whatever was under way, or went wrong, is of no account any more."""
        self._tickets.clear()
        self._thread.forget_failure()

    # --- handing in

    def _submit(self, group: Group) -> None:
        filled: list[Bucket] = []

        def prepare() -> None:
            filled.append(self._fill(group))
            self._prepare(group, filled[0])

        def job() -> None:
            self._reduce(group, filled[0] if filled else self._fill(group))

        self._tickets.append(
            self._thread.submit(job, group.flat.device, input_ready=group.input_ready, prepare=prepare)
        )

    def _submit_rest(self) -> list[Ticket]:
        """Hand in what is left, and the end of the step; returns all tickets."""
        for group in self._groups[len(self._tickets) :]:
            group.input_ready = mark(group.flat.device)
            self._submit(group)
        return self._end_of_step()

    def _end_of_step(self) -> list[Ticket]:
        """Hand in the end of the step; returns the tickets of its groups, then that of the end."""
        end = self._thread.submit(self.allreducer.end_step, torch.device("cpu"))
        tickets, self._tickets = [*self._tickets, end], []
        return tickets

    # --- what users ask for

    def set_trainer(self, trainer: MetricLists) -> None:
        """From now on fill this trainer's lists."""
        self.allreducer.set_trainer(trainer)

    def add_listener(self, listener: Listener) -> RemovableHandle:
        """Call `listener(StepStats)` after every reduction, on the background thread; the handle has `remove()`."""
        return self.allreducer.add_listener(listener)

    def broadcast_parameters(self, root: int = 0) -> None:
        """Overwrite the parameters with those of rank `root`. Nothing else is ever broadcast."""
        with torch.no_grad():
            for group in self._groups:
                for parameter in group.parameters:
                    self.allreducer.comm.broadcast(parameter.data, root)

    def training_state_dict(self) -> dict[str, Any]:
        """The optimizer's state, and what this rank owes and found. Every rank saves its own.

        Returns:
            `{"optimizer": self.state_dict(), "allreducer": self.allreducer.state_dict()}`

        Raises:
            RuntimeError: Between backward and step, when the state is not whole.
        """
        return {"optimizer": self.state_dict(), "allreducer": self.allreducer.state_dict()}

    def load_training_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `training_state_dict` was taken, also after an error.

        Raises:
            ValueError: The state of another rank, world, reducer or model.
        """
        self.allreducer.load_state_dict(state["allreducer"])
        self.load_state_dict(state["optimizer"])

    def close(self) -> None:
        """End the background thread and release the communicator.

        The garbage collector does the same where nobody calls this.
        """
        self._end()
        self._thread.close()
        self.allreducer.close()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by torch.amp.GradScaler, whose losses and skipped steps other ranks would know nothing of."""
        raise RuntimeError(
            f"GradScaler does not work with {type(self).__name__}: train in bf16, which needs no scaling"
        )

    def _refuse_strangers(self, parameters: Iterable[Tensor]) -> None:
        """A parameter that was frozen at first has no place in the groups: it would train on its own."""
        for parameter in parameters:
            if parameter.grad is not None and id(parameter) not in self._group_of:
                raise RuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} got a gradient but required none when the "
                    "optimizer was made: unfreeze parameters first, then make the optimizer"
                )


class WrappingOptimizer(Optimizer):
    """Has what the wrapped optimizer has: param_groups, state, defaults and whatever else."""

    _inner: Optimizer

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state; what is owed stays as it is."""
        self._inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        del param_group
        raise ValueError("add_param_group() after wrapping: add it to the optimizer first, then wrap")

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # not constructed yet
            raise AttributeError(name)
        return getattr(self._inner, name)


class OverlappingOptimizer(GroupedOptimizer):
    """A group is handed in when backward has made the last of its gradients.

    Attributes:
        local: Set it to True to accumulate: backward then only adds to `.grad`, until one runs with `local = False`.
    """

    def _watch_gradients(self, overlap: bool) -> None:
        """Call it once, after `_connect`. Without overlap the groups are handed in with the end of the step."""
        self.local = False
        self._overlap = overlap
        self._arrived = False
        """Gradients of this step are there, and what becomes of them is not known yet."""
        call = weakly(self, OverlappingOptimizer._on_gradient)
        self._hooks += [p.register_post_accumulate_grad_hook(call) for group in self._groups for p in group.parameters]

    @property
    def _takes_gradients(self) -> bool:
        """Whether this step still takes gradients in."""
        return True

    def _is_accumulating(self) -> bool:
        return self.local

    def _on_gradient(self, parameter: Tensor) -> None:
        group = self._group_of[id(parameter)]
        with self._lock:
            if id(parameter) in group.ready or not self._takes_gradients:
                raise RuntimeError(
                    f"a second backward() reached {name_of(parameter, group)!r} before step(): set `local = True` for "
                    "all but the last backward of a step"
                )
            if self._is_accumulating():
                return
            self._arrived = self.allreducer.busy = True
            if not self._overlap:
                return
            group.ready.add(id(parameter))
            if group.is_full:
                group.input_ready = mark(group.flat.device)
            # In the order of the groups, which is the same on all ranks, whatever the order of the gradients.
            while len(self._tickets) < len(self._groups) and self._groups[len(self._tickets)].is_full:
                self._submit(self._groups[len(self._tickets)])

    def _hand_in(self, norm_clip: float | None, all_parameters: Iterable[Tensor]) -> None:
        """Hand in what is left, and wait for all of it; raises what went wrong."""
        self._refuse_strangers(all_parameters)
        if norm_clip is not None:
            clip_([p.grad for group in self._groups for p in group.parameters if p.grad is not None], norm_clip)
        with self._lock:
            tickets = self._submit_rest()
            self._arrived = False
            self._forget_ready()
        for ticket in tickets:
            ticket.wait()

    def _forget_ready(self) -> None:
        for group in self._groups:
            group.ready.clear()

    def _refuse_zeroing(self, instead: str) -> None:
        if self._tickets:
            raise RuntimeError(f"zero_grad() while gradients are being reduced: {instead}")

    def _forget_step(self) -> None:
        with self._lock:
            self._forget_ready()
            self._arrived = False
            super()._forget_step()


def remove_all(hooks: Iterable[Removable]) -> None:
    for each in hooks:
        each.remove()


def name_of(parameter: Tensor, group: Group) -> str:
    return next(slot.name for slot, p in zip(group.layout.slots, group.parameters, strict=True) if p is parameter)


def check_norm_clip(norm_clip: float | None) -> None:
    if norm_clip is not None and not norm_clip > 0:
        raise ValueError(f"norm_clip={norm_clip!r}: must be a positive norm, or None for no clipping")


def check_bucket_cap(bucket_cap_mb: float) -> None:
    if not bucket_cap_mb > 0:
        raise ValueError(f"bucket_cap_mb={bucket_cap_mb!r}: must be positive")


def named_parameters_of(optimizer: Optimizer, named_parameters: Iterable[tuple[str, Parameter]]) -> Named:
    """The trainable parameters that the optimizer updates, with their names.

    Raises:
        ValueError: One without a name, or two with the same.
    """
    wanted = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    named = [(name, p) for name, p in named_parameters if id(p) in wanted]
    check_names([name for name, _ in named])
    if len(named) != len(wanted):
        raise ValueError(
            f"the optimizer updates {len(wanted)} parameters, named_parameters names {len(named)} of them: "
            "pass model.named_parameters() of the whole model"
        )
    if not named:
        raise ValueError("the optimizer has no parameter that requires a gradient")
    return named


def check_names(names: Sequence[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ValueError(f"named_parameters holds {twice[0]!r} twice: every parameter needs a name of its own")


def check_same_model(named: Named, comm: Communicator) -> None:
    description = ";".join(f"{name} {tuple(p.shape)} {p.dtype}" for name, p in named)
    found = all_gather_int(comm, zlib.crc32(description.encode()), named[0][1].device)
    odd = [rank for rank, value in enumerate(found) if value != found[0]]
    if odd:
        raise ValueError(f"rank(s) {odd} hold other parameters (names, shapes or dtypes) than rank 0")
