"""LocalSteps: every rank trains on its own for some steps, then all exchange what that changed."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Unpack, cast

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from oktopk.adapters.ddp import ddp_models_of
from oktopk.adapters.grouped import (
    GroupedOptimizer,
    WrappingOptimizer,
    check_bucket_cap,
    check_norm_clip,
    named_parameters_of,
)
from oktopk.adapters.grouping import Group, clip_, make_groups
from oktopk.adapters.reduction_thread import Ticket, mark
from oktopk.allreducer import AllReducer
from oktopk.bucket import Bucket, Layout
from oktopk.comm.base import Communicator
from oktopk.metrics.trainer_lists import MetricLists
from oktopk.reduce.description import ReducerFactory
from oktopk.settings import Settings, SettingsKeywords, lists_settings


class LocalSteps(WrappingOptimizer, GroupedOptimizer):
    """Wraps any torch optimizer: it steps on this rank's own gradients, and what it changed is exchanged.

    1. `every` steps of the wrapped optimizer, without any communication.
    2. The change of the parameters since the last exchange is added to what this rank owes, and the reducer applies
       the largest sums over all ranks. What is not applied stays owed.
    3. The outer step: `parameters = parameters before - outer_lr * mean change`, with Nesterov momentum where
       `outer_momentum` is set. Afterwards all ranks have the same parameters, to the bit.

    In the first `warmup_steps` steps every step is followed by a dense exchange, whose mean is applied as it is.
    `every=1` is update compression for any optimizer. Replicas must start equal: construct them from one seed or call
    `broadcast_parameters()`. Changes count from the parameters as the first step finds them. Take the model itself: a
    DDP model is refused, because its own exchange would be one too many.

    Attributes:
        allreducer: The AllReducer that the changes pass. Its steps are exchanges.

    Example:
        >>> optimizer = oktopk.LocalSteps(
        ...     torch.optim.AdamW(model.parameters(), lr=1e-3), model.named_parameters(), every=15, density=0.03
        ... )
        >>> loss.backward()
        >>> optimizer.step()
        >>> with optimizer.agreed():  # between exchanges every rank has parameters of its own
        ...     validate(model)
    """

    @lists_settings
    def __init__(  # the base class would take over the parameters: the wrapped optimizer keeps them
        self,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, Parameter]],
        every: int,
        reducer: str | ReducerFactory = "oktopk",
        *,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        stream: bool = False,
        delay: int = 0,
        comm: str | Communicator = "auto",
        trainer: MetricLists | None = None,
        norm_clip: float | None = None,
        bucket_cap_mb: float = 25.0,
        dense_vectors: bool = False,
        settings: Settings | None = None,
        **keywords: Unpack[SettingsKeywords],
    ) -> None:
        """Wrap an optimizer; a collective call.

        Args:
            optimizer: The optimizer that takes the local steps.
            named_parameters: `model.named_parameters()` of the whole model.
            every: Steps between two exchanges.
            reducer: A name from the registry, or a function that makes a Reducer from ReducerSettings.
            outer_lr: Part of the mean change that is applied.
            outer_momentum: Nesterov momentum of the mean changes, in [0, 1). DiLoCo takes 0.9, and 0.7 for `outer_lr`.
            stream: Exchange the groups of parameters in turn, spread over the `every` steps, so that the link is used
                evenly. Take a `bucket_cap_mb` that makes several groups.
            delay: Steps that go on while an exchange is under way, fewer than `every`; what they change is kept.
            comm: "auto", "torch", "mpi" or a Communicator, see AllReducer.
            trainer: Its lists `sparsities`, `compression_ratios` and `communication_sizes` are filled.
            norm_clip: Scale this rank's gradient to at most this norm before a local step.
            bucket_cap_mb: The largest group of parameters that is exchanged together, in MiB.
            dense_vectors: Never compress parameters of one dimension: biases and norm layers.
            settings: All settings in one object; or give them as keywords, which override it. With nonfinite="skip" a
                rank leaves out a local step whose gradients hold NaN or Inf.
            **keywords: See Settings.

        Raises:
            ValueError: Parameters without a name or with one name twice, ranks with other parameters, a model under
                DDP, an unknown name or setting, or a value that cannot be.
        """
        check_norm_clip(norm_clip)
        check_bucket_cap(bucket_cap_mb)
        _check_whole("every", every, 1, None)
        _check_whole("delay", delay, 0, every)
        if not 0.0 < outer_lr < math.inf:
            raise ValueError(f"outer_lr={outer_lr!r}: must be a positive number")
        if not 0.0 <= outer_momentum < 1.0:
            raise ValueError(f"outer_momentum={outer_momentum!r}: must be in [0, 1)")
        named = named_parameters_of(optimizer, named_parameters)
        _refuse_ddp({id(p) for _, p in named})
        self._inner = optimizer
        self._every = every
        self._delay = delay
        self._outer_lr = outer_lr
        self._outer_momentum = outer_momentum
        self._norm_clip = norm_clip
        allreducer = AllReducer(reducer, comm=comm, trainer=trainer, exchanges="updates", settings=settings, **keywords)
        groups = make_groups(named, bucket_cap_mb, dense_vectors, dtype=torch.float32)
        self._turn = dict(zip((g.layout for g in groups), turns(len(groups), every, stream), strict=True))
        self._anchor = {g.layout: torch.empty_like(g.flat) for g in groups}
        """The parameters that all ranks agreed on last, in fp32."""
        self._outer_velocity: dict[Layout, Tensor] = {}
        self._under_way: deque[_Exchange] = deque()
        self._num_steps = 0
        self._num_exchanges = 0
        self._sent = {g.layout: 0 for g in groups}
        """After which step each group was exchanged last."""
        self._looked_for_ddp = False
        """By the first step a DDP model was made, where there is one."""
        self._connect(allreducer, named, groups)

    # --- a step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take a local step, and exchange what is due.

        Args:
            closure: Passed on to the wrapped optimizer. Gradients are clipped and looked at whenever it was called.

        Returns:
            What the wrapped optimizer's step returned; None where the local step was left out.

        Raises:
            NonFiniteGradientError: On every rank alike, where a change holds NaN or Inf.
            RuntimeError: What went wrong in the background.
            ValueError: At the first step, where the model is under DDP.
        """
        self._begin()
        if not self._looked_for_ddp:
            _refuse_ddp(self._group_of)
            self._looked_for_ddp = True
        result = self._local_step(closure)
        self._num_steps += 1
        self._land(self._delay)
        is_warm = self._num_exchanges < self.allreducer.settings.warmup_steps
        turn = self._num_steps % self._every
        due = [group for group in self._groups if is_warm or turn == self._turn[group.layout]]
        if due:
            self._send(due, wait=is_warm or not self._delay, plain=is_warm)
        return result

    def synchronize(self) -> None:
        """Exchange now what was not exchanged yet: afterwards all ranks have the same parameters. A collective call.

        For the end of training. What the reducer does not apply stays owed.
        """
        self._land()
        due = [group for group in self._groups if self._sent[group.layout] != self._num_steps]
        if due:
            self._send(due, wait=True)

    def wait(self) -> None:
        """Wait until exchanges that are under way are over; they are taken up when their time has come.

        Call it before you use the communicator for anything else, where you set `delay`.
        """
        for exchange in self._under_way:
            for ticket in exchange.tickets:
                ticket.await_end()

    @contextmanager
    def agreed(self) -> Generator[None]:
        """The parameters are those of the last exchange, the same on all ranks; then this rank's own come back."""
        self._begin()
        own = self._copies()
        for group in self._groups:
            group.set_values(self._anchor[group.layout])
        try:
            yield
        finally:
            self._put_back(own)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._inner.zero_grad(set_to_none)

    def broadcast_parameters(self, root: int = 0) -> None:
        self._land()
        super().broadcast_parameters(root)
        self._drop_anchor()

    def _begin(self) -> None:
        """Until the first step is taken, weights may have been loaded since construction."""
        if not self._num_steps:
            self._drop_anchor()

    def _drop_anchor(self) -> None:
        """The parameters are equal on all ranks: changes count from here."""
        for group in self._groups:
            self._anchor[group.layout].copy_(group.values())
            self._sent[group.layout] = self._num_steps

    def _local_step(self, closure: Callable[[], Any] | None) -> Any:
        if closure is None:
            return self._inner.step() if self._are_gradients_fine() else None
        skips = self.allreducer.settings.nonfinite == "skip"
        own = self._copies() if skips else {}  # an optimizer may move before it calls the closure again

        def looked_at() -> Any:
            loss = closure()
            if not self._are_gradients_fine():
                raise _LeaveOut
            return loss

        try:
            return self._inner.step(looked_at)
        except _LeaveOut:
            self._put_back(own)
            return None

    def _are_gradients_fine(self) -> bool:
        """Clip this rank's gradients; False where its local step is to be left out."""
        self._refuse_strangers(p for group in self._inner.param_groups for p in group["params"])
        gradients = [p.grad for group in self._groups for p in group.parameters if p.grad is not None]
        if self._norm_clip is not None:
            clip_(gradients, self._norm_clip)
        return self.allreducer.settings.nonfinite == "raise" or _are_finite(gradients)

    def _copies(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self._named()}

    def _put_back(self, copies: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self._named():
                parameter.copy_(copies[name])

    def _named(self) -> Iterator[tuple[str, Parameter]]:
        for group in self._groups:
            yield from zip((slot.name for slot in group.layout.slots), group.parameters, strict=True)

    def _send(self, groups: list[Group], wait: bool, plain: bool = False) -> None:
        """Hand in what the local steps changed since these groups were exchanged last, and maybe wait for the outcome.

        `plain`: the mean is to be applied as it is.
        """
        self.allreducer.busy = True
        values = [group.values() for group in groups]
        for group, value in zip(groups, values, strict=True):
            before = self._anchor[group.layout].to(group.parameters[0].dtype)  # as it was put into the parameters
            torch.sub(before, value, out=group.flat)
            group.input_ready = mark(group.flat.device)
            self._sent[group.layout] = self._num_steps
            self._submit(group)
        exchange = _Exchange(self._num_steps, groups, None if wait else values, plain, self._end_of_step())
        note = self._thread.submit(
            lambda: exchange.skipped.append(self.allreducer.last_step_skipped), torch.device("cpu")
        )
        exchange.tickets.append(note)
        self._under_way.append(exchange)
        self._num_exchanges += 1
        if wait:
            self._land()

    def _land(self, patience: int = 0) -> None:
        """Take up what was exchanged and is at least so many steps old."""
        while self._under_way and self._num_steps - self._under_way[0].started >= patience:
            exchange = self._under_way.popleft()
            for ticket in exchange.tickets:
                ticket.wait()
            self.allreducer.busy = bool(self._under_way)
            skipped = any(exchange.skipped)
            for at, group in enumerate(exchange.groups):
                if not skipped:
                    self._outer_step(group, exchange.plain)
                anchor = self._anchor[group.layout]
                if exchange.own is None or skipped:
                    group.set_values(anchor)
                else:  # and what this rank changed since
                    group.set_values(group.values() - exchange.own[at] + anchor)

    def _outer_step(self, group: Group, plain: bool) -> None:
        change, lr = group.flat, 1.0 if plain else self._outer_lr
        if self._outer_momentum and not plain:
            if group.layout not in self._outer_velocity:
                self._outer_velocity[group.layout] = torch.zeros_like(change)
            velocity = self._outer_velocity[group.layout].mul_(self._outer_momentum).add_(change)
            change = change.add(velocity, alpha=self._outer_momentum)
        self._anchor[group.layout].sub_(change, alpha=lr)

    def _fill(self, group: Group) -> Bucket:
        return Bucket(group.flat, group.layout, dense=group.dense)

    def _forget_step(self) -> None:
        self._under_way.clear()
        super()._forget_step()

    # --- states

    def training_state_dict(self) -> dict[str, Any]:
        """All of this rank's state, its parameters included: between exchanges every rank has its own.

        Waits for an exchange that is under way and takes it up. Every rank saves its own.

        Returns:
            `{"optimizer": the wrapped optimizer's state, "allreducer": ..., "local_steps": ...}`
        """
        self._begin()
        self._land()
        rounds = {
            "num_steps": self._num_steps,
            "sent": {slot.name: sent for layout, sent in self._sent.items() for slot in layout.slots},
            "anchor": self._by_name(self._anchor),
            "outer_velocity": self._by_name(self._outer_velocity),
            "parameters": self._copies(),
        }
        state = super().training_state_dict()  # torch's holds the tensors that the next step writes into
        return {**state, "optimizer": copy.deepcopy(state["optimizer"]), "local_steps": rounds}

    def load_training_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `training_state_dict` was taken, also after an error; overwrites the parameters.

        Raises:
            ValueError: The state of another rank, world, reducer, model or optimizer; nothing was changed.
        """
        rounds = self._checked(state)
        before = copy.deepcopy(self._inner.state_dict())
        self._inner.load_state_dict(copy.deepcopy(state["optimizer"]))  # torch would go on in the saved tensors
        try:
            self.allreducer.load_state_dict(state["allreducer"])
        except ValueError:
            self._inner.load_state_dict(before)
            raise
        self._num_steps, self._num_exchanges = rounds["num_steps"], self.allreducer.step
        self._outer_velocity.clear()
        for group in self._groups:
            names = [slot.name for slot in group.layout.slots]
            self._sent[group.layout] = min(rounds["sent"][name] for name in names)
            _load(self._anchor[group.layout], group.layout, rounds["anchor"])
            if any(name in rounds["outer_velocity"] for name in names):
                self._outer_velocity[group.layout] = torch.zeros_like(group.flat)
                _load(self._outer_velocity[group.layout], group.layout, rounds["outer_velocity"])
        self._put_back(rounds["parameters"])

    def _checked(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """The part of a saved state that is ours; ValueError where it does not fit."""
        for key in ("optimizer", "allreducer", "local_steps"):
            if not isinstance(state.get(key), Mapping):
                raise ValueError(f"the saved state has no {key!r}: it is not that of LocalSteps.training_state_dict()")
        rounds = cast("Mapping[str, Any]", state["local_steps"])
        for key in ("num_steps", "sent", "anchor", "outer_velocity", "parameters"):
            if key not in rounds:
                raise ValueError(f"the saved state has no {key!r}: it is damaged; load an earlier one")
        shapes = {name: tuple(p.shape) for name, p in self._named()}
        saved = {name: tuple(p.shape) for name, p in rounds["parameters"].items()}
        for name in (*shapes, *saved):
            if shapes.get(name) != saved.get(name):
                raise ValueError(
                    f"the saved state has shape {saved.get(name)} for {name!r}, this model has {shapes.get(name)}: "
                    "it is of another model"
                )
        return rounds

    def _by_name(self, flats: Mapping[Layout, Tensor]) -> dict[str, Tensor]:
        return {slot.name: slot.part(flat).clone() for layout, flat in flats.items() for slot in layout.slots}

    # --- the face of a torch optimizer

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state alone, this rank's own. `training_state_dict` has everything."""
        return self._inner.state_dict()

    def __repr__(self) -> str:
        return f"LocalSteps({self.allreducer.reducer}, every={self._every}, {self._inner!r})"


@dataclass(frozen=True)
class _Exchange:
    """One that is under way: since which step, and what the parameters were then, where steps go on meanwhile."""

    started: int
    groups: list[Group]
    own: list[Tensor] | None
    plain: bool
    tickets: list[Ticket]
    skipped: list[bool] = field(default_factory=list[bool])
    """Filled when it is over."""


def turns(num_groups: int, every: int, stream: bool) -> list[int]:
    """After how many steps of a round each group is exchanged; 0: at its end."""
    return [at * every // num_groups if stream else 0 for at in range(num_groups)]


def _load(flat: Tensor, layout: Layout, by_name: Mapping[str, Tensor]) -> None:
    for slot in layout.slots:
        if slot.name in by_name:
            slot.part(flat).copy_(by_name[slot.name])


class _LeaveOut(Exception):
    """A closure made gradients that hold NaN or Inf."""


def _refuse_ddp(parameters: Collection[int]) -> None:
    """ValueError where one of these parameters, given by their ids, is a DDP model's."""
    if ddp_models_of(parameters):
        raise ValueError(
            "the model is under DistributedDataParallel, whose own exchange would be one too many: use the model itself"
        )


def _are_finite(tensors: list[Tensor]) -> bool:
    return not tensors or bool(torch.stack([torch.isfinite(t).all().to(tensors[0].device) for t in tensors]).all())


def _check_whole(key: str, value: int, least: int, below: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (below is not None and value >= below):
        most = "" if below is None else f" and below every={below}"
        raise ValueError(f"{key}={value!r}: must be a whole number of steps, at least {least}{most}")
