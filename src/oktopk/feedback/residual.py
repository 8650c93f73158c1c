"""Error feedback: what earlier steps did not apply is added to the next gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oktopk.bucket import Bucket, Slot
from oktopk.comm.base import Communicator
from oktopk.feedback.momentum import Momentum, put_back
from oktopk.feedback.named_buffers import NamedBuffers, Spare
from oktopk.kernels.base import UpdateRule, Velocity
from oktopk.kernels.by_device import DeviceKernels
from oktopk.reduce.base import DenseReduction, Reduction
from oktopk.select.base import Accumulated
from oktopk.select.bucket_selector import BucketSelector
from oktopk.sparse_vector import SparseVector, to_narrow

Update = Tensor | SparseVector


@dataclass
class Owed:
    """One bucket in one step: what is owed, this step's gradient included, until it is settled.

    Attributes:
        bucket: Whose it is.
        acc: What is owed.
        before: What was owed before this step, None: nothing. Not to be written into.
        velocity: The momentum that went into `acc`.
        held: Parameters that no rank has a gradient for. They take no part in this step.
        apart: `acc` is this step's alone: what was owed before is left as it is.
        carried: What earlier dense steps of updates rounded away, which went into this step's values.
        rounded: What this one rounds away.
    """

    bucket: Bucket
    acc: Accumulated
    before: Tensor | None
    velocity: Velocity | None
    held: Sequence[Slot] = ()
    apart: bool = False
    carried: Tensor | None = None
    rounded: Tensor | None = None

    def hold(self, slots: Sequence[Slot]) -> None:
        self.held = slots
        self.acc = self.acc.hold_out(slots)


class Residual:
    """What is owed, in fp32 for any gradient dtype, by parameter name. It belongs to the training, not to a process.

    `compensate`, then `retain`, then `commit` or `roll_back`: once each for every bucket and step. What is stored stays
    as it is until `commit`.
    """

    def __init__(self, kernels: DeviceKernels, momentum: Momentum) -> None:
        self._memory = NamedBuffers()
        self._carried = NamedBuffers()
        """What dense steps of updates rounded away of gradients: it goes into the next gradient."""
        self._momentum = momentum
        self._kernels = kernels
        self._spare = Spare()
        self._retained: list[tuple[Owed, Tensor | None]] = []

    def compensate(
        self, bucket: Bucket, selector: BucketSelector, k: int, limit: float, rule: UpdateRule | None = None
    ) -> Owed:
        """Add what is owed to the gradient, looking out for the k largest elements and for any beyond `limit`.

        With a rule, what it makes of the gradient and the velocity takes the gradient's place.
        """
        gradient, carried = self._with_carried(bucket)
        before = self._memory.get(bucket)
        before = None if before is None else before.to(gradient.device)
        velocity = None if rule is None else self._momentum.advance(bucket, rule)
        acc = selector.accumulate(before, gradient, self._spare.take(gradient), k, limit, velocity)
        return Owed(bucket, acc, before, velocity, carried=carried)

    def set_apart(self, bucket: Bucket, selector: BucketSelector, limit: float) -> Owed:
        """This step's values alone, which will all be applied: what is owed stays owed."""
        values, carried = self._with_carried(bucket)
        acc = selector.accumulate(None, values, self._spare.take(values), 0, limit)
        return Owed(bucket, acc, None, None, apart=True, carried=carried)

    def _with_carried(self, bucket: Bucket) -> tuple[Tensor, Tensor | None]:
        values, carried = bucket.flat.detach(), self._carried.get(bucket)
        return values if carried is None else values + carried, carried

    def follow(self, owed: Owed, mean: Tensor, rule: UpdateRule, comm: Communicator) -> Tensor:
        """In a dense step of updates: let the velocity follow the mean gradient; returns the change to apply."""
        owed.velocity, change = self._momentum.follow(owed.bucket, mean, rule, comm)
        for slot in owed.held:
            put_back(slot, owed.velocity.old, owed.velocity.new)
            slot.part(change).zero_()
        return change

    def retain(self, owed: Owed, reduction: Reduction, rounding: Update | None) -> Tensor | None:
        """Keep what is still owed, from the next `commit` on; returns it, None for "nothing".

        Args:
            owed: What was owed. Its tensors belong to this from now on, and are written into.
            reduction: What became of it.
            rounding: What the applied mean lost to the gradient's dtype, None: nothing. It is the same on all ranks.
        """
        left = owed.acc.values
        rounded = reduction.left if isinstance(reduction, DenseReduction) else None
        self._carry(owed, rounded if owed.apart else None)
        if owed.apart:
            self._spare.give(left)
            self._retained.append((owed, None))
            return rounded
        if owed.velocity is not None:
            self._momentum.forget(owed.velocity, left, owed.held, reduction)
        if isinstance(reduction, DenseReduction):
            nothing = rounded is None and rounding is None and not owed.held
            left = None if nothing else left.zero_() if rounded is None else left.copy_(rounded)
        else:
            self._kernels.on(left.device).subtract(left, reduction.contribution.to(left.device))
        if left is not None:
            if rounding is not None:
                _add(left, rounding)
            for slot in owed.held:
                put_back(slot, owed.before, left)
        self._retained.append((owed, left))
        return left

    def _carry(self, owed: Owed, rounded: Tensor | None) -> None:
        """Carry what was rounded away into the next step; a parameter that is held keeps what was carried before."""
        if owed.held and owed.carried is not None:
            rounded = torch.zeros_like(owed.carried) if rounded is None else rounded.clone()
            for slot in owed.held:
                put_back(slot, owed.carried, rounded)
        owed.rounded = rounded

    def commit(self) -> None:
        for owed, left in self._retained:
            if owed.carried is not None or owed.rounded is not None:
                self._carried.replace(owed.bucket, owed.rounded)
            if not owed.apart:
                self._spare.give(self._memory.replace(owed.bucket, left))
            if owed.velocity is not None:
                self._momentum.commit(owed.bucket, owed.velocity, own=not owed.apart)
        self._retained.clear()

    def roll_back(self) -> None:
        """Forget what was retained since the last commit."""
        self._retained.clear()

    def state_dict(self) -> dict[str, Any]:
        carried = self._carried.state_dict()
        parts = {"residual": self._memory.state_dict(), **self._momentum.state_dict()}
        return parts | ({"carried": carried} if carried else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """ValueError for NaN or Inf."""
        memory = NamedBuffers.load("residual", state["residual"])
        carried = NamedBuffers.load("carried rounding", state.get("carried", {}))
        self._momentum.load_state_dict(state)
        self._memory, self._carried = memory, carried
        self._retained.clear()


def write_mean(mean: Update, target: Tensor, kernels: DeviceKernels) -> Update | None:
    """Put `mean` into `target`; returns what the target's dtype rounded away (None: nothing)."""
    values = mean.values if isinstance(mean, SparseVector) else mean
    exact = target.dtype in (torch.float32, torch.float64)
    stored = values if exact else to_narrow(values, target.dtype)
    if not isinstance(mean, SparseVector):
        target.copy_(stored)
        return None if exact else values - stored.float()
    kernels.on(target.device).write(target, SparseVector(mean.indices, stored, mean.length).to(target.device))
    return None if exact else SparseVector(mean.indices, values - stored.float(), mean.length)


def _add(target: Tensor, update: Update) -> None:
    if isinstance(update, SparseVector):
        on_target = update.to(target.device)
        target[on_target.indices] += on_target.values
    else:
        target.add_(update)
