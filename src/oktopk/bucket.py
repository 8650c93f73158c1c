"""Some named parameters' values as one flat tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


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
