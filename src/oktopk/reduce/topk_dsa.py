"""topkDSA (topkSA) and gaussiankSA: reduce-scatter of pairs over equal regions, then gather the sums."""

from __future__ import annotations

import torch
from torch import Tensor

from oktopk.comm.base import Communicator
from oktopk.reduce.base import ReducerSettings
from oktopk.reduce.exchange import gather, join, mean_of, reduce_regions
from oktopk.reduce.regions import equal_boundaries
from oktopk.reduce.threshold import ChoosingReducer, ExactTopK, NormalFit
from oktopk.types import Reduction, SparseVector

_PAIR_BYTES, _VALUE_BYTES = 8, 4


class SplitAllGather(ChoosingReducer):
    """Sends between 4k(P-1)/P and (2k+n)(P-1)/P elements. All that was chosen is applied."""

    def reduce(self, acc: Tensor, comm: Communicator, k: int) -> Reduction:
        chosen, threshold = self._choice.choose(acc, k)
        boundaries = equal_boundaries(acc.numel(), comm.size)
        mine = reduce_regions(chosen, boundaries, comm)
        sent = _whole_region_if_cheaper(mine, boundaries[comm.rank], boundaries[comm.rank + 1])
        total = join(gather(sent, comm))
        total = total.where(total.values != 0)  # a whole region carries zeros, which nobody applies
        return Reduction(
            mean_of(total, comm.size),
            chosen,
            local_count=len(chosen),
            global_count=len(total),
            local_threshold=threshold,
        )


def _whole_region_if_cheaper(sums: SparseVector, start: int, stop: int) -> SparseVector:
    """Pairs, or every element of the region: the wire needs no indices for a run without gaps."""
    if _PAIR_BYTES * len(sums) <= _VALUE_BYTES * (stop - start):
        return sums
    values = torch.zeros(stop - start, dtype=torch.float32, device=sums.values.device)
    values[sums.indices - start] = sums.values
    return SparseVector(torch.arange(start, stop, device=sums.indices.device), values, sums.length)


def topk_dsa(settings: ReducerSettings) -> SplitAllGather:
    return SplitAllGather(ExactTopK(settings.selector))


def gaussiank_sa(settings: ReducerSettings) -> SplitAllGather:
    return SplitAllGather(NormalFit(settings.selector))
