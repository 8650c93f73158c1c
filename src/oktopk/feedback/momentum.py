"""Velocities: what is added to the debt follows the gradients of many steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor

from oktopk.bucket import Bucket, Slot
from oktopk.comm.base import Communicator
from oktopk.feedback.named_buffers import NamedBuffers, Spare
from oktopk.kernels.base import UpdateRule, Velocity
from oktopk.kernels.torch_ops import plain_velocity
from oktopk.reduce.base import Reduction, SparseReduction

Forgets = Literal["sent", "applied"]


class Momentum:
    """Accumulates velocity, and forgets it where a step was sparse and something moved. Dense steps forget nothing.

    A parameter that no rank has a gradient for keeps its velocity, as it does in torch.optim where `.grad` is None.
    What is stored stays as it is until `commit`.
    """

    def __init__(self, forgets: Forgets) -> None:
        """Args:
        forgets: The velocity of what this rank sent, or of all that was applied, whoever sent it.
        """
        self._forgets: Forgets = forgets
        self._velocity = NamedBuffers()
        self._spare = Spare()
        self._own: set[str] = set()
        """Parameters whose velocity differs between ranks, because a step was sparse."""

    def advance(self, bucket: Bucket, rule: UpdateRule) -> Velocity:
        """What the pass over a bucket reads and writes."""
        return Velocity(self._velocity.get(bucket), self._spare.take(bucket.flat), rule)

    def follow(self, bucket: Bucket, mean: Tensor, rule: UpdateRule, comm: Communicator) -> tuple[Velocity, Tensor]:
        """Let the velocity follow the mean gradient; returns it and the change that the rule makes, equal on all ranks.

        Ranks that have velocities of their own continue with the mean of them.
        """
        velocity = self.advance(bucket, rule)
        if velocity.old is not None and any(slot.name in self._own for slot in bucket.slots):
            shared = velocity.old.to(bucket.flat.device, copy=True)
            comm.all_reduce(shared)
            velocity = replace(velocity, old=shared.div_(comm.size))
        return velocity, plain_velocity(velocity, mean)

    def forget(self, velocity: Velocity, acc: Tensor, held: Sequence[Slot], reduction: Reduction) -> None:
        """Clear the new velocity where something moved, and put the old one back where a parameter is held."""
        if isinstance(reduction, SparseReduction):
            velocity.new[self._moved(acc, reduction)] = 0.0
        for slot in held:
            put_back(slot, velocity.old, velocity.new)

    def _moved(self, acc: Tensor, reduction: SparseReduction) -> Tensor:
        if self._forgets == "applied":
            return reduction.mean.indices.to(acc.device)
        sent = reduction.contribution.to(acc.device)
        mostly = 2.0 * sent.values.abs() > acc[sent.indices].abs()  # others only stand in for a sum's rounding
        return sent.indices[mostly]

    def commit(self, bucket: Bucket, velocity: Velocity, own: bool) -> None:
        """Store it. `own`: other ranks have other velocities."""
        self._spare.give(self._velocity.replace(bucket, velocity.new))
        names = (slot.name for slot in bucket.slots)
        (self._own.update if own else self._own.difference_update)(names)

    def state_dict(self) -> dict[str, Any]:
        velocity = self._velocity.state_dict()
        return {"velocity": velocity, "own_velocity": sorted(self._own)} if velocity else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        velocity = state.get("velocity", {})
        self._velocity = NamedBuffers.load("velocity", velocity)
        self._own = set(state.get("own_velocity", velocity))


def put_back(slot: Slot, old: Tensor | None, new: Tensor) -> None:
    """This parameter's part of `new` becomes what it was; None: zero."""
    if old is None:
        slot.part(new).zero_()
    else:
        slot.part(new).copy_(slot.part(old))
