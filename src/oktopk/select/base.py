"""What reducers select from, and how they ask."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from oktopk.bucket import Slot
from oktopk.kernels.base import Seen
from oktopk.sparse_vector import SparseVector

_NOTHING = Seen(0.0, None)


class Accumulated:
    """What a bucket owes in one step, and the large elements that were seen in the pass that added it up.

    Attributes:
        values: residual + gradient, flat, fp32. Nobody writes into it while it is being reduced.
        floor: Every element whose magnitude reaches it is among the candidates.
    """

    def __init__(self, values: Tensor, floor: float = math.inf, seen: Callable[[], Seen] | None = None) -> None:
        """Args:
        values: The sum.
        floor: What the pass compared with.
        seen: What the pass saw. Called once, when it is first needed: it may wait for a GPU.
        """
        self.values = values
        self.floor = floor
        self._ask = seen
        self._seen = _NOTHING

    def fetch(self) -> None:
        """Wait for the device; afterwards what was seen is known."""
        self._known()

    @property
    def largest(self) -> float:
        """The largest magnitude, or 0.0 where none reached the floor; NaN and Inf reach any."""
        return self._known().largest

    @property
    def candidates(self) -> SparseVector | None:
        """All elements that reach `floor`; None where they are not known."""
        return self._known().candidates

    def hold_out(self, slots: Sequence[Slot]) -> Accumulated:
        """The same with zeros in place of these parameters: writes into `values`, and drops their candidates."""
        if not slots:
            return self
        candidates = self.candidates
        for slot in slots:
            slot.part(self.values).zero_()
            if candidates is not None:
                inside = (candidates.indices >= slot.offset) & (candidates.indices < slot.offset + slot.numel)
                candidates = candidates.where(~inside)
        left = Seen(self.largest, candidates)
        return Accumulated(self.values, self.floor, lambda: left)

    def _known(self) -> Seen:
        if self._ask is not None:
            self._seen, self._ask = self._ask(), None
        return self._seen


class Selector(Protocol):
    """Picks elements by magnitude. Results own their memory and lie where they will be sent from.

    Zero is never picked: sending it would change nothing. Denormals are ordinary numbers. Thresholds are compared as
    fp32, like the elements.
    """

    def top_k(self, acc: Accumulated, k: int) -> SparseVector:
        """The k largest magnitudes, exactly min(k, number of non-zeros); among ties the lower index wins."""
        ...

    def above(self, acc: Accumulated, threshold: float) -> SparseVector:
        """Every non-zero element with |x| >= threshold, all ties included."""
        ...

    def normal_threshold(self, acc: Accumulated, k: int) -> float:
        """Where a normal distribution fitted to `acc` would leave k elements in its two tails.

        Lowered in steps of 1.2 % while it selects fewer than 3k/4 (or all non-zeros, where there are fewer).
        """
        ...

    def largest(self, values: Tensor, k: int) -> Tensor:
        """The sorted positions of the k largest magnitudes of some values, chosen as `top_k` chooses."""
        ...
