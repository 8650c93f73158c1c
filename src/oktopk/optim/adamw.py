"""AdamW whose update travels: the non-linear part stands before the exchange."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from oktopk.bucket import Layout, Slot
from oktopk.comm.base import Communicator
from oktopk.kernels.base import UpdateRule
from oktopk.metrics.trainer_lists import MetricLists
from oktopk.optim.base import Params, UpdateOptimizer, flag, number
from oktopk.reduce.base import Phase
from oktopk.reduce.description import ReducerFactory
from oktopk.settings import Settings, SettingsKeywords, lists_settings

_MEASUREMENTS = 32
"""Of the second moment in the first _SOON sparse steps, and then in every time that is e times as long."""
_SOON = 1024
_FEWEST = 20
"""Single gradients are noisy: a measurement counts for no more than one of so many, or of 1 / (1 - beta2)."""
_FLOOR = 0.1
"""Of the root mean square of a parameter's denominators: in sparse steps none is smaller."""
_UNSEEN = 2.0**-26
"""A part of the momentum that fp32 does not see."""


class AdamW(UpdateOptimizer):
    """torch.optim.AdamW on many ranks that exchange about 1 % of their updates, and train almost as well as dense.

    Every rank has a momentum of its own and all share one second moment, so a rank's update is a linear map of its
    gradients, the same map on all ranks:

    1. The momentum of this rank: `m = beta * m + (1 - beta) * gradient`, with `sparse_beta1` for `beta`: what is owed
       adds up over about 1 / density steps and is a momentum of its own.
    2. Its update: `lr * m / (sqrt(v) + eps)`, with Adam's corrections of bias, added to what this rank owes.
    3. The reducer applies the largest sums over all ranks; what is not applied stays owed, in units of the parameters.
    4. Where anything was applied, every rank clears its momentum: what it would have added is on its way already.
    5. Decay is dense and local: `parameter *= 1 - lr * weight_decay`.

    `v` is measured in dense steps, which exchange the mean gradient: in the first `warmup_steps`, and then, beside a
    sparse update, in every 32nd step at first and more and more rarely after a thousand. In sparse steps a denominator
    is at least a tenth of the root mean square of all in its parameter. A parameter that is used for the first time
    later waits for a step, in which it is measured. With density 1.0 every step is dense and this is torch.optim.AdamW
    on the mean gradient.

    While backward runs, full groups are reduced by a background thread. It works on a plain model, under any launcher
    that AllReducer knows, and on a DDP model, whose own exchange it switches off; under DDP's `no_sync()` gradients
    accumulate. Replicas must start equal: DDP sees to that, else call `broadcast_parameters()`.

    Attributes:
        allreducer: The AllReducer that the updates pass.
        local: Set it to True to accumulate: backward then only adds to `.grad`, until one runs with `local = False`.

    Example:
        >>> optimizer = oktopk.optim.AdamW(model.named_parameters(), lr=1e-3, density=0.01, norm_clip=1.0)
        >>> loss.backward()
        >>> optimizer.step()
    """

    @lists_settings
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        sparse_beta1: float = 0.5,
        maximize: bool = False,
        reducer: str | ReducerFactory = "oktopk",
        comm: str | Communicator = "auto",
        trainer: MetricLists | None = None,
        norm_clip: float | None = None,
        bucket_cap_mb: float = 25.0,
        dense_vectors: bool = False,
        overlap: bool = True,
        settings: Settings | None = None,
        **keywords: Unpack[SettingsKeywords],
    ) -> None:
        """Make the optimizer; a collective call.

        Args:
            params: `model.named_parameters()`, a model, or param groups as torch has them. Names are for messages and
                saved states; parameters without names are numbered.
            lr: Learning rate; that of dense training, or three quarters of it. Groups and schedulers may change it.
            betas: How slowly the momentum and the second moment follow.
            eps: Added to the denominator.
            weight_decay: Decoupled: `parameter *= 1 - lr * weight_decay` in every step.
            sparse_beta1: Takes the place of `betas[0]` in sparse steps.
            maximize: Go up instead of down.
            reducer: A name from the registry, or a function that makes a Reducer from ReducerSettings.
            comm: "auto", "torch", "mpi" or a Communicator, see AllReducer.
            trainer: Its lists `sparsities`, `compression_ratios` and `communication_sizes` are filled.
            norm_clip: Scale this rank's gradient to at most this norm before the update is made of it. Reductions then
                start with `step()`.
            bucket_cap_mb: The largest group of parameters that is reduced together, in MiB.
            dense_vectors: Never compress parameters of one dimension: biases and norm layers.
            overlap: Reduce while backward runs. False: reductions start with `step()`, so that gradients may be
                accumulated, clipped and changed before it.
            settings: All settings in one object; or give them as keywords, which override it:
            **keywords: See Settings.

        Raises:
            ValueError: Names that stand twice, ranks with other parameters, an unknown name or setting, or a value that
                cannot be.
        """
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "sparse_beta1": sparse_beta1, "maximize": maximize,
        }  # fmt: skip
        super().__init__(
            params,
            defaults,
            _AdamUpdate,
            _Options,
            reducer=reducer,
            comm=comm,
            trainer=trainer,
            norm_clip=norm_clip,
            bucket_cap_mb=bucket_cap_mb,
            dense_vectors=dense_vectors,
            overlap=overlap,
            settings=settings,
            keywords=keywords,
        )


