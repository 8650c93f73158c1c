"""topkA, topkA2, topkAopt and the gaussiank pair: choose locally, gather everyone's pairs, sum."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from oktopk.comm.base import Communicator
from oktopk.reduce.base import ReducerSettings, Reduction, Stateless
from oktopk.reduce.exchange import Exchange, mean_of
from oktopk.reduce.local_selection import (
    Choice,
    ChoosingReducer,
    ExactTopK,
    NormalFit,
    ReusedThreshold,
    smallest_magnitude,
)
from oktopk.sparse_vector import SparseVector

Gather = Callable[[Exchange, SparseVector, Communicator], list[SparseVector]]


class AllGather(ChoosingReducer):
    """Sends about 2k(P-1) elements. All that was chosen is applied."""

    def __init__(self, settings: ReducerSettings, choice: Choice, gather: Gather = Exchange.gather) -> None:
        super().__init__(choice)
        self._exchange = settings.exchange
        self._gather = gather

    def reduce(self, acc: Tensor, comm: Communicator, k: int) -> Reduction:
        chosen, threshold = self._choice.choose(acc, k)
        sent, _ = self._exchange.rounded(chosen)
        total = self._exchange.kernels.sum(self._gather(self._exchange, sent, comm))
        return Reduction(
            mean_of(total, comm.size),
            sent,
            local_count=len(chosen),
            global_count=len(total),
            local_threshold=threshold,
        )


class TopkA2(Stateless):
    """As topkA, then only the k largest sums are applied; what is cut stays with the ranks it came from."""

    def __init__(self, settings: ReducerSettings) -> None:
        self._selector = settings.selector
        self._exchange = settings.exchange

    def reduce(self, acc: Tensor, comm: Communicator, k: int) -> Reduction:
        chosen = self._selector.top_k(acc, k)
        sent, _ = self._exchange.rounded(chosen)
        total = self._exchange.kernels.sum(self._exchange.gather(sent, comm))
        kept = total.where(self._selector.top_k(total.values, k).indices)
        return Reduction(
            mean_of(kept, comm.size),
            self._exchange.kernels.restrict(sent, kept.indices),
            local_count=len(chosen),
            global_count=len(kept),
            local_threshold=smallest_magnitude(chosen),
            global_threshold=smallest_magnitude(kept),
        )


def topk_a(settings: ReducerSettings) -> AllGather:
    return AllGather(settings, ExactTopK(settings.selector))


def topk_a_opt(settings: ReducerSettings) -> AllGather:
    return AllGather(settings, ReusedThreshold(settings.selector, settings.tau_prime))


def gaussiank(settings: ReducerSettings) -> AllGather:
    return AllGather(settings, NormalFit(settings.selector), Exchange.gather_in_two_messages)


def gaussiank_concat(settings: ReducerSettings) -> AllGather:
    return AllGather(settings, NormalFit(settings.selector))
