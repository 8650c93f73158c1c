"""topkDSA (topkSA) and gaussiankSA: reduce-scatter of pairs over equal regions, then gather the sums."""

from __future__ import annotations

import torch

from oktopk.comm.base import Communicator
from oktopk.reduce.base import ReducerSettings, SparseReduction
from oktopk.reduce.description import Bound, ReducerDescription
from oktopk.reduce.exchange import join, mean_of
from oktopk.reduce.local_selection import Choice, ChoosingReducer, ExactTopK, NormalFit
from oktopk.reduce.regions import equal_boundaries
from oktopk.reduce.volume import SteadyStep, Volume, gather, lengths, scatter, to_peers
from oktopk.reduce.work import Amount, Work
from oktopk.select.base import Accumulated
from oktopk.sparse_vector import SparseVector
from oktopk.wire import VALUE_DTYPES, expected_run_bytes

_INDEX_BYTES = 1  # what the wire needs where so many are sent


class SplitAllGather(ChoosingReducer):
    """Sends between 4k(P-1)/P and (2k+n)(P-1)/P elements. All that was chosen is applied."""

    def __init__(self, settings: ReducerSettings, choice: Choice) -> None:
        super().__init__(choice)
        self._exchange = settings.exchange

    def reduce(self, acc: Accumulated, comm: Communicator, k: int) -> SparseReduction:
        chosen, threshold = self._choice.choose(acc, k)
        contribution, _ = self._exchange.rounded(chosen)
        boundaries = equal_boundaries(acc.values.numel(), comm.size)
        mine, gained = self._exchange.rounded(self._exchange.reduce_regions(contribution, boundaries, comm))
        if gained is not None:
            contribution = self._exchange.kernels.sum([contribution, gained])
        start, stop = boundaries[comm.rank : comm.rank + 2]
        sent = _whole_region_if_cheaper(mine, start, stop, VALUE_DTYPES[self._exchange.values].itemsize)
        total = join(self._exchange.gather(sent, comm))
        total = total.where(total.values != 0)  # a whole region carries zeros, which nobody applies
        return SparseReduction(
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


# --- their descriptions

_BOUND = Bound(
    "(2k+n)(P-1)/P",
    lambda n, k, num_ranks: (2 * k + n) * (num_ranks - 1) / num_ranks,
    least=lambda _, k, num_ranks: 4 * k * (num_ranks - 1) / num_ranks,
)


def _volume(step: SteadyStep) -> Volume:
    """A region that is almost full travels whole, without indices."""
    share, region = step.union / step.num_ranks, step.n / step.num_ranks
    if (step.value_bytes + _INDEX_BYTES) * share <= step.value_bytes * region:
        sums = gather(step, share, region, min(step.skew, region / share))
    else:
        size = expected_run_bytes(region, value_bytes=step.value_bytes)
        sums = [lengths("all_gather", step), to_peers("all_gather", step, size, region)]
    return Volume(step.union, (*scatter(step), *sums))


def _work(step: SteadyStep) -> Work:
    """Every rank encodes and decodes a piece for each region, sums its own, and gathers the sums."""
    peers, piece, share = step.num_peers, step.k / step.num_ranks, step.union / step.num_ranks
    pieces = Amount(peers, piece * peers)
    return Work(
        encoded=pieces.plus(Amount(1.0, share)),
        decoded=pieces.plus(Amount(peers, share * peers)),
        summed=Amount(step.num_ranks, step.k),
        chosen=step.union - step.k,
    )


TOPK_DSA = ReducerDescription(
    name="topkDSA",
    aliases=("topkSA",),
    factory=topk_dsa,
    bound=_BOUND,
    volume=_volume,
    work=_work,
    applies_union=True,
    regions="equal",
)
GAUSSIANK_SA = ReducerDescription(
    name="gaussiankSA",
    factory=gaussiank_sa,
    bound=_BOUND,
    volume=_volume,
    work=_work,
    applies_union=True,
    regions="equal",
)
