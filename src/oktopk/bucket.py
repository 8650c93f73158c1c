"""Some named parameters' values as one flat tensor."""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one parameter lies in a bucket."""

    name: str
    offset: int
    numel: int

    def part(self, flat: Tensor) -> Tensor:
        """This parameter's elements of a bucket's flat tensor, as a view."""
        return flat[self.offset : self.offset + self.numel]


class Layout:
    """The names and sizes of a bucket's parameters, in order.

    A layout is the identity of a bucket: DDP renumbers and rebuilds its buckets after the first step, so a running
    number would not do. Layouts are interned: `Layout.of` gives one object for equal names and sizes, so comparing and
    hashing cost nothing however many parameters there are.

    Attributes:
        slots: Where each parameter lies.
        numel: The number of elements of all parameters.
        name: The first and the last parameter, for people.
        key: All names and sizes, for saved states.
    """

    __slots__ = ("__weakref__", "_ends", "key", "name", "numel", "slots")

    def __init__(self, names_and_sizes: tuple[tuple[str, int], ...]) -> None:
        """Use `Layout.of`, which interns."""
        slots: list[Slot] = []
        offset = 0
        for name, numel in names_and_sizes:
            slots.append(Slot(name, offset, numel))
            offset += numel
        self.slots = tuple(slots)
        self.numel = offset
        first, last = slots[0].name, slots[-1].name
        self.name = first if first == last else f"{first}..{last}"
        self.key = "|".join(f"{slot.name}:{slot.numel}" for slot in slots)
        self._ends = [slot.offset + slot.numel for slot in slots]

    @staticmethod
    def of(names_and_sizes: Iterable[tuple[str, int]]) -> Layout:
        """The one layout of these names and sizes; ValueError where there are none."""
        key = tuple(names_and_sizes)
        if not key:
            raise ValueError("a bucket needs at least one parameter")
        with _interning:
            layout = _layouts.get(key)
            if layout is None:
                layout = _layouts[key] = Layout(key)
        return layout

    def slot_at(self, index: int) -> Slot:
        """The parameter that the element at `index` belongs to."""
        return self.slots[bisect_right(self._ends, index)]

    def shares_a_parameter_with(self, other: Layout) -> bool:
        return not {slot.name for slot in self.slots}.isdisjoint(slot.name for slot in other.slots)

    def __reduce__(self) -> tuple[object, ...]:
        return Layout.of, (tuple((slot.name, slot.numel) for slot in self.slots),)

    def __repr__(self) -> str:
        return f"Layout({self.key})"


_interning = threading.Lock()
_layouts: weakref.WeakValueDictionary[tuple[tuple[str, int], ...], Layout] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Bucket:
    """Some named parameters' values as one flat tensor, which a reduction overwrites with the mean over all ranks.

    Attributes:
        flat: The values.
        layout: Which parameters they belong to.
        missing: Parameters that have no gradient on this rank: they contribute zero, whatever stands in their place.
        dense: Never compressed, whatever its size.
    """

    flat: Tensor
    layout: Layout
    missing: frozenset[str] = frozenset()
    dense: bool = False

    @property
    def numel(self) -> int:
        return self.layout.numel

    @property
    def slots(self) -> tuple[Slot, ...]:
        return self.layout.slots

    @property
    def name(self) -> str:
        return self.layout.name
