"""Error feedback: what earlier steps did not apply is added to the next gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from oktopk.bucket import Bucket, Slot
from oktopk.kernels.base import Kernels
from oktopk.kernels.torch_ops import TorchKernels, plain_sum
from oktopk.sparse_vector import SparseVector

PLAIN = TorchKernels()
Update = Tensor | SparseVector
Accumulate = Callable[[Tensor | None, Tensor, Tensor], None]
"""(residual or None, gradient of any dtype, out): out = residual + gradient"""


class ErrorFeedback(Protocol):
    """`compensate`, then `retain`, then `commit` or `roll_back`: once each for every bucket and step."""

    def compensate(self, bucket: Bucket, accumulate: Accumulate = plain_sum) -> Tensor:
        """An fp32 tensor: what is owed, this step's gradient included. What is stored stays as it is.

        `accumulate` does the last addition; it may look at what comes out. The tensor is the caller's until `retain`.
        """
        ...

    def retain(self, bucket: Bucket, acc: Tensor, contribution: Update, rounding: Update | None) -> Tensor | None:
        """Keep `acc - contribution + rounding`, from the next `commit` on; returns it, None for "nothing left".

        Takes ownership of `acc` and writes into it. `rounding` is what the applied mean lost to the gradient's dtype.
        """
        ...

    def commit(self) -> None: ...

    def roll_back(self) -> None:
        """Forget what was retained since the last commit."""
        ...

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class NamedBuffers:
    """fp32 memory for parameters, by name, handed out as one flat tensor for a bucket's layout.

    A layout that was seen before costs a dictionary look-up; a new one (DDP rebuilt its buckets) is gathered from
    the parameters' old places. Absent means zero.
    """

    def __init__(self) -> None:
        self._flat: dict[tuple[Slot, ...], Tensor] = {}
        self._views: dict[str, Tensor] = {}

    def get(self, bucket: Bucket) -> Tensor | None:
        if bucket.slots in self._flat:
            return self._flat[bucket.slots]
        if not any(slot.name in self._views for slot in bucket.slots):
            return None
        flat = torch.zeros(bucket.numel, dtype=torch.float32, device=bucket.gradient.device)
        for slot in bucket.slots:
            view = self._views.get(slot.name)
            if view is None:
                continue
            if view.numel() != slot.numel:
                raise ValueError(
                    f"the stored memory of {slot.name!r} has {view.numel()} elements, the parameter has {slot.numel}: "
                    "the state was saved from another model"
                )
            slot.part(flat).copy_(view)
        return flat

    def put(self, bucket: Bucket, flat: Tensor) -> None:
        """Takes ownership of `flat`."""
        if bucket.slots not in self._flat:
            self._forget_layouts_with(bucket)
        self._flat[bucket.slots] = flat
        for slot in bucket.slots:
            self._views[slot.name] = slot.part(flat)

    def take(self, bucket: Bucket) -> Tensor | None:
        """Forget these parameters; returns their memory where it was one tensor, which nobody else holds any more."""
        flat = self._flat.get(bucket.slots)
        self._forget_layouts_with(bucket)
        for slot in bucket.slots:
            self._views.pop(slot.name, None)
        return flat

    def _forget_layouts_with(self, bucket: Bucket) -> None:
        """Of any of its parameters: their values live on in the views alone."""
        taken = {slot.name for slot in bucket.slots}
        self._flat = {slots: old for slots, old in self._flat.items() if taken.isdisjoint(slot.name for slot in slots)}

    def state_dict(self) -> dict[str, Tensor]:
        return {name: view.clone() for name, view in self._views.items()}

    @staticmethod
    def load(kind: str, state: Mapping[str, Tensor]) -> NamedBuffers:
        """New buffers from what `state_dict` gave; ValueError for NaN or Inf."""
        loaded = NamedBuffers()
        for name, value in state.items():
            loaded._views[name] = value.detach().to(torch.float32, copy=True).flatten()
            if not bool(torch.isfinite(loaded._views[name]).all()):
                raise ValueError(
                    f"{kind} of {name!r} holds NaN or Inf: the saved state is damaged; load an earlier one"
                )
        return loaded


class _Spare:
    """One buffer that a step has given up, for the next: pages that were touched before are cheap.

    The largest of a size that was asked for is kept, no more: extra memory stays that of one bucket.
    """

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def take(self, like: Tensor) -> Tensor:
        buffer = self._buffer
        if buffer is not None and buffer.numel() == like.numel() and buffer.device == like.device:
            self._buffer = None
            return buffer
        return torch.empty(like.numel(), dtype=torch.float32, device=like.device)

    def give(self, buffer: Tensor) -> None:
        if buffer.device.type == "cpu" and (self._buffer is None or self._buffer.numel() <= buffer.numel()):
            self._buffer = buffer


class Residual:
    """fp32 residual for any gradient dtype, kept by parameter name."""

    def __init__(self, kernels: Kernels = PLAIN) -> None:
        self._memory = NamedBuffers()
        self._pending: list[tuple[Bucket, Tensor | None]] = []
        self._kernels = kernels
        self._spare = _Spare()

    def compensate(self, bucket: Bucket, accumulate: Accumulate = plain_sum) -> Tensor:
        gradient = bucket.gradient.detach()
        residual = self._memory.get(bucket)
        out = self._spare.take(gradient)
        accumulate(None if residual is None else residual.to(gradient.device), gradient, out)
        return out

    def retain(self, bucket: Bucket, acc: Tensor, contribution: Update, rounding: Update | None) -> Tensor | None:
        everything = contribution is acc and rounding is None
        if not everything:
            self._subtract(acc, contribution)
            if rounding is not None:
                self._subtract(acc, rounding.negate() if isinstance(rounding, SparseVector) else -rounding)
        left = None if everything else acc
        self._pending.append((bucket, left))
        return left

    def _subtract(self, acc: Tensor, update: Update) -> None:
        if isinstance(update, SparseVector):
            self._kernels.subtract(acc, update.to(acc.device))
        else:
            acc.sub_(update)

    def commit(self) -> None:
        for bucket, left in self._pending:
            old = self._memory.take(bucket)
            if old is not None:
                self._spare.give(old)
            if left is not None:
                self._memory.put(bucket, left)
        self._pending.clear()

    def roll_back(self) -> None:
        self._pending.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"residual": self._memory.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("velocity"):
            raise ValueError(
                "the saved state has momentum correction, these settings have not: set momentum_correction"
            )
        self._memory = NamedBuffers.load("residual", state["residual"])
        self._pending.clear()


class MomentumResidual:
    """Momentum correction (DGC): accumulate velocity instead of gradient, and forget the velocity of what was sent.

    Use with an optimizer that has no momentum of its own. In dense steps nothing is forgotten, so they equal
    momentum SGD.
    """

    def __init__(self, momentum: float, kernels: Kernels = PLAIN) -> None:
        self._momentum = momentum
        self._residual = Residual(kernels)
        self._velocity = NamedBuffers()
        self._pending: dict[tuple[Slot, ...], tuple[Bucket, Tensor]] = {}
        self._retained: list[tuple[Slot, ...]] = []

    def compensate(self, bucket: Bucket, accumulate: Accumulate = plain_sum) -> Tensor:
        velocity = self._velocity.get(bucket)
        gradient = bucket.gradient.detach().to(torch.float32, copy=True)
        if velocity is not None:
            gradient.add_(velocity.to(gradient.device), alpha=self._momentum)
        self._pending[bucket.slots] = (bucket, gradient)
        return self._residual.compensate(Bucket(gradient, bucket.slots), accumulate)

    def retain(self, bucket: Bucket, acc: Tensor, contribution: Update, rounding: Update | None) -> Tensor | None:
        if isinstance(contribution, SparseVector):
            _, velocity = self._pending[bucket.slots]
            sent = contribution.to(acc.device)
            mostly = 2.0 * sent.values.abs() > acc[sent.indices].abs()  # others only stand in for a sum's rounding
            velocity[sent.indices[mostly]] = 0.0
        self._retained.append(bucket.slots)
        return self._residual.retain(bucket, acc, contribution, rounding)

    def commit(self) -> None:
        for slots in self._retained:  # others may have been compensated ahead of their turn
            self._velocity.put(*self._pending.pop(slots))
        self._retained.clear()
        self._residual.commit()

    def roll_back(self) -> None:
        self._pending.clear()
        self._retained.clear()
        self._residual.roll_back()

    def state_dict(self) -> dict[str, Any]:
        return {**self._residual.state_dict(), "velocity": self._velocity.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        velocity = NamedBuffers.load("velocity", state.get("velocity", {}))
        self._residual.load_state_dict({"residual": state["residual"]})
        self._velocity = velocity
        self._pending.clear()
        self._retained.clear()
