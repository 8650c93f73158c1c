"""SGD whose update travels: the momentum and the learning rate stand before the exchange."""

from __future__ import annotations

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


class SGD(UpdateOptimizer):
    """torch.optim.SGD on many ranks that exchange about 1 % of their updates.

    Every rank has a momentum of its own, makes its update `lr * velocity` of its gradient, and adds it to what it owes;
    the reducer applies the largest sums over all ranks. Where anything was applied, every rank clears its momentum:
    what it would have added is on its way already. Weight decay passes a momentum that is the same on all ranks and is
    never exchanged. With density 1.0 every step is dense and this is torch.optim.SGD on the mean gradient.

    How it works with DDP, accumulation and states: see AdamW.

    Attributes:
        allreducer: The AllReducer that the updates pass.
        local: Set it to True to accumulate: backward then only adds to `.grad`, until one runs with `local = False`.

    Example:
        >>> optimizer = oktopk.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9, density=0.01)
        >>> loss.backward()
        >>> optimizer.step()
    """

    @lists_settings
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
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
            lr: Learning rate. Groups and schedulers may change it.
            momentum: How slowly the velocity follows the gradients; 0: none.
            dampening: Part of a gradient that does not go into the velocity, from the second step of its group on.
            weight_decay: Added to the gradient as `weight_decay * parameter`.
            nesterov: Look ahead.
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
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
            "nesterov": nesterov, "maximize": maximize,
        }  # fmt: skip
        super().__init__(
            params,
            defaults,
            _SgdUpdate,
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
        self.momentum = number(options, "momentum", 0.0, 1.0)
        self.dampening = number(options, "dampening", 0.0, 1.0)
        self.weight_decay = number(options, "weight_decay", 0.0)
        self.nesterov = flag(options, "nesterov")
        self.sign = -1.0 if flag(options, "maximize") else 1.0
        if self.nesterov and (not self.momentum or self.dampening):
            raise ValueError(
                f"nesterov=True with momentum={self.momentum:g} and dampening={self.dampening:g}: "
                "looking ahead needs a momentum and no dampening"
            )


class _SgdUpdate:
    """One group's part of SGD. See `oktopk.optim.base.GroupUpdate`.

    All of SGD is linear, so weight decay has a velocity of its own, made of the parameters, which all ranks have.
    """

    wants_mean = False

    def __init__(self, layout: Layout, device: torch.device, num_ranks: int) -> None:
        del num_ranks
        self._numel, self._device = layout.numel, device
        self._slots = layout.slots
        self._num_steps = 0
        self._decay_velocity: Tensor | None = None
        self._options: _Options

    # --- a step

    def begin(self, options: Mapping[str, Any]) -> None:
        self._options = _Options(options)

    def learn(self, mean: Tensor, unused: Sequence[Slot]) -> None:
        del mean, unused

    def rule(self, phase: Phase) -> UpdateRule:
        del phase
        options = self._options
        return UpdateRule(
            momentum=options.momentum,
            gain=options.sign * self._gain,
            scale=options.lr,
            nesterov=options.nesterov,
        )

    def decay(self, slots: Sequence[Slot], parameters: Sequence[Tensor]) -> None:
        options = self._options
        if not options.weight_decay and self._decay_velocity is None:
            return
        if not options.momentum:
            torch._foreach_mul_(list(parameters), 1.0 - options.lr * options.weight_decay)  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
            return
        if self._decay_velocity is None:
            self._decay_velocity = torch.zeros(self._numel, device=self._device)
        for slot, parameter in zip(slots, parameters, strict=True):
            velocity = slot.part(self._decay_velocity).view(parameter.shape)
            velocity.mul_(options.momentum).add_(parameter, alpha=self._gain * options.weight_decay)
            if options.nesterov:
                parameter.mul_(1.0 - options.lr * options.weight_decay)
                parameter.sub_(velocity, alpha=options.lr * options.momentum)
            else:
                parameter.sub_(velocity, alpha=options.lr)

    def commit(self, phase: Phase, unused: Collection[str]) -> None:
        del phase, unused
        self._num_steps += 1

    def roll_back(self) -> None:
        pass

    @property
    def _gain(self) -> float:
        """As in torch, without a momentum nothing is dampened."""
        return 1.0 if self._num_steps == 0 or not self._options.momentum else 1.0 - self._options.dampening

    # --- states

    kept = ("step",)

    def state_of(self, slot: Slot) -> dict[str, Any]:
        velocity = self._decay_velocity
        return {"step": self._num_steps} | ({} if velocity is None else {"decay_velocity": slot.part(velocity).clone()})

    def load_state(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        mine = [states[slot.name] for slot in self._slots]
        self._num_steps = max(state["step"] for state in mine)
        self._decay_velocity = None
        if any("decay_velocity" in state for state in mine):
            self._decay_velocity = torch.zeros(self._numel, device=self._device)
            for slot, state in zip(self._slots, mine, strict=True):
                if "decay_velocity" in state:
                    slot.part(self._decay_velocity).copy_(state["decay_velocity"].flatten())
