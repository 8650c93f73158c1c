"""topkA, topkA2, topkAopt and the gaussiank pair: choose locally, gather everyone's pairs, sum."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from oktopk.comm.base import Communicator
from oktopk.reduce.base import ReducerSettings, Stateless
from oktopk.reduce.exchange import gather, gather_in_two_messages, mean_of
from oktopk.reduce.threshold import Choice, ChoosingReducer, ExactTopK, NormalFit, ReusedThreshold, smallest_magnitude
from oktopk.types import Reduction, SparseVector

Gather = Callable[[SparseVector, Communicator], list[SparseVector]]


class AllGather(ChoosingReducer):
    """Sends about 2k(P-1) elements. All that was chosen is applied."""

    def __init__(self, choice: Choice, gather: Gather = gather) -> None:
        super().__init__(choice)
        self._gather = gather

    def reduce(self, acc: Tensor, comm: Communicator, k: int) -> Reduction:
        chosen, threshold = self._choice.choose(acc, k)
        total = SparseVector.sum(self._gather(chosen, comm))
        return Reduction(
            mean_of(total, comm.size),
            chosen,
            local_count=len(chosen),
            global_count=len(total),
            local_threshold=threshold,
        )


class TopkA2(Stateless):
    """As topkA, then only the k largest sums are applied; what is cut stays with the ranks it came from."""

    def __init__(self, settings: ReducerSettings) -> None:
        self._selector = settings.selector

    def reduce(self, acc: Tensor, comm: Communicator, k: int) -> Reduction:
        chosen = self._selector.top_k(acc, k)
        total = SparseVector.sum(gather(chosen, comm))
        kept = total.where(self._selector.top_k(total.values, k).indices)
        return Reduction(
            mean_of(kept, comm.size),
            chosen.restrict_to(kept.indices),
            local_count=len(chosen),
            global_count=len(kept),
            local_threshold=smallest_magnitude(chosen),
            global_threshold=smallest_magnitude(kept),
        )


def topk_a(settings: ReducerSettings) -> AllGather:
    return AllGather(ExactTopK(settings.selector))


def topk_a_opt(settings: ReducerSettings) -> AllGather:
    return AllGather(ReusedThreshold(settings.selector, settings.tau_prime))


def gaussiank(settings: ReducerSettings) -> AllGather:
    return AllGather(NormalFit(settings.selector), gather_in_two_messages)


def gaussiank_concat(settings: ReducerSettings) -> AllGather:
    return AllGather(NormalFit(settings.selector))
