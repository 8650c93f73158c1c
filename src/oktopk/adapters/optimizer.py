"""DistributedOptimizer: any torch optimizer, with gradients averaged over all ranks before its step."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from oktopk.adapters.grouping import Pack, make_packs
from oktopk.adapters.reduction_thread import ReductionWorker, Ticket
from oktopk.allreducer import AllReducer, Listener
from oktopk.bucket import Bucket
from oktopk.comm.base import Communicator, all_gather_int
from oktopk.metrics.trainer_lists import MetricLists
from oktopk.registry import ReducerFactory

_STATE_KEY = "oktopk"


class DistributedOptimizer(Optimizer):
    """Wraps `optimizer`; its own step is what updates the parameters.

    While backward runs, each full bucket of gradients is reduced by a background thread; `step()` waits for them,
    replaces every `.grad` by the mean, and calls the wrapped step. Replicas must start equal: construct them from
    one seed or call `broadcast_parameters()`. Settings are those of `oktopk.settings.Settings`.

    Set `local = True` to accumulate: backward then only adds to `.grad`, until one runs with `local = False`.
    To look at or change gradients between backward and step, call `synchronize()` first.
    """

    def __init__(  # the base class would take over the parameters: the wrapped optimizer keeps them
        self,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, Parameter]],
        compressor: str | ReducerFactory = "oktopk",
        *,
        comm: str | Communicator = "auto",
        trainer: MetricLists | None = None,
        norm_clip: float | None = None,
        bucket_cap_mb: float = 25.0,
        dense_vectors: bool = False,
        **settings: Any,
    ) -> None:
        if norm_clip is not None and not norm_clip > 0:
            raise ValueError(f"norm_clip={norm_clip!r}: must be a positive norm, or None for no clipping")
        if not bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb={bucket_cap_mb!r}: must be positive")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("LBFGS evaluates its closure several times in a step: it cannot be wrapped")
        named = _named_parameters_of(optimizer, named_parameters)
        self._inner = optimizer
        self._norm_clip = norm_clip
        self.allreducer = AllReducer(compressor, comm=comm, trainer=trainer, **settings)
        self._owns_comm = isinstance(comm, str)
        _check_same_model(named, self.allreducer.comm)
        self._packs = make_packs(named, bucket_cap_mb, dense_vectors)
        self._pack_of = {
            id(p): (pack, slot.name)
            for pack in self._packs
            for slot, p in zip(pack.slots, pack.parameters, strict=True)
        }
        self.local = False
        self._worker = ReductionWorker()
        self._tickets: list[Ticket] = []
        self._unused: set[str] = set()
        self._synchronized = False
        self._hooks: list[RemovableHandle] = [p.register_post_accumulate_grad_hook(self._on_gradient) for _, p in named]

    # --- a step

    def synchronize(self) -> None:
        """Wait until every `.grad` is the mean over all ranks. `step()` does it, unless you did to look at them.

        Raises what went wrong in the background.
        """
        if self._synchronized:
            return
        self._refuse_strangers()
        if self._norm_clip is not None:
            self._clip(self._norm_clip)
        for pack in self._packs[len(self._tickets) :]:
            self._submit(pack)
        self._tickets.append(self._worker.submit(self.allreducer.end_step))
        tickets, self._tickets = self._tickets, []
        for pack in self._packs:
            pack.ready.clear()
        for ticket in tickets:
            ticket.wait()
        skipped, unused = self.allreducer.last_step_skipped, frozenset(self._unused)
        for pack in self._packs:
            pack.hand_back(frozenset(slot.name for slot in pack.slots) if skipped else unused)
        self._unused.clear()
        self._synchronized = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The wrapped optimizer's step on the averaged gradients; left out where all ranks skip (policy `skip`).

        A `closure` is called once, before the gradients are awaited.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.synchronize()
        self._synchronized = False
        if not self.allreducer.last_step_skipped:
            self._inner.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._tickets:
            raise RuntimeError("zero_grad() while gradients are being reduced: call step() or synchronize() first")
        self._synchronized = False
        self._inner.zero_grad(set_to_none)

    def _on_gradient(self, parameter: Tensor) -> None:
        """Called by autograd when a parameter's gradient is complete."""
        pack, name = self._pack_of[id(parameter)]
        if name in pack.ready or self._synchronized:
            raise RuntimeError(
                f"a second backward() reached {name!r} before step(): set `local = True` for all but the last "
                "backward of a step"
            )
        if self.local or self._norm_clip is not None:  # clipping needs all gradients: they go at synchronize()
            return
        pack.ready.add(name)
        # In the order of the buckets, which is the same on all ranks, whatever the order of the gradients.
        while len(self._tickets) < len(self._packs):
            following = self._packs[len(self._tickets)]
            if len(following.ready) < len(following.slots):
                break
            self._submit(following)

    def _refuse_strangers(self) -> None:
        """A parameter that was frozen when it was wrapped has no place in the packs: it would train on its own."""
        for group in self._inner.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and id(parameter) not in self._pack_of:
                    raise RuntimeError(
                        f"a parameter of shape {tuple(parameter.shape)} got a gradient but required none when the "
                        "optimizer was wrapped: unfreeze parameters first, then wrap"
                    )

    def _submit(self, pack: Pack) -> None:
        pack.mark_versions()

        filled: list[Bucket] = []

        def prepare() -> None:
            filled.append(pack.fill())
            self.allreducer.prepare(filled[0])

        def job() -> None:
            bucket = filled[0] if filled else pack.fill()
            self._unused.update(self.allreducer.reduce(bucket).unused)

        self._tickets.append(self._worker.submit(job, prepare=prepare))

    def _clip(self, limit: float) -> None:
        """Scale this rank's gradients to a joint norm of at most `limit`. A non-finite norm scales nothing: the
        reduction then names the parameter at fault."""
        gradients = [p.grad for pack in self._packs for p in pack.parameters if p.grad is not None]
        if not gradients:
            return
        norm = float(torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt())  # one wait for a GPU
        if limit < norm < math.inf:
            for gradient in gradients:
                gradient.mul_(limit / norm)

    # --- what users ask for

    def set_trainer(self, trainer: MetricLists) -> None:
        self.allreducer.set_trainer(trainer)

    def add_listener(self, listener: Listener) -> None:
        self.allreducer.add_listener(listener)

    def broadcast_parameters(self, root: int = 0) -> None:
        """Overwrite the parameters with those of rank `root`. Nothing else is ever broadcast."""
        with torch.no_grad():
            for pack in self._packs:
                for parameter in pack.parameters:
                    self.allreducer.comm.broadcast(parameter.data, root)

    def stop(self) -> None:
        """End the background thread and release the communicator. The wrapped optimizer stays usable."""
        for hook in self._hooks:
            hook.remove()
        self._worker.stop()
        if self._owns_comm:
            self.allreducer.close()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by torch.amp.GradScaler, whose losses and skipped steps other ranks would know nothing of."""
        raise RuntimeError("GradScaler does not work with DistributedOptimizer: train in bf16, which needs no scaling")

    # --- the face of a torch optimizer

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, and beside it this rank's residuals and thresholds."""
        return {**self._inner.state_dict(), _STATE_KEY: self.allreducer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what `state_dict()` gave; a plain optimizer's state leaves the residuals as they are."""
        plain = {key: value for key, value in state_dict.items() if key != _STATE_KEY}
        if _STATE_KEY in state_dict:
            self.allreducer.load_state_dict(state_dict[_STATE_KEY])
        self._inner.load_state_dict(plain)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        del param_group
        raise ValueError("add_param_group() after wrapping: add it to the optimizer first, then wrap")

    def __getattr__(self, name: str) -> Any:
        """param_groups, state, defaults and whatever else the wrapped optimizer has."""
        if name == "_inner":  # not constructed yet
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.allreducer.compressor}, {self._inner!r})"


def _named_parameters_of(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, Parameter]]
) -> list[tuple[str, Parameter]]:
    """The trainable parameters that the optimizer updates, with their names."""
    wanted = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    named = [(name, p) for name, p in named_parameters if id(p) in wanted]
    names = [name for name, _ in named]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"named_parameters holds {twice[0]!r} twice: every parameter needs a name of its own")
    if len(named) != len(wanted):
        raise ValueError(
            f"the optimizer updates {len(wanted)} parameters, named_parameters names {len(named)} of them: "
            "pass model.named_parameters() of the whole model"
        )
    if not named:
        raise ValueError("the optimizer has no parameter that requires a gradient")
    return named


def _check_same_model(named: list[tuple[str, Parameter]], comm: Communicator) -> None:
    description = ";".join(f"{name} {tuple(p.shape)} {p.dtype}" for name, p in named)
    found = all_gather_int(comm, zlib.crc32(description.encode()), named[0][1].device)
    odd = [rank for rank, value in enumerate(found) if value != found[0]]
    if odd:
        raise ValueError(f"rank(s) {odd} hold other parameters (names, shapes or dtypes) than rank 0")
