"""Which of the summed elements are applied: the threshold that all ranks share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from oktopk.comm.base import Communicator, all_gather_int
from oktopk.kernels.base import Kernels
from oktopk.reduce.base import Stateless
from oktopk.types import SparseVector, ints

_DIGITS = ((23, 8), (15, 8), (7, 8), (0, 7))  # (shift, number of bits): magnitudes of fp32 are ordered like their bits
_SLACK = 64


class Cut(Protocol):
    """`keep` is called on every rank with its own, disjoint `sums`; all decide alike, from shared counts."""

    def keep(self, sums: SparseVector, comm: Communicator, k: int) -> tuple[SparseVector, list[int], float]:
        """The sums worth applying, how many of them each rank holds, and the threshold."""
        ...

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class ExactCut(Stateless):
    """The k largest sums of every step, or up to k/64 more that lie within 2^-8 of the k-th.

    The threshold is found digit by digit from histograms of all ranks' magnitudes: usually two all_reduces of 2 KB,
    more where many magnitudes are nearly the same.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def keep(self, sums: SparseVector, comm: Communicator, k: int) -> tuple[SparseVector, list[int], float]:
        threshold, surplus = global_threshold(sums, comm, k, self._kernels, slack=k // _SLACK)
        kept, shares = at_or_above(sums, threshold, comm, self._kernels)
        if surplus > k // _SLACK:
            kept, shares = cut_ties(kept, threshold, surplus, comm)
        return kept, shares, threshold


class ReusedCut:
    """As the paper has it: the exact k-th magnitude every `period` steps; between, whatever reaches it.

    Sooner where that would be fewer than 3k/4, more than 5k/4, or so many that evening them out would cost too much.
    """

    def __init__(self, kernels: Kernels, period: int) -> None:
        self._kernels = kernels
        self._period = period
        self._steps = 0
        self._threshold = 0.0

    def keep(self, sums: SparseVector, comm: Communicator, k: int) -> tuple[SparseVector, list[int], float]:
        due = self._steps % self._period == 0 or k >= sums.length
        self._steps += 1
        if not due:
            kept, shares = at_or_above(sums, self._threshold, comm, self._kernels)
            count = sum(shares)
            if 3 * k <= 4 * count <= 5 * k and (count <= k or not lopsided(shares, k)):
                return kept, shares, self._threshold
        self._threshold, surplus = global_threshold(sums, comm, k, self._kernels, slack=0)
        kept, shares = at_or_above(sums, self._threshold, comm, self._kernels)
        if surplus:
            kept, shares = cut_ties(kept, self._threshold, surplus, comm)
        return kept, shares, self._threshold

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "threshold": self._threshold}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps, self._threshold = int(state["steps"]), float(state["threshold"])


def lopsided(shares: list[int], k: int) -> bool:
    """Does one rank hold more than twice its part?"""
    return max(shares) * len(shares) > 2 * k


def at_or_above(
    sums: SparseVector, threshold: float, comm: Communicator, kernels: Kernels
) -> tuple[SparseVector, list[int]]:
    found = kernels.above(sums.values, threshold, room=len(sums))
    assert found is not None  # there is room for all
    kept = SparseVector(sums.indices[found.indices], found.values, sums.length)
    return kept, all_gather_int(comm, len(kept), sums.indices.device)


def global_threshold(mine: SparseVector, comm: Communicator, k: int, kernels: Kernels, slack: int) -> tuple[float, int]:
    """A threshold that the k largest magnitudes of all ranks' (disjoint) vectors reach, and how many more do.

    At most `slack` more, or else it is exactly the k-th magnitude: then the others are ties. Zero where there are
    fewer than k.
    """
    prefix, wanted = 0, k
    for shift, num_bits in _DIGITS:
        counts = kernels.histogram(mine.values, prefix, shift, num_bits)
        comm.all_reduce(counts)
        at_or_above = counts.flip(0).cumsum(0)
        digit_from_top = int(torch.searchsorted(at_or_above, wanted).item())
        if digit_from_top == len(counts):
            return 0.0, 0
        reached, inside = ints(torch.stack([at_or_above[digit_from_top], counts.flip(0)[digit_from_top]]))
        prefix = prefix << num_bits | (len(counts) - 1 - digit_from_top)
        surplus = reached - wanted
        if surplus <= slack or shift == 0:
            return _number(prefix << shift), surplus
        wanted -= reached - inside
    raise AssertionError("the last digit has shift 0")


def cut_ties(kept: SparseVector, threshold: float, surplus: int, comm: Communicator) -> tuple[SparseVector, list[int]]:
    """Without `surplus` of the sums that are exactly at the threshold: the highest indices go first."""
    tied = kept.values.abs() == threshold
    everyones = all_gather_int(comm, int(tied.sum().item()), kept.indices.device)
    allowed = sum(everyones) - surplus - sum(everyones[: comm.rank])
    kept = kept.where(~tied | (tied.cumsum(0) <= allowed))
    return kept, all_gather_int(comm, len(kept), kept.indices.device)


def _number(bits: int) -> float:
    return float(torch.tensor(bits, dtype=torch.int32).view(torch.float32).item())
