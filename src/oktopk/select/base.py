"""The contract of a selector. `oktopk.select.torch_ops` is its exact reference."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from oktopk.sparse_vector import SparseVector


class Selector(Protocol):
    """Picks elements of a flat, finite fp32 tensor by magnitude. Never mutates it; results own their memory.

    Zero is never picked: sending it would change nothing. Denormals are ordinary numbers. Thresholds are compared as
    fp32, like the elements.
    """

    def top_k(self, acc: Tensor, k: int) -> SparseVector:
        """The k largest magnitudes, exactly min(k, number of non-zeros); among ties the lower index wins."""
        ...

    def above(self, acc: Tensor, threshold: float) -> SparseVector:
        """Every non-zero element with |x| >= threshold, all ties included."""
        ...

    def kth_magnitude(self, acc: Tensor, k: int) -> float:
        """The k-th largest magnitude; 0.0 where there are fewer than k non-zeros."""
        ...

    def normal_threshold(self, acc: Tensor, k: int) -> float:
        """Where a normal distribution fitted to `acc` would leave k elements in its two tails.

        Lowered in steps of 1.2 % while it selects fewer than 3k/4 (or all non-zeros, where there are fewer).
        """
        ...
