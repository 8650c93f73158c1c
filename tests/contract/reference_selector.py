"""A selector that is plain to read: it looks at all elements, with whole-tensor operations, and remembers nothing.

What it does not share with oktopk.select: samples, floors, candidates, kernels, ties cut by counting.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import torch
from torch import Tensor

from oktopk.select import Accumulated
from oktopk.sparse_vector import SparseVector


class ReferenceSelector:
    """The contract of oktopk.select.Selector, as its docstrings say it."""

    def top_k(self, acc: Accumulated, k: int) -> SparseVector:
        return SparseVector.at(acc.values, self.largest(acc.values, k))

    def above(self, acc: Accumulated, threshold: float) -> SparseVector:
        return SparseVector.at(acc.values, _reaches(acc.values, threshold).nonzero().squeeze(1))

    def largest(self, values: Tensor, k: int) -> Tensor:
        order = torch.sort(values.abs(), descending=True, stable=True).indices[:k]
        return order[values[order] != 0].sort().values

    def normal_threshold(self, acc: Accumulated, k: int) -> float:
        values, n = acc.values, acc.values.numel()
        if k >= n:
            return 0.0
        scale = float(values.abs().max().item())
        if scale == 0.0:
            return 0.0
        spread = values.double() / scale
        mean, deviation = float(spread.mean().item()), float(spread.std(correction=0).item())
        tail = NormalDist().inv_cdf(1.0 - k / (2.0 * n))
        threshold = scale * min(1.0, abs(mean) + deviation * tail)
        enough = min(math.ceil(3 * k / 4), int((values != 0).sum().item()))
        for _ in range(1000):
            if int(_reaches(values, threshold).sum().item()) >= enough:
                return threshold
            threshold *= 1.0 - 0.012
        return float(values.abs().sort(descending=True).values[k - 1].item())


def _reaches(values: Tensor, threshold: float) -> Tensor:
    """A threshold below the smallest fp32 number compares as zero: zeros must be left out by name."""
    return (values.abs() >= threshold) & (values != 0)