class _Options:
    """One step's options, checked."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.lr = number(options, "lr", 0.0)
        self.eps = number(options, "eps", 0.0)
        self.weight_decay = number(options, "weight_decay", 0.0)
        self.sparse_beta1 = number(options, "sparse_beta1", 0.0, 1.0)
        self.sign = -1.0 if flag(options, "maximize") else 1.0
        try:
            self.beta1, self.beta2 = (float(beta) for beta in options["betas"])
            inside = 0.0 <= self.beta1 < 1.0 and 0.0 <= self.beta2 < 1.0
        except (TypeError, ValueError):
            inside = False
        if not inside:
            raise ValueError(f"betas={options['betas']!r}: must be two numbers in [0, 1)")


class _SecondMoment:
    """The mean square of the mean gradient. `unknown`: for each parameter, the part that no measurement has filled."""

    def __init__(self, square: Tensor, unknown: tuple[float, ...]) -> None:
        self.square = square
        self.unknown = unknown

    def measured(self, slots: Sequence[Slot], mean: Tensor, unused: Sequence[Slot], weight: float) -> _SecondMoment:
        square = self.square.mul(1.0 - weight).addcmul_(mean, mean, value=weight)
        for slot in unused:
            slot.part(square).copy_(slot.part(self.square))
        idle = {slot.name for slot in unused}
        parts = zip(slots, self.unknown, strict=True)
        return _SecondMoment(square, tuple(part * (1.0 if s.name in idle else 1.0 - weight) for s, part in parts))

    def factor(self, slots: Sequence[Slot], eps: float, floor: float, gains: tuple[float, ...]) -> Tensor:
        """gain / (sqrt(v) + eps), and zero for a parameter that was never measured: it waits until it is.

        `floor`: the least sqrt(v), as a part of its root mean square over the parameter.
        """
        factor = self.square.sqrt()
        for slot, unknown, gain in zip(slots, self.unknown, gains, strict=True):
            root = slot.part(factor)
            if unknown == 1.0:
                root.zero_()
                continue
            root.div_(math.sqrt(1.0 - unknown))
            if floor:
                root.clamp_(min=floor * root.square().mean().sqrt())
            root.add_(eps).reciprocal_()
            if gain != 1.0:
                root.mul_(gain)
        return factor


class _AdamUpdate:
    """One group's part of AdamW. See `oktopk.optim.base.GroupUpdate`."""

    def __init__(self, layout: Layout, device: torch.device, num_ranks: int) -> None:
        self._slots = layout.slots
        self._num_ranks = num_ranks
        all_unknown = (1.0,) * len(layout.slots)
        self._second = _SecondMoment(torch.zeros(layout.numel, device=device), all_unknown)
        self._num_steps = (0,) * len(layout.slots)
        """That each parameter took part in."""
        self._num_dense = (0,) * len(layout.slots)
        """How many of them were dense."""
        self._num_sparse = 0
        """Sparse steps since the last dense one."""
        self._gap = 0
        """Steps since the second moment was measured."""
        self._factor: Tensor | None = None
        self._made_with: tuple[object, ...] = ()
        """What the factor was made with, beside the second moment."""
        self._measured: _SecondMoment | None = None
        """In this step."""
        self._options: _Options

    # --- a step

    def begin(self, options: Mapping[str, Any]) -> None:
        self._options = _Options(options)

    @property
    def wants_mean(self) -> bool:
        """When it is due, and while a parameter waits that was used but never measured.

        One that was never used does not wait: where one is never used, every step would exchange the mean.
        """
        parts = zip(self._num_steps, self._second.unknown, strict=True)
        waits = any(steps > 0 and unknown == 1.0 for steps, unknown in parts)
        return waits or is_due(self._num_sparse + 1)

    def learn(self, mean: Tensor, unused: Sequence[Slot]) -> None:
        beta2 = self._options.beta2
        weight = min(1.0 - beta2 ** (self._gap + 1), max(1.0 - beta2, 1.0 / _FEWEST))
        self._measured = self._second.measured(self._slots, mean, unused, weight)
        self._factor = None

    def rule(self, phase: Phase) -> UpdateRule:
        options, beta1 = self._options, self._beta1(phase)
        steps = zip(self._num_steps, self._num_dense, strict=True)
        # As torch has it: as if the betas had always been what they are now.
        filled = [1.0 - beta1 * options.beta1**dense * options.sparse_beta1 ** (n - dense) for n, dense in steps]
        most = max(filled)
        gains = tuple(1.0 if most - each < _UNSEEN else most / each for each in filled)
        floor = _FLOOR if phase == "sparse" else 0.0
        made_with = options.eps, floor, gains
        if self._factor is None or self._made_with != made_with:
            second = self._measured or self._second
            self._factor, self._made_with = second.factor(self._slots, *made_with), made_with
        return UpdateRule(
            momentum=beta1,
            gain=options.sign * (1.0 - beta1),
            scale=options.lr / most,
            factor=self._factor,
            cap=options.lr * self._cap,
        )

    def decay(self, slots: Sequence[Slot], parameters: Sequence[Tensor]) -> None:
        del slots
        kept = 1.0 - self._options.lr * self._options.weight_decay
        if kept != 1.0:
            torch._foreach_mul_(list(parameters), kept)  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]

    def commit(self, phase: Phase, unused: Collection[str]) -> None:
        took_part = [slot.name not in unused for slot in self._slots]
        self._num_steps = tuple(n + taking for n, taking in zip(self._num_steps, took_part, strict=True))
        if phase == "dense":
            self._num_dense = tuple(n + taking for n, taking in zip(self._num_dense, took_part, strict=True))
        self._num_sparse = 0 if phase == "dense" else self._num_sparse + 1
        self._gap = self._gap + 1 if self._measured is None else 0
        if self._measured is not None:
            self._second, self._measured = self._measured, None

    def roll_back(self) -> None:
        if self._measured is not None:
            self._measured = self._factor = None

    def _beta1(self, phase: Phase) -> float:
        return self._options.beta1 if phase == "dense" else self._options.sparse_beta1

    @property
    def _cap(self) -> float:
        """In units of lr: how far this rank alone may move a parameter, P times as far as Adam ever moves it.

        Adam's own bound, over all gradients there can be, is that of Cauchy and Schwarz. Here the second moment may
        have been measured long ago, when the parameter was still.
        """
        beta1, beta2 = self._options.beta1, self._options.beta2
        if beta2 <= beta1 * beta1:
            return math.inf
        furthest = (1.0 - beta1) / math.sqrt((1.0 - beta2) * (1.0 - beta1 * beta1 / beta2))
        return self._num_ranks * max(1.0, furthest)

    # --- states

    kept = ("step", "sparse_steps", "gap", "dense_steps", "square_unknown", "exp_avg_sq")

    def state_of(self, slot: Slot) -> dict[str, Any]:
        place = self._slots.index(slot)
        return {
            "step": self._num_steps[place],
            "sparse_steps": self._num_sparse,
            "gap": self._gap,
            "dense_steps": self._num_dense[place],
            "square_unknown": self._second.unknown[place],
            "exp_avg_sq": slot.part(self._second.square).clone(),
        }

    def load_state(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        mine = [states[slot.name] for slot in self._slots]
        self._num_steps = tuple(state["step"] for state in mine)
        self._num_sparse = max(state["sparse_steps"] for state in mine)
        self._gap = max(state["gap"] for state in mine)
        self._num_dense = tuple(state["dense_steps"] for state in mine)
        square = torch.cat([state["exp_avg_sq"].flatten() for state in mine]).to(self._second.square)
        self._second = _SecondMoment(square, tuple(state["square_unknown"] for state in mine))
        self._measured = self._factor = None


def is_due(num_sparse: int) -> bool:
    """Whether the second moment is measured in that sparse step, counted from 1 after the last dense one."""
    return num_sparse > 0 and _num_due(num_sparse) > _num_due(num_sparse - 1)


def _num_due(num_sparse: int) -> int:
    """How many measurements so many sparse steps have: as many in the first thousand as from one to 2.7 thousand."""
    lapse = num_sparse / _SOON
    return math.floor(_MEASUREMENTS * (lapse if lapse <= 1.0 else 1.0 + math.log(lapse)))
