"""What the optimizers share that send changes of the parameters instead of gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from oktopk.adapters.ddp import QuietModels
from oktopk.adapters.grouped import (
    Named,
    OverlappingOptimizer,
    check_bucket_cap,
    check_names,
    check_norm_clip,
)
from oktopk.adapters.grouping import Group, make_groups
from oktopk.allreducer import AllReducer
from oktopk.bucket import Bucket, Layout, Slot
from oktopk.comm.base import Communicator
from oktopk.feedback.update import Update
from oktopk.metrics.step_stats import StepStats
from oktopk.metrics.trainer_lists import MetricLists
from oktopk.reduce.base import Phase
from oktopk.reduce.description import ReducerFactory
from oktopk.settings import Settings, SettingsKeywords

Params = Module | Iterable[Any]
"""A model, its `named_parameters()`, parameters without names, or dicts of torch's param groups with either."""


class GroupUpdate(Update, Protocol):
    """One group's part of an optimizer: its rule, and what it remembers. What a step changes counts from `commit` on.

    What it remembers is the same on all ranks. Parameters stand in the order of the group's layout.
    """

    def begin(self, options: Mapping[str, Any]) -> None:
        """A step begins; these options of its param group hold until it ends."""
        ...

    def decay(self, slots: Sequence[Slot], parameters: Sequence[Tensor]) -> None:
        """Apply the weight decay of this step to the parameters that take part in it, in place."""
        ...

    def commit(self, phase: Phase, unused: Collection[str]) -> None:
        """The step was taken, without these parameters."""
        ...

    def roll_back(self) -> None:
        """The step was not taken."""
        ...

    @property
    def kept(self) -> Sequence[str]:
        """The keys that `state_of` always has."""
        ...

    def state_of(self, slot: Slot) -> dict[str, Any]:
        """What is remembered for one parameter, as numbers and flat tensors of its length; a copy."""
        ...

    def load_state(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Continue with what `state_of` gave, by the parameters' names."""
        ...


MakeUpdate = Callable[[Layout, torch.device, int], GroupUpdate]
"""From a layout, its device and the number of ranks."""
CheckOptions = Callable[[Mapping[str, Any]], object]
"""ValueError for options of a param group that cannot be."""


class UpdateOptimizer(OverlappingOptimizer):
    """Every rank makes a change of the parameters of its own gradient; what is exchanged, and owed, is the change.

    In a dense step the mean gradient is exchanged, and the change is made of it: all ranks follow one optimizer.
    """

    def __init__(
        self,
        params: Params,
        defaults: dict[str, Any],
        make_update: MakeUpdate,
        check_options: CheckOptions,
        *,
        reducer: str | ReducerFactory,
        comm: str | Communicator,
        trainer: MetricLists | None,
        norm_clip: float | None,
        bucket_cap_mb: float,
        dense_vectors: bool,
        overlap: bool,
        settings: Settings | None,
        keywords: SettingsKeywords,
    ) -> None:
        check_options(defaults)
        check_norm_clip(norm_clip)
        check_bucket_cap(bucket_cap_mb)
        Optimizer.__init__(self, params.named_parameters() if isinstance(params, Module) else params, defaults)
        for group in self.param_groups:
            check_options(group)
        self._check_options = check_options
        self._option_names = tuple(defaults)  # torch adds some of its own when a state is loaded
        named = _named(self.param_groups)
        place = {id(p): at for at, group in enumerate(self.param_groups) for p in group["params"]}
        allreducer = AllReducer(reducer, comm=comm, trainer=trainer, exchanges="updates", settings=settings, **keywords)
        groups = make_groups(named, bucket_cap_mb, dense_vectors, lambda p: place[id(p)], torch.float32)
        self._norm_clip = norm_clip
        self._updates = {g.layout: make_update(g.layout, g.flat.device, allreducer.comm.size) for g in groups}
        self._options_of = {g.layout: place[id(g.parameters[0])] for g in groups}
        self._rounding = {
            g.layout: torch.zeros_like(g.flat) for g in groups if g.parameters[0].dtype in (torch.bfloat16, torch.half)
        }
        """What the parameters' dtype rounds away, so that small changes add up. The same on all ranks."""
        self._begun: dict[Layout, dict[str, Any]] = {}
        """The options that each group was handed in with."""
        self._done: dict[Layout, StepStats] = {}
        self._connect(allreducer, named, groups)
        self._models = QuietModels([p for _, p in named], allreducer.comm.size)
        self._hooks.append(self._models)
        self._watch_gradients(overlap and norm_clip is None)  # clipping needs all gradients

    # --- a step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Apply what all ranks agreed on to the parameters; left out where all ranks skip (policy `skip`).

        Args:
            closure: Is called once, before anything else.

        Returns:
            What `closure` returned, or None.

        Raises:
            NonFiniteGradientError: On every rank alike, see AllReducer.reduce.
            RuntimeError: What went wrong in the background, or gradients or options that were changed after the
                gradients were handed in.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_nothing_changed()
        self._hand_in(self._norm_clip, (p for group in self.param_groups for p in group["params"]))
        if self._overlap and not self._models:  # DDP writes the gradients again
            for group in self._groups:
                group.check_versions("set norm_clip, or overlap=False to change gradients before step()")
        with torch.no_grad():
            for group in self._groups:
                self._move(group)
        self._done.clear()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._refuse_zeroing("call step() first")
        if self._arrived and not self._thread.failed:
            self.allreducer.busy = False
        self._arrived = False
        self._forget_ready()
        super().zero_grad(set_to_none)

    def _move(self, group: Group) -> None:
        update, unused = self._updates[group.layout], frozenset(self._done[group.layout].unused)
        if self.allreducer.last_step_skipped or len(unused) == len(group.parameters):
            update.roll_back()
            return
        taking_part = [
            (slot, parameter.data, view)
            for slot, parameter, view in zip(group.layout.slots, group.parameters, group.views, strict=True)
            if slot.name not in unused
        ]
        slots, parameters, changes = (list(each) for each in zip(*taking_part, strict=True))
        rounding = self._rounding.get(group.layout)
        if rounding is None:
            update.decay(slots, parameters)
            torch._foreach_sub_(parameters, changes)  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
        else:
            left = [slot.part(rounding).view(p.shape) for slot, p in zip(slots, parameters, strict=True)]
            exact = [p.float() + rest for p, rest in zip(parameters, left, strict=True)]
            update.decay(slots, exact)
            for parameter, rest, whole, change in zip(parameters, left, exact, changes, strict=True):
                whole -= change
                parameter.copy_(whole)
                rest.copy_(whole - parameter.float())
        update.commit(self._done[group.layout].phase, unused)

    def _is_accumulating(self) -> bool:
        under_no_sync = self._models.is_accumulating()  # asked first, because it looks for models that came later
        return under_no_sync or self.local

    def _options_now(self, group: Group) -> dict[str, Any]:
        options = self.param_groups[self._options_of[group.layout]]
        return {key: float(value) if isinstance(value := options[key], Tensor) else value for key in self._option_names}

    def _check_nothing_changed(self) -> None:
        """Updates were made of the gradients while backward ran; elsewhere, or on other ranks, it may be done now."""
        for group in self._groups[: len(self._tickets)]:
            now = self._options_now(group)
            for key, begun in self._begun[group.layout].items():
                if now[key] != begun:
                    raise RuntimeError(
                        f"{key} was changed from {begun!r} to {now[key]!r} after backward() had begun to reduce "
                        "updates made with it: change it before backward(), or set overlap=False"
                    )

    def _submit(self, group: Group) -> None:
        self._begun[group.layout] = self._options_now(group)
        self._updates[group.layout].begin(self._begun[group.layout])
        group.mark_versions()
        super()._submit(group)

    def _reduce(self, group: Group, bucket: Bucket) -> None:
        self._done[group.layout] = self.allreducer.reduce(bucket, self._updates[group.layout])

    def _prepare(self, group: Group, bucket: Bucket) -> None:
        self.allreducer.prepare(bucket, self._updates[group.layout])

    def _forget_step(self) -> None:
        for update in self._updates.values():
            update.roll_back()
        self._done.clear()
        super()._forget_step()

    # --- the face of a torch optimizer

    def state_dict(self) -> dict[str, Any]:
        """What is the same on all ranks, in torch's form. `training_state_dict` has this rank's own part beside it.

        Raises:
            RuntimeError: Between backward and step.
        """
        if self._arrived or self._tickets:
            raise RuntimeError("state_dict() between backward() and step(): call it after step()")
        by_parameter = {
            id(parameter): self._state_of(group, slot)
            for group in self._groups
            for slot, parameter in zip(group.layout.slots, group.parameters, strict=True)
        }
        everything = [p for group in self.param_groups for p in group["params"]]
        state = {at: by_parameter[id(p)] for at, p in enumerate(everything) if id(p) in by_parameter}
        return {"state": state, "param_groups": super().state_dict()["param_groups"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, whatever the groups were then; what is owed stays as it is.

        Raises:
            ValueError: The state of another model or optimizer.
        """
        states = self._checked(state_dict)
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        for layout, by_name in states.items():
            self._updates[layout].load_state(by_name)
            rounding = self._rounding.get(layout)
            if rounding is not None:
                for slot in layout.slots:
                    slot.part(rounding).copy_(by_name[slot.name]["rounding"].flatten())

    def load_training_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `training_state_dict` was taken, also after an error.

        Raises:
            ValueError: The state of another rank, world, reducer, model or optimizer; nothing was changed.
        """
        for key in ("optimizer", "allreducer"):
            if not isinstance(state.get(key), Mapping):
                raise ValueError(
                    f"the saved state has {key}={state.get(key)!r}: it is not that of training_state_dict()"
                )
        self._checked(state["optimizer"])
        sizes = {slot.name: slot.numel for group in self._groups for slot in group.layout.slots}
        for kind in ("residual", "velocity", "carried"):
            for name, value in state["allreducer"].get("feedback", {}).get(kind, {}).items():
                if sizes.get(name) != value.numel():
                    raise ValueError(f"the saved {kind} of {name!r} has {value.numel()} elements, {_has(name, sizes)}")
        super().load_training_state_dict(state)

    def _checked(self, state_dict: Mapping[str, Any]) -> dict[Layout, dict[str, Mapping[str, Any]]]:
        """What a saved state has for each group; ValueError where it is of another model or optimizer."""
        for key in ("state", "param_groups"):
            if key not in state_dict:
                raise ValueError(f"the saved state has no {key!r}: it is not that of state_dict()")
        saved_groups = cast("list[dict[str, Any]]", state_dict["param_groups"])
        sizes, found = ([len(group["params"]) for group in groups] for groups in (self.param_groups, saved_groups))
        if sizes != found:
            raise ValueError(
                f"the saved param groups have {found} parameters, mine have {sizes}: it is of another model"
            )
        for mine, group in zip(self.param_groups, saved_groups, strict=True):
            for key in self._option_names:
                if key not in group:
                    raise ValueError(f"the saved param groups have no {key!r}: they are of another optimizer")
            self._check_options(group)
            names = zip(mine.get("param_names", ()), group.get("param_names", ()), strict=False)
            for name, other in names:
                if name != other:
                    raise ValueError(
                        f"the saved state has {other!r} where {name!r} is expected: it is of another model"
                    )
        everything = [p for group in self.param_groups for p in group["params"]]
        saved = cast("Mapping[int, Mapping[str, Any]]", state_dict["state"])
        by_parameter = {id(p): saved[at] for at, p in enumerate(everything) if at in saved}
        return {
            group.layout: _states_of(
                group,
                by_parameter,
                [*self._updates[group.layout].kept, *(["rounding"] if group.layout in self._rounding else [])],
            )
            for group in self._groups
        }

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "allreducer"):
            raise ValueError("add_param_group() after construction: pass all param groups when you make the optimizer")
        super().add_param_group(param_group)

    def _state_of(self, group: Group, slot: Slot) -> dict[str, Any]:
        rounding = self._rounding.get(group.layout)
        rest = {} if rounding is None else {"rounding": slot.part(rounding).clone()}
        return self._updates[group.layout].state_of(slot) | rest


def flag(options: Mapping[str, Any], key: str) -> bool:
    if not isinstance(options[key], bool):
        raise ValueError(f"{key}={options[key]!r}: must be True or False")
    return options[key]


def number(options: Mapping[str, Any], key: str, least: float, below: float = float("inf")) -> float:
    """An option of a param group, which may be a tensor; ValueError where it is not in [least, below)."""
    try:
        value = float(options[key])
    except (TypeError, ValueError):
        value = float("nan")
    if not least <= value < below:
        span = (
            f"a finite number, at least {least:g}" if below == float("inf") else f"a number in [{least:g}, {below:g})"
        )
        raise ValueError(f"{key}={options[key]!r}: must be {span}")
    return value


def _named(param_groups: list[dict[str, Any]]) -> Named:
    """The parameters that require a gradient, with their names; without names they are numbered, frozen ones too."""
    named: Named = []
    count = 0
    for group in param_groups:
        names = group.get("param_names") or [f"parameter_{count + at}" for at in range(len(group["params"]))]
        named += [(name, p) for name, p in zip(names, group["params"], strict=True) if p.requires_grad]
        count += len(names)
    check_names([name for name, _ in named])
    for name, parameter in named:
        if not parameter.is_floating_point():
            raise ValueError(f"{name!r} is of {parameter.dtype}: only real parameters can be trained")
    if not named:
        raise ValueError("the optimizer has no parameter that requires a gradient")
    return named


def _states_of(
    group: Group, by_parameter: Mapping[int, Mapping[str, Any]], keys: Sequence[str]
) -> dict[str, Mapping[str, Any]]:
    states: dict[str, Mapping[str, Any]] = {}
    pairs: Iterable[tuple[Slot, Parameter]] = zip(group.layout.slots, group.parameters, strict=True)
    for slot, parameter in pairs:
        state = by_parameter.get(id(parameter))
        if state is None:
            raise ValueError(f"the saved state has nothing for {slot.name!r}: it is of another model")
        for key in keys:
            if key not in state:
                raise ValueError(
                    f"the saved state of {slot.name!r} has no {key!r}: it is of another optimizer or dtype"
                )
        for key, value in state.items():
            if isinstance(value, Tensor) and value.numel() != slot.numel:
                raise ValueError(
                    f"the saved {key} of {slot.name!r} has {value.numel()} elements, the parameter has {slot.numel}: "
                    "it is of another model"
                )
        states[slot.name] = state
    return states


def _has(name: str, sizes: Mapping[str, int]) -> str:
    mine = f"the parameter has {sizes[name]}" if name in sizes else "and there is no such parameter"
    return f"{mine}: it is of another model"
