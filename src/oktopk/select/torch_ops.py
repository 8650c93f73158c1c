"""Selectors in plain torch: exact, for any device, the reference the fast ones are tested against."""

from __future__ import annotations

import math
from statistics import NormalDist

import torch
from torch import Tensor

from oktopk.sparse_vector import SparseVector

_LOWERING = 1.0 - 0.012
_MAX_LOWERINGS = 1000


class TorchSelector:
    """No state: one instance serves every bucket."""

    def top_k(self, acc: Tensor, k: int) -> SparseVector:
        threshold = self.kth_magnitude(acc, k)
        return without_last_ties(self.above(acc, threshold), threshold, k)

    def above(self, acc: Tensor, threshold: float) -> SparseVector:
        return SparseVector.at(acc, _reaches(acc, threshold).nonzero().squeeze(1))

    def kth_magnitude(self, acc: Tensor, k: int) -> float:
        if k > acc.numel():
            return 0.0
        return float(torch.topk(acc.abs(), k, sorted=False).values.min().item())

    def normal_threshold(self, acc: Tensor, k: int) -> float:
        n = acc.numel()
        if k >= n:
            return 0.0
        scale = float(acc.abs().max().item())
        if scale == 0.0:
            return 0.0
        spread = acc.double() / scale
        mean, deviation = float(spread.mean().item()), float(spread.std(correction=0).item())
        tail = NormalDist().inv_cdf(1.0 - k / (2.0 * n))
        threshold = scale * min(1.0, abs(mean) + deviation * tail)
        enough = min(math.ceil(3 * k / 4), int((acc != 0).sum().item()))
        for _ in range(_MAX_LOWERINGS):
            if int(_reaches(acc, threshold).sum().item()) >= enough:
                return threshold
            threshold *= _LOWERING
        return self.kth_magnitude(acc, k)


def without_last_ties(candidates: SparseVector, threshold: float, k: int) -> SparseVector:
    """All that reach `threshold`, the k-th magnitude, cut to k of them: among ties the lower index wins."""
    surplus = len(candidates) - k
    if surplus <= 0:
        return candidates
    tied = candidates.values.abs() == threshold
    return candidates.where(~tied | (torch.cumsum(tied, 0) <= int(tied.sum().item()) - surplus))


def _reaches(acc: Tensor, threshold: float) -> Tensor:
    """A threshold below the smallest fp32 number compares as zero: zeros must be left out by name."""
    return (acc.abs() >= threshold) & (acc != 0)
