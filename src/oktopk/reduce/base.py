"""The contract of a reducer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from oktopk.comm.base import Communicator
from oktopk.metrics.step_stats import Phase
from oktopk.reduce.exchange import Exchange
from oktopk.select.base import Selector
from oktopk.sparse_vector import SparseVector

Thresholds = Literal["exact", "reuse"]


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


class Reducer(Protocol):
    """One allreduce of one bucket; an instance belongs to one bucket and may remember thresholds and regions.

    `reduce` is called by every rank at the same step with its own `acc` (flat, finite, fp32, of one length) and the
    same `k`. It does not write into `acc`. What it returns obeys the law: over all ranks, the contributions sum to
    P * mean, and `mean` has the same bits everywhere.
    """

    def reduce(self, acc: Tensor, comm: Communicator, k: int) -> Reduction: ...

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
