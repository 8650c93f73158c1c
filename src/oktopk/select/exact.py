"""Finding the largest elements of a tensor, from nothing: exact, for any kernels."""

from __future__ import annotations

import math
from statistics import NormalDist

import torch
from torch import Tensor

from oktopk.kernels.base import Kernels
from oktopk.sparse_vector import SparseVector

_SAMPLE_RANK = 1024
_MANY_TIMES = 8
_LOWERING = 1.0 - 0.012
_MAX_LOWERINGS = 1000


def top_k(kernels: Kernels, values: Tensor, k: int) -> SparseVector:
    """The k largest magnitudes, exactly min(k, number of non-zeros); among ties the lower index wins."""
    candidates = _at_least(kernels, values, k)
    if len(candidates) <= k:
        return candidates
    threshold = kernels.kth_magnitude(candidates.values, k)
    found = kernels.above(candidates.values, threshold, room=len(candidates))
    assert found is not None  # there is room for all
    return _without_last_ties(candidates.picked(found), threshold, k)


def above(kernels: Kernels, values: Tensor, threshold: float, room: int | None = None) -> SparseVector:
    """Every non-zero element with |x| >= threshold. `room` is how many to expect."""
    room = max(1024, values.numel() // 32) if room is None else room
    while (found := kernels.above(values, threshold, room)) is None:
        room *= 8
    return found


def normal_threshold(values: Tensor, k: int) -> float:
    """See `oktopk.select.base.Selector.normal_threshold`."""
    n = values.numel()
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
    for _ in range(_MAX_LOWERINGS):
        if int(((values.abs() >= threshold) & (values != 0)).sum().item()) >= enough:
            return threshold
        threshold *= _LOWERING
    return float(torch.topk(values.abs(), k, sorted=False).values.min().item())


def _at_least(kernels: Kernels, values: Tensor, k: int) -> SparseVector:
    """A few more than the k largest non-zeros, or all there are.

    Where they begin is guessed from a sample, and looked for digit by digit only where the sample was wrong.
    """
    stride = k // _SAMPLE_RANK | 1  # odd: layers repeat with powers of two
    if stride > 1 and values.numel() > _MANY_TIMES * k:
        sample = values[::stride].contiguous()
        expected = k / stride
        rank = math.ceil(expected + 4 * math.sqrt(expected))
        if rank <= sample.numel():
            floor = kernels.kth_magnitude(sample, rank)
            found = kernels.above(values, floor, room=2 * k)
            if found is not None and len(found) >= k:
                return found
    return above(kernels, values, kernels.kth_magnitude(values, k) if k <= values.numel() else 0.0, room=2 * k)


def _without_last_ties(candidates: SparseVector, threshold: float, k: int) -> SparseVector:
    """All that reach `threshold`, the k-th magnitude, cut to k of them: among ties the lower index wins."""
    surplus = len(candidates) - k
    if surplus <= 0:
        return candidates
    tied = candidates.values.abs() == threshold
    return candidates.where(~tied | (torch.cumsum(tied, 0) <= int(tied.sum().item()) - surplus))
