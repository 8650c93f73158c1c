"""The words every other module speaks: SparseVector, Bucket, Reduction, StepStats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, cast

import torch
from torch import Tensor

Phase = Literal["dense", "sparse"]
HASH_SPREAD = -7046029254386353131
_HASH_BLOCK = 1 << 22


def ints(tensor: Tensor) -> list[int]:
    """The elements of an integer tensor; waits for its device."""
    return cast("list[int]", tensor.tolist())


def hash_words(words: Tensor) -> Tensor:
    """The sum, mod 2^64, of integer words times odd weights that depend on the position, as an int64 scalar tensor.

    Any single flipped bit changes it, and so does what was moved. Looked at in blocks, to bound the temporaries.
    """
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _HASH_BLOCK):
        block = words[start : start + _HASH_BLOCK].to(torch.int64)
        position = torch.arange(start, start + block.numel(), device=words.device)
        total += (block * ((position * HASH_SPREAD) | 1)).sum()
    return total


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

    def add(self, other: SparseVector) -> SparseVector:
        return SparseVector.sum([self, other])

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


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in a bucket."""

    name: str
    offset: int
    numel: int

    def part(self, flat: Tensor) -> Tensor:
        """Its elements of the bucket's flat tensor, as a view."""
        return flat[self.offset : self.offset + self.numel]


@dataclass(frozen=True)
class Bucket:
    """The gradients of some parameters as one flat tensor, which the reduction overwrites with the mean.

    Its identity is its layout (names, offsets, sizes), never a running number: DDP renumbers and rebuilds
    its buckets after the first step. `missing` names the parameters that have no gradient on this rank:
    whatever stands in their place, they contribute zero.
    """

    gradient: Tensor
    slots: tuple[Slot, ...]
    missing: frozenset[str] = frozenset()
    dense: bool = False
    """Never compressed, whatever its size."""

    @property
    def numel(self) -> int:
        return self.gradient.numel()

    @property
    def name(self) -> str:
        """For people: the first and last parameter."""
        first, last = self.slots[0].name, self.slots[-1].name
        return first if first == last else f"{first}..{last}"

    @property
    def key(self) -> str:
        """For dictionaries and saved state: the whole layout."""
        return "|".join(f"{slot.name}:{slot.numel}" for slot in self.slots)

    @staticmethod
    def layout(names_and_sizes: Sequence[tuple[str, int]]) -> tuple[Slot, ...]:
        slots: list[Slot] = []
        offset = 0
        for name, numel in names_and_sizes:
            slots.append(Slot(name, offset, numel))
            offset += numel
        return tuple(slots)

    def slot_at(self, index: int) -> Slot:
        return next(slot for slot in self.slots if index < slot.offset + slot.numel)


@dataclass(frozen=True)
class Reduction:
    """What one sparse allreduce did.

    `mean` is what every rank applies, the same bits on all of them. `contribution` is what of this rank's `acc`
    went into it: over all ranks the contributions add up to P * mean, and `acc - contribution` is what is still
    owed. Dense tensors mean "every element"; a dense `contribution` may be the caller's own `acc`.
    """

    mean: Tensor | SparseVector
    contribution: Tensor | SparseVector
    local_count: int
    global_count: int
    local_threshold: float | None = None
    global_threshold: float | None = None

    @property
    def phase(self) -> Phase:
        return "sparse" if isinstance(self.mean, SparseVector) else "dense"


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """What one reduction of one bucket did and cost, on this rank."""

    step: int
    bucket: str
    phase: Phase
    n: int
    k: int
    local_count: int
    global_count: int
    local_threshold: float | None = None
    global_threshold: float | None = None
    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    skipped: bool = False
    unused: tuple[str, ...] = ()
    """Parameters that no rank had a gradient for: nothing was applied to them."""

    @property
    def sparsity(self) -> float:
        return 0.0 if self.phase == "dense" else 1.0 - self.global_count / self.n

    @property
    def compression_ratio(self) -> float:
        """n / count; where nothing was applied, n (as for one element), so that means stay finite."""
        return 1.0 if self.phase == "dense" else self.n / max(1, self.global_count)

    @property
    def communication_size(self) -> int:
        """Bytes by the users' definition: 4 for each dense element, 8 for each sparse one that was applied."""
        return 4 * self.n if self.phase == "dense" else 8 * self.global_count
