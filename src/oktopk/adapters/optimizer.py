"""DistributedOptimizer: any torch optimizer, with gradients averaged over all ranks before its step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, Unpack

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from oktopk.adapters.grouped import (
    OverlappingOptimizer,
    WrappingOptimizer,
    check_bucket_cap,
    check_norm_clip,
    named_parameters_of,
)
from oktopk.adapters.grouping import Group, make_groups
from oktopk.allreducer import AllReducer
from oktopk.bucket import Bucket
from oktopk.comm.base import Communicator
from oktopk.metrics.trainer_lists import MetricLists
from oktopk.reduce.description import ReducerFactory
from oktopk.settings import Settings, SettingsKeywords, lists_settings

logger = logging.getLogger("oktopk")


class DistributedOptimizer(WrappingOptimizer, OverlappingOptimizer):
    """Wraps any torch optimizer; its own step is what updates the parameters.

    While backward runs, each full group of gradients is reduced by a background thread; `step()` waits for them,
    replaces every `.grad` by the mean, and calls the wrapped step. Replicas must start equal: construct them from
    one seed or call `broadcast_parameters()`.

    To look at or change gradients between backward and step, call `synchronize()` first.

    Attributes:
        allreducer: The AllReducer that the gradients pass.
        local: Set it to True to accumulate: backward then only adds to `.grad`, until one runs with `local = False`.

    Example:
        >>> optimizer = oktopk.DistributedOptimizer(
        ...     torch.optim.SGD(model.parameters(), lr=0.1),
        ...     model.named_parameters(),
        ...     density=0.01,
        ...     momentum_correction=0.9,
        ... )
        >>> loss.backward()
        >>> optimizer.step()
    """

    @lists_settings
    def __init__(  # the base class would take over the parameters: the wrapped optimizer keeps them
        self,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, Parameter]],
        reducer: str | ReducerFactory = "oktopk",
        *,
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
            optimizer: The optimizer that updates the parameters.
            named_parameters: `model.named_parameters()` of the whole model.
            reducer: A name from the registry, or a function that makes a Reducer from ReducerSettings.
            comm: "auto", "torch", "mpi" or a Communicator, see AllReducer.
            trainer: Its lists `sparsities`, `compression_ratios` and `communication_sizes` are filled.
            norm_clip: Scale this rank's gradient to at most this norm before it is compressed. Reductions then start
                when backward has ended.
            bucket_cap_mb: The largest group of gradients that is reduced together, in MiB.
            dense_vectors: Never compress parameters of one dimension: biases and norm layers.
            settings: All settings in one object; or give them as keywords, which override it:
            **keywords: See Settings.

        Raises:
            ValueError: Parameters without a name or with one name twice, ranks with other parameters, LBFGS, an unknown
                name or setting, or a value that cannot be.
        """
        check_norm_clip(norm_clip)
        check_bucket_cap(bucket_cap_mb)
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("LBFGS evaluates its closure several times in a step: it cannot be wrapped")
        named = named_parameters_of(optimizer, named_parameters)
        self._inner = optimizer
        self._norm_clip = norm_clip
        self._unused: set[str] = set()
        self._synchronized = False
        allreducer = AllReducer(reducer, comm=comm, trainer=trainer, settings=settings, **keywords)
        self._connect(allreducer, named, make_groups(named, bucket_cap_mb, dense_vectors))
        self._warn_of_memory()
        self._watch_gradients(overlap=norm_clip is None)  # clipping needs all gradients

    # --- a step

    def synchronize(self) -> None:
        """Wait until every `.grad` is the mean over all ranks. `step()` does it, unless you did to look at them.

        Raises:
            NonFiniteGradientError: On every rank alike, see AllReducer.reduce.
            RuntimeError: What went wrong in the background, or gradients that were changed meanwhile.
        """
        if self._synchronized:
            return
        self._hand_in(self._norm_clip, (p for group in self._inner.param_groups for p in group["params"]))
        skipped, unused = self.allreducer.last_step_skipped, frozenset(self._unused)
        for group in self._groups:
            group.check_versions("call synchronize() before you clip or scale gradients, then step()")
            group.hand_back(frozenset(slot.name for slot in group.layout.slots) if skipped else unused)
        self._unused.clear()
        self._synchronized = True
        self.allreducer.busy = True  # what was reduced is in no parameter yet

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take the wrapped optimizer's step on the averaged gradients; left out where all ranks skip (policy `skip`).

        Args:
            closure: Is called once, before the gradients are awaited.

        Returns:
            What `closure` returned, or None.

        Raises:
            NonFiniteGradientError: On every rank alike, see AllReducer.reduce.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.synchronize()
        self._synchronized = self.allreducer.busy = False
        if not self.allreducer.last_step_skipped:
            self._inner.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._refuse_zeroing("call step() or synchronize() first")
        if (self._synchronized or self._arrived) and not self._thread.failed:
            self.allreducer.busy = False
        self._synchronized = self._arrived = False
        self._forget_ready()
        self._inner.zero_grad(set_to_none)

    @property
    def _takes_gradients(self) -> bool:
        return not self._synchronized

    def _reduce(self, group: Group, bucket: Bucket) -> None:
        del group
        self._unused.update(self.allreducer.reduce(bucket).unused)

    def _submit(self, group: Group) -> None:
        group.mark_versions()
        super()._submit(group)

    def _forget_step(self) -> None:
        self._unused.clear()
        self._synchronized = False
        super()._forget_step()

    # --- what users ask for

    def _warn_of_memory(self) -> None:
        """An optimizer that remembers gradients takes a sum of many that arrives at once for one large gradient."""
        if self.allreducer.reducer == "dense" or self.allreducer.comm.rank != 0:
            return
        momentum = next((group["momentum"] for group in self._inner.param_groups if group.get("momentum")), None)
        if momentum and not self.allreducer.settings.momentum_correction:
            logger.warning(
                "the optimizer has momentum %g behind a sparse reducer, which trains worse than dense: give the "
                "optimizer momentum 0 and set momentum_correction=%g",
                momentum,
                momentum,
            )
        if any("betas" in group for group in self._inner.param_groups):
            kind = type(self._inner).__name__
            better = "oktopk.optim.AdamW" if kind in ("Adam", "AdamW") else "oktopk.LocalSteps with every=1"
            logger.warning("%s behind a sparse reducer trains worse than dense: use %s", kind, better)

    # --- the face of a torch optimizer

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state alone. `training_state_dict` has the residuals beside it.

        Raises:
            RuntimeError: Between backward and step.
        """
        if self._arrived or self._synchronized:
            raise RuntimeError("state_dict() between backward() and step(): call it after step()")
        return self._inner.state_dict()

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.allreducer.reducer}, {self._inner!r})"
