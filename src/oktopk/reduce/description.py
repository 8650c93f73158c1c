"""A reducer described once: what it is called, how it is made, and what its paper and our models say of it.

Each reducer's file ends with its descriptions; `oktopk.registry` lists them. Everything else that must know a reducer
(settings, commands, the volume table, cost models, reports) asks its description.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from oktopk.reduce.base import Reducer, ReducerSettings
from oktopk.reduce.volume import SteadyStep, Volume
from oktopk.reduce.work import Work

ReducerFactory = Callable[[ReducerSettings], Reducer]
Elements = Callable[[float, float, int], float]
"""`elements(n, k, P)`: 4-byte words that leave a rank; a value and its index are two."""
Regions = Literal["equal", "balanced"]


@dataclass(frozen=True)
class Bound:
    """What a reducer sends in one step by its paper."""

    formula: str
    """For people, such as `2k(P-1)`."""
    elements: Elements
    """The same for programs. Where the volume depends on the data, the most that it can be."""
    least: Elements | None = None
    """The least that it can be, where the volume depends on the data."""


def lower_bound(k: float, num_ranks: int) -> float:
    """What any sparse allreduce of k elements must send: 2k(P-1)/P elements."""
    return 2 * k * (num_ranks - 1) / num_ranks


@dataclass(frozen=True, kw_only=True)
class ReducerDescription:
    """All that the library and the workbench know of one reducer."""

    name: str
    """The name in settings, files and tables."""
    factory: ReducerFactory
    """Makes the reducer of one bucket. Called once for each bucket."""
    bound: Bound
    """What it sends by its paper."""
    volume: Callable[[SteadyStep], Volume]
    """What it sends by our model in a steady step, after the agreement with which every reduction begins."""
    work: Callable[[SteadyStep], Work] | None
    """What a rank does locally by our model, on two ranks or more. None: it leaves all work to the library's own
    all_reduce."""
    aliases: tuple[str, ...] = ()
    """Other names that users may give it."""
    applies_union: bool = False
    """Whether every element that some rank chose is applied."""
    regions: Regions | None = None
    """How the bucket is divided among the ranks that sum it: in regions of equal length, in regions with about as many
    chosen elements each, or not at all."""
    half_duplex: bool = False
    """Whether a rank receives everything before it sends, as the root of a tree does. Otherwise both overlap."""

    @property
    def names(self) -> tuple[str, ...]:
        """The name, then the aliases."""
        return self.name, *self.aliases
