"""fp32 memory for parameters, by name."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from oktopk.bucket import Bucket, Layout


class NamedBuffers:
    """fp32 memory for parameters, by name, handed out as one flat tensor for a bucket's layout.

    A layout that was seen before costs a dictionary look-up; a new one (DDP rebuilt its buckets) is gathered from
    the parameters' old places. Absent means zero.
    """

    def __init__(self) -> None:
        self._flat: dict[Layout, Tensor | None] = {}
        """The layouts in use; None: all zero."""
        self._loose: dict[str, Tensor] = {}
        """Parameters whose layout was given up, or that were loaded."""

    def get(self, bucket: Bucket) -> Tensor | None:
        """The memory of these parameters, which stays ours; None where all of it is zero."""
        if bucket.layout in self._flat:
            return self._flat[bucket.layout]
        if not self._flat and not self._loose:
            return None
        self._loosen(bucket.layout)
        if not any(slot.name in self._loose for slot in bucket.slots):
            return None
        flat = torch.zeros(bucket.numel, dtype=torch.float32, device=bucket.flat.device)
        for slot in bucket.slots:
            view = self._loose.get(slot.name)
            if view is None:
                continue
            if view.numel() != slot.numel:
                raise ValueError(
                    f"the stored memory of {slot.name!r} has {view.numel()} elements, the parameter has {slot.numel}: "
                    "the state was saved from another model"
                )
            slot.part(flat).copy_(view)
        return flat

    def replace(self, bucket: Bucket, flat: Tensor | None) -> Tensor | None:
        """From now on `flat` (owned by this) is the memory of these parameters, None: zero.

        Returns the old memory where it was one tensor, which nobody else holds any more.
        """
        if bucket.layout not in self._flat:
            self._loosen(bucket.layout)
            for slot in bucket.slots:
                self._loose.pop(slot.name, None)
        old, self._flat[bucket.layout] = self._flat.get(bucket.layout), flat
        return old

    def _loosen(self, layout: Layout) -> None:
        """Give up layouts that share a parameter with a new one: their values live on by name."""
        for old in [known for known in self._flat if known.shares_a_parameter_with(layout)]:
            flat = self._flat.pop(old)
            if flat is not None:
                self._loose |= {slot.name: slot.part(flat) for slot in old.slots}

    def state_dict(self) -> dict[str, Tensor]:
        """A copy, by name."""
        held = {
            slot.name: slot.part(flat)
            for layout, flat in self._flat.items()
            if flat is not None
            for slot in layout.slots
        }
        return {name: view.clone() for name, view in (self._loose | held).items()}

    @staticmethod
    def load(kind: str, state: Mapping[str, Tensor]) -> NamedBuffers:
        """New buffers from what `state_dict` gave; ValueError for NaN or Inf."""
        loaded = NamedBuffers()
        for name, value in state.items():
            loaded._loose[name] = value.detach().to(torch.float32, copy=True).flatten()
            if not bool(torch.isfinite(loaded._loose[name]).all()):
                raise ValueError(
                    f"{kind} of {name!r} holds NaN or Inf: the saved state is damaged; load an earlier one"
                )
        return loaded


class Spare:
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

    def give(self, buffer: Tensor | None) -> None:
        if buffer is None or buffer.device.type != "cpu":
            return
        if self._buffer is None or self._buffer.numel() <= buffer.numel():
            self._buffer = buffer
