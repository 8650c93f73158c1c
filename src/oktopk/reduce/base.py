"""The contract of a reducer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from oktopk.comm.base import Communicator
from oktopk.reduce.exchange import Exchange
from oktopk.select.base import Accumulated, Selector
from oktopk.sparse_vector import SparseVector

Phase = Literal["dense", "sparse"]
Thresholds = Literal["exact", "reuse"]


@dataclass(frozen=True)
class DenseReduction:
    """Every element of every rank's `acc` was applied; nothing of it is owed any more but what was rounded away.

    Attributes:
        mean: What every rank applies, the same bits on all of them.
        left: What of this rank's `acc` was rounded away, None: nothing.
    """

    mean: Tensor
    left: Tensor | None = None

    @property
    def local_count(self) -> int:
        return self.mean.numel()

    @property
    def global_count(self) -> int:
        return self.mean.numel()

    local_threshold = None
    global_threshold = None
    phase: Phase = "dense"


@dataclass(frozen=True)
class SparseReduction:
    """Some elements were applied.

    Attributes:
        mean: What every rank applies, the same bits on all of them.
        contribution: What of this rank's `acc` went into it. Over all ranks the contributions add up to P * mean, and
            `acc - contribution` is still owed.
        local_count: How many elements this rank chose.
        global_count: How many were applied.
        local_threshold: The magnitude from which on this rank chose, where it knows one.
        global_threshold: The magnitude from which on sums were applied, where there is one.
    """

    mean: SparseVector
    contribution: SparseVector
    local_count: int
    global_count: int
    local_threshold: float | None = None
    global_threshold: float | None = None
    phase: Phase = "sparse"


Reduction = DenseReduction | SparseReduction


class Reducer(Protocol):
    """One allreduce of one bucket; an instance belongs to one bucket and may remember thresholds and regions.

    `reduce` is called by every rank at the same step with its own `acc` (finite, of one length) and the same `k`. It
    does not write into `acc`. What it returns obeys the law: over all ranks, the contributions sum to
    P * mean, and `mean` has the same bits everywhere.
    """

    def reduce(self, acc: Accumulated, comm: Communicator, k: int) -> Reduction: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class ReducerSettings:
    """What reducers are made from."""

    selector: Selector
    exchange: Exchange
    thresholds: Thresholds = "exact"
    """Find thresholds anew in every step, or reuse them for `tau_prime` steps (oktopk)."""
    tau: int = 64
    """Steps between two agreements on regions (oktopk)."""
    tau_prime: int = 32
    """Steps between two exact thresholds (topkAopt, and oktopk where it reuses them)."""

    def __post_init__(self) -> None:
        for key in ("tau", "tau_prime"):
            value = getattr(self, key)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{key}={value!r}: must be a whole number of steps, at least 1")


class Stateless:
    """For reducers that remember nothing between steps."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            raise ValueError(f"{type(self).__name__} keeps no state, but was given {sorted(state)}")
