"""A selector made of kernels: the same results as `torch_ops`, without sorting and without dense temporaries."""

from __future__ import annotations

import math

from torch import Tensor

from oktopk.kernels.base import Kernels
from oktopk.select.torch_ops import TorchSelector, without_last_ties
from oktopk.sparse_vector import SparseVector

_SAMPLE_RANK = 1024
_MANY_TIMES = 8


class KernelSelector:
    """No state."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._plain = TorchSelector()

    def top_k(self, acc: Tensor, k: int) -> SparseVector:
        candidates = self._at_least(acc, k)
        if len(candidates) <= k:
            return candidates
        threshold = self._kernels.kth_magnitude(candidates.values, k)
        found = self._kernels.above(candidates.values, threshold, room=len(candidates))
        assert found is not None  # there is room for all
        return without_last_ties(candidates.picked(found), threshold, k)

    def above(self, acc: Tensor, threshold: float) -> SparseVector:
        return self._all_above(acc, threshold, room=max(1024, acc.numel() // 32))

    def _all_above(self, acc: Tensor, threshold: float, room: int) -> SparseVector:
        """Where `room` is not enough, with more."""
        while (found := self._kernels.above(acc, threshold, room)) is None:
            room *= 8
        return found

    def kth_magnitude(self, acc: Tensor, k: int) -> float:
        if k > acc.numel():
            return 0.0
        candidates = self._at_least(acc, k)
        return self._kernels.kth_magnitude(candidates.values, k) if len(candidates) >= k else 0.0

    def normal_threshold(self, acc: Tensor, k: int) -> float:
        return self._plain.normal_threshold(acc, k)

    def _at_least(self, acc: Tensor, k: int) -> SparseVector:
        """A few more than the k largest non-zeros, or all there are.

        Where they begin is guessed from a sample, and looked for digit by digit only where the sample was wrong.
        """
        stride = k // _SAMPLE_RANK | 1  # odd: layers repeat with powers of two
        if stride > 1 and acc.numel() > _MANY_TIMES * k:
            sample = acc[::stride].contiguous()
            expected = k / stride
            rank = math.ceil(expected + 4 * math.sqrt(expected))
            if rank <= sample.numel():
                floor = self._kernels.kth_magnitude(sample, rank)
                found = self._kernels.above(acc, floor, room=2 * k)
                if found is not None and len(found) >= k:
                    return found
        return self._all_above(acc, self._kernels.kth_magnitude(acc, k) if k <= acc.numel() else 0.0, room=2 * k)
