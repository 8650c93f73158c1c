"""Some elements of a vector: sorted indices and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor


def ints(tensor: Tensor) -> list[int]:
    """The elements of an integer tensor; waits for its device."""
    return cast("list[int]", tensor.tolist())


def to_narrow(values: Tensor, dtype: torch.dtype) -> Tensor:
    """In that dtype; what does not fit becomes the largest that does."""
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit).to(dtype)


@dataclass(frozen=True)
class SparseVector:
    """Some elements of a vector of `length` elements: strictly increasing int64 indices, fp32 values.

    Immutable by contract: no method writes into `indices` or `values`, and neither may a holder.
    """

    indices: Tensor
    values: Tensor
    length: int

    def __len__(self) -> int:
        return self.indices.numel()

    @staticmethod
    def empty(length: int, device: torch.device) -> SparseVector:
        return SparseVector(
            torch.empty(0, dtype=torch.int64, device=device),
            torch.empty(0, dtype=torch.float32, device=device),
            length,
        )

    @staticmethod
    def at(dense: Tensor, indices: Tensor) -> SparseVector:
        """The elements of `dense` at sorted `indices`."""
        return SparseVector(indices, dense[indices], dense.numel())

    @staticmethod
    def sum(vectors: Sequence[SparseVector]) -> SparseVector:
        """The union of the indices, values added in the order given: the same bits wherever it is done."""
        union = cast("Tensor", torch.unique(torch.cat([v.indices for v in vectors])))
        total = torch.zeros(union.numel(), dtype=torch.float32, device=union.device)
        for vector in vectors:
            total[torch.searchsorted(union, vector.indices)] += vector.values
        return SparseVector(union, total, vectors[0].length)

    def negate(self) -> SparseVector:
        return SparseVector(self.indices, -self.values, self.length)

    def where(self, which: Tensor) -> SparseVector:
        """Some of the elements held: one bool for each, or their sorted positions."""
        return SparseVector(self.indices[which], self.values[which], self.length)

    def picked(self, found: SparseVector) -> SparseVector:
        """The elements held whose values were `found` among `values`."""
        return SparseVector(self.indices[found.indices], found.values, self.length)

    def restrict_to(self, indices: Tensor) -> SparseVector:
        """The elements whose index is also in the sorted `indices`."""
        if indices.numel() == 0:
            return SparseVector.empty(self.length, self.indices.device)
        position = torch.searchsorted(indices, self.indices).clamp_(max=indices.numel() - 1)
        return self.where(indices[position] == self.indices)

    def split(self, boundaries: Sequence[int]) -> list[SparseVector]:
        """Cut at P + 1 non-decreasing `boundaries` from 0 to `length`; indices stay those of the whole vector."""
        edges = torch.tensor(boundaries, dtype=torch.int64, device=self.indices.device)
        cuts = ints(torch.searchsorted(self.indices, edges))
        return [self.slice(lo, hi) for lo, hi in pairwise(cuts)]

    def to(self, device: torch.device) -> SparseVector:
        """On that device: itself, where it is there already."""
        if self.indices.device == device:
            return self
        indices, values = self.indices, self.values
        if device.type == "cuda" and indices.device.type == "cpu":  # from pinned memory nobody has to wait
            indices, values = indices.pin_memory(), values.pin_memory()
        return SparseVector(
            indices.to(device, non_blocking=device.type == "cuda"),
            values.to(device, non_blocking=device.type == "cuda"),
            self.length,
        )

    def slice(self, start: int, stop: int) -> SparseVector:
        """The elements held at positions start..stop, as views."""
        return SparseVector(self.indices[start:stop], self.values[start:stop], self.length)

    def to_dense(self) -> Tensor:
        dense = torch.zeros(self.length, dtype=torch.float32, device=self.values.device)
        dense[self.indices] = self.values
        return dense
