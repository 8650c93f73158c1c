"""Momentum correction (DGC): velocity instead of the gradient is what is owed and sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from oktopk.bucket import Bucket, Slot
from oktopk.feedback.named_buffers import NamedBuffers, Spare
from oktopk.kernels.base import Velocity
from oktopk.reduce.base import Reduction, SparseReduction


class Momentum:
    """Accumulates velocity, and forgets the velocity of what was sent. In dense steps nothing is forgotten.

    So dense steps equal momentum SGD. A parameter that no rank has a gradient for keeps its velocity, as it does in
    torch.optim.SGD where `.grad` is None.
    """

    def __init__(self, momentum: float) -> None:
        self._momentum = momentum
        self._velocity = NamedBuffers()
        self._spare = Spare()

    def advance(self, bucket: Bucket) -> Velocity:
        """What the pass over a bucket reads and writes. What is stored stays as it is until `commit`."""
        return Velocity(self._velocity.get(bucket), self._spare.take(bucket.flat), self._momentum)

    def forget(self, velocity: Velocity, acc: Tensor, held: Sequence[Slot], reduction: Reduction) -> None:
        """Clear the new velocity where something was sent, and put the old one back where a parameter is held."""
        if isinstance(reduction, SparseReduction):
            sent = reduction.contribution.to(acc.device)
            mostly = 2.0 * sent.values.abs() > acc[sent.indices].abs()  # others only stand in for a sum's rounding
            velocity.new[sent.indices[mostly]] = 0.0
        for slot in held:
            put_back(slot, velocity.old, velocity.new)

    def commit(self, bucket: Bucket, velocity: Velocity) -> None:
        self._spare.give(self._velocity.replace(bucket, velocity.new))

    def state_dict(self) -> dict[str, Tensor]:
        return self._velocity.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._velocity = NamedBuffers.load("velocity", state)


def put_back(slot: Slot, old: Tensor | None, new: Tensor) -> None:
    """This parameter's part of `new` becomes what it was; None: zero."""
    if old is None:
        slot.part(new).zero_()
    else:
        slot.part(new).copy_(slot.part(old))
