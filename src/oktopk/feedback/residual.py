"""Error feedback: what earlier steps did not apply is added to the next gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oktopk.bucket import Bucket, Slot
from oktopk.feedback.momentum import Momentum, put_back
from oktopk.feedback.named_buffers import NamedBuffers, Spare
from oktopk.kernels.base import Velocity
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
    """

    bucket: Bucket
    acc: Accumulated
    before: Tensor | None
    velocity: Velocity | None
    held: Sequence[Slot] = ()

    def hold(self, slots: Sequence[Slot]) -> None:
        self.held = slots
        self.acc = self.acc.hold_out(slots)


class Residual:
    """What is owed, in fp32 for any gradient dtype, by parameter name. It belongs to the training, not to a process.

    `compensate`, then `retain`, then `commit` or `roll_back`: once each for every bucket and step. What is stored stays
    as it is until `commit`.
    """

    def __init__(self, kernels: DeviceKernels, momentum: Momentum | None = None) -> None:
        self._memory = NamedBuffers()
        self._momentum = momentum
        self._kernels = kernels
        self._spare = Spare()
        self._retained: list[tuple[Owed, Tensor | None]] = []

    def compensate(self, bucket: Bucket, selector: BucketSelector, k: int, limit: float) -> Owed:
        """Add what is owed to the gradient, looking out for the k largest elements and for any beyond `limit`."""
        gradient = bucket.flat.detach()
        before = self._memory.get(bucket)
        before = None if before is None else before.to(gradient.device)
        velocity = None if self._momentum is None else self._momentum.advance(bucket)
        acc = selector.accumulate(before, gradient, self._spare.take(gradient), k, limit, velocity)
        return Owed(bucket, acc, before, velocity)

    def retain(self, owed: Owed, reduction: Reduction, rounding: Update | None) -> Tensor | None:
        """Keep what is still owed, from the next `commit` on; returns it, None for "nothing".

        Args:
            owed: What was owed. Its tensors belong to this from now on, and are written into.
            reduction: What became of it.
            rounding: What the applied mean lost to the gradient's dtype, None: nothing. It is the same on all ranks.
        """
        left = owed.acc.values
        if owed.velocity is not None and self._momentum is not None:
            self._momentum.forget(owed.velocity, left, owed.held, reduction)
        if isinstance(reduction, DenseReduction):
            nothing = rounding is None and not owed.held
            left = None if nothing else left.zero_()
        else:
            self._kernels.on(left.device).subtract(left, reduction.contribution.to(left.device))
        if left is not None:
            if rounding is not None:
                _add(left, rounding)
            for slot in owed.held:
                put_back(slot, owed.before, left)
        self._retained.append((owed, left))
        return left

    def commit(self) -> None:
        for owed, left in self._retained:
            self._spare.give(self._memory.replace(owed.bucket, left))
            if owed.velocity is not None and self._momentum is not None:
                self._momentum.commit(owed.bucket, owed.velocity)
        self._retained.clear()

    def roll_back(self) -> None:
        """Forget what was retained since the last commit."""
        self._retained.clear()

    def state_dict(self) -> dict[str, Any]:
        velocity = {} if self._momentum is None else {"velocity": self._momentum.state_dict()}
        return {"residual": self._memory.state_dict(), **velocity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """ValueError where the state has momentum correction and these settings have not, and for NaN or Inf."""
        if state.get("velocity") and self._momentum is None:
            raise ValueError(
                "the saved state has momentum correction, these settings have not: set momentum_correction"
            )
        memory = NamedBuffers.load("residual", state["residual"])
        if self._momentum is not None:
            self._momentum.load_state_dict(state.get("velocity", {}))
        self._memory = memory
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
