"""topkDSA (topkSA) and gaussiankSA: reduce-scatter of pairs over equal regions, then gather the sums."""

from __future__ import annotations

import torch
from torch import Tensor

from oktopk.comm.base import Communicator
from oktopk.reduce.base import ReducerSettings, Reduction
from oktopk.reduce.exchange import join, mean_of
from oktopk.reduce.local_selection import Choice, ChoosingReducer, ExactTopK, NormalFit
from oktopk.reduce.regions import equal_boundaries
from oktopk.sparse_vector import SparseVector
from oktopk.wire import VALUE_DTYPES

_INDEX_BYTES = 1  # what the wire needs where so many are sent


class SplitAllGather(ChoosingReducer):
    """Sends between 4k(P-1)/P and (2k+n)(P-1)/P elements. All that was chosen is applied."""

    def __init__(self, settings: ReducerSettings, choice: Choice) -> None:
        super().__init__(choice)
        self._exchange = settings.exchange

    def reduce(self, acc: Tensor, comm: Communicator, k: int) -> Reduction:
        chosen, threshold = self._choice.choose(acc, k)
        contribution, _ = self._exchange.rounded(chosen)
        boundaries = equal_boundaries(acc.numel(), comm.size)
        mine, gained = self._exchange.rounded(self._exchange.reduce_regions(contribution, boundaries, comm))
        if gained is not None:
            contribution = self._exchange.kernels.sum([contribution, gained])
        start, stop = boundaries[comm.rank : comm.rank + 2]
        sent = _whole_region_if_cheaper(mine, start, stop, VALUE_DTYPES[self._exchange.values].itemsize)
        total = join(self._exchange.gather(sent, comm))
        total = total.where(total.values != 0)  # a whole region carries zeros, which nobody applies
        return Reduction(
            mean_of(total, comm.size),
            contribution,
            local_count=len(chosen),
            global_count=len(total),
            local_threshold=threshold,
        )


def _whole_region_if_cheaper(sums: SparseVector, start: int, stop: int, value_bytes: int) -> SparseVector:
    """Pairs, or every element of the region: the wire needs no indices for a run without gaps."""
    if (value_bytes + _INDEX_BYTES) * len(sums) <= value_bytes * (stop - start):
        return sums
    values = torch.zeros(stop - start, dtype=torch.float32, device=sums.values.device)
    values[sums.indices - start] = sums.values
    return SparseVector(torch.arange(start, stop, device=sums.indices.device), values, sums.length)


def topk_dsa(settings: ReducerSettings) -> SplitAllGather:
    return SplitAllGather(settings, ExactTopK(settings.selector))


def gaussiank_sa(settings: ReducerSettings) -> SplitAllGather:
    return SplitAllGather(settings, NormalFit(settings.selector))
