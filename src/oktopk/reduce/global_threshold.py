"""Which of the summed elements are applied: the threshold that all ranks share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from oktopk.comm.base import Communicator, all_gather_int
from oktopk.kernels.base import Kernels, bits_of, number_of
from oktopk.sparse_vector import SparseVector, ints

_DIGITS = ((23, 8), (15, 8), (7, 8), (0, 7))  # (shift, number of bits): magnitudes of fp32 are ordered like their bits
_WINDOW_SHIFT, _WINDOW_BINS = 13, 256  # around the last threshold, in steps of 2^-10 of it
_FINE_SHIFT = 15  # bins of 2^-8 and less
_SLACK = 64
_LARGE = 1024


@dataclass(frozen=True)
class Threshold:
    """`surplus` more than k magnitudes reach `number`; what is in the same bin lies below `next_bin`."""

    number: float
    next_bin: float
    surplus: int

    @staticmethod
    def of_bin(place: int, shift: int, surplus: int) -> Threshold:
        return Threshold(number_of(place << shift), number_of(place + 1 << shift), surplus)


class Cut(Protocol):
    """`keep` is called on every rank with its own, disjoint `sums`; all decide alike, from shared counts."""

    def keep(self, sums: SparseVector, comm: Communicator, k: int) -> tuple[SparseVector, float]:
        """The sums worth applying, and the threshold."""
        ...

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class ExactCut:
    """The k largest sums of every step, and up to k/64 more that are almost as large as the k-th.

    The threshold is found from a histogram of all ranks' magnitudes around the last one: one all_reduce of 2 KB. Where
    it has moved too far it is found digit by digit. Where more than k/64 lie in one bin with the k-th (within 2^-10 of
    it), as bf16 brings about, those with the highest indices are left out; a small k can afford to look closer.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._threshold = 0.0

    def keep(self, sums: SparseVector, comm: Communicator, k: int) -> tuple[SparseVector, float]:
        slack = k // _SLACK
        found = self._near_the_last(sums, comm, k, slack) or global_threshold(sums, comm, k, self._kernels, slack)
        self._threshold = found.number
        kept = at_or_above(sums, found.number, self._kernels)
        return cut_ties(kept, found, comm) if found.surplus > slack else kept, found.number

    def _near_the_last(self, sums: SparseVector, comm: Communicator, k: int, slack: int) -> Threshold | None:
        first = (bits_of(self._threshold) >> _WINDOW_SHIFT) - _WINDOW_BINS // 2
        if first < 0:
            return None
        place, reached = _kth_bin(sums, comm, k, self._kernels, first, _WINDOW_SHIFT, _WINDOW_BINS)
        inside = reached >= k and place < _WINDOW_BINS - 1
        close = reached - k <= slack or k >= _LARGE
        return Threshold.of_bin(first + place, _WINDOW_SHIFT, reached - k) if inside and close else None

    def state_dict(self) -> dict[str, Any]:
        return {"threshold": self._threshold}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._threshold = float(state["threshold"])


class ReusedCut:
    """As the paper has it: the exact k-th magnitude every `period` steps; between, whatever reaches it.

    Sooner where that would be fewer than 3k/4, more than 5k/4, or so many that evening them out would cost too much.
    """

    def __init__(self, kernels: Kernels, period: int) -> None:
        self._kernels = kernels
        self._period = period
        self._steps = 0
        self._threshold = 0.0

    def keep(self, sums: SparseVector, comm: Communicator, k: int) -> tuple[SparseVector, float]:
        due = self._steps % self._period == 0 or k >= sums.length
        self._steps += 1
        if not due:
            kept = at_or_above(sums, self._threshold, self._kernels)
            shares = all_gather_int(comm, len(kept), sums.indices.device)
            count = sum(shares)
            if 3 * k <= 4 * count <= 5 * k and (count <= k or not lopsided(shares, k)):
                return kept, self._threshold
        found = global_threshold(sums, comm, k, self._kernels, slack=0)
        self._threshold = found.number
        kept = at_or_above(sums, found.number, self._kernels)
        return cut_ties(kept, found, comm) if found.surplus else kept, found.number

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "threshold": self._threshold}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps, self._threshold = int(state["steps"]), float(state["threshold"])


def lopsided(shares: list[int], k: int) -> bool:
    """Does one rank hold more than twice its part?"""
    return max(shares) * len(shares) > 2 * k


def at_or_above(sums: SparseVector, threshold: float, kernels: Kernels) -> SparseVector:
    found = kernels.above(sums.values, threshold, room=len(sums))
    assert found is not None  # there is room for all
    return sums.picked(found)


def global_threshold(mine: SparseVector, comm: Communicator, k: int, kernels: Kernels, slack: int) -> Threshold:
    """One that the k largest magnitudes of all ranks' (disjoint) vectors reach, digit by digit.

    At most `slack` more reach it, within 2^-8 of it, or else its bin is that of one number. Zero where there are fewer
    than k.
    """
    first, surplus = 0, 0
    for shift, num_bits in _DIGITS:
        first <<= num_bits
        place, reached = _kth_bin(mine, comm, k, kernels, first, shift, 1 << num_bits)
        if reached < k:
            return Threshold(0.0, 0.0, 0)
        first, surplus = first + place, reached - k
        if surplus <= slack and shift <= _FINE_SHIFT:
            return Threshold.of_bin(first, shift, surplus)
    return Threshold.of_bin(first, 0, surplus)


def _kth_bin(
    mine: SparseVector, comm: Communicator, k: int, kernels: Kernels, first: int, shift: int, num_bins: int
) -> tuple[int, int]:
    """The bin that the k-th largest magnitude of all ranks is in, and how many lie in it or beyond.

    Where fewer than k lie in all bins: the first one.
    """
    counts = kernels.histogram(mine.values, first, shift, num_bins)
    comm.all_reduce(counts)
    reached = ints(counts.flip(0).cumsum(0).flip(0))
    place = max((place for place in range(num_bins) if reached[place] >= k), default=0)
    return place, reached[place]


def cut_ties(kept: SparseVector, threshold: Threshold, comm: Communicator) -> SparseVector:
    """Without the surplus among those in the threshold's own bin: the highest indices go first."""
    tied = kept.values.abs() < threshold.next_bin
    everyones = all_gather_int(comm, int(tied.sum().item()), kept.indices.device)
    allowed = sum(everyones) - threshold.surplus - sum(everyones[: comm.rank])
    return kept.where(~tied | (tied.cumsum(0) <= allowed))
