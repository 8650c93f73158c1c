"""topkA, topkA2, topkAopt and the gaussiank pair: choose locally, gather everyone's pairs, sum."""

from __future__ import annotations

from collections.abc import Callable

from oktopk.comm.base import Communicator
from oktopk.reduce.base import ReducerSettings, SparseReduction, Stateless
from oktopk.reduce.description import Bound, ReducerDescription
from oktopk.reduce.exchange import Exchange, mean_of
from oktopk.reduce.local_selection import (
    Choice,
    ChoosingReducer,
    ExactTopK,
    NormalFit,
    ReusedThreshold,
    smallest_magnitude,
)
from oktopk.reduce.volume import SteadyStep, Volume, encoded_bytes, gather, lengths, to_peers
from oktopk.reduce.work import Amount, Work
from oktopk.select.base import Accumulated
from oktopk.sparse_vector import SparseVector

Gather = Callable[[Exchange, SparseVector, Communicator], list[SparseVector]]


class AllGather(ChoosingReducer):
    """Sends about 2k(P-1) elements. All that was chosen is applied."""

    def __init__(self, settings: ReducerSettings, choice: Choice, gather: Gather = Exchange.gather) -> None:
        super().__init__(choice)
        self._exchange = settings.exchange
        self._gather = gather

    def reduce(self, acc: Accumulated, comm: Communicator, k: int) -> SparseReduction:
        chosen, threshold = self._choice.choose(acc, k)
        sent, _ = self._exchange.rounded(chosen)
        total = self._exchange.kernels.sum(self._gather(self._exchange, sent, comm))
        return SparseReduction(
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

    def reduce(self, acc: Accumulated, comm: Communicator, k: int) -> SparseReduction:
        chosen = self._selector.top_k(acc, k)
        sent, _ = self._exchange.rounded(chosen)
        total = self._exchange.kernels.sum(self._exchange.gather(sent, comm))
        kept = total.where(self._selector.largest(total.values, k))
        return SparseReduction(
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


# --- their descriptions

_BOUND = Bound("2k(P-1)", lambda _, k, num_ranks: 2 * k * (num_ranks - 1))
_APPLYING = 0.2
"""The part of the cost of choosing and applying an element that applying it makes up."""


def _gathering(step: SteadyStep) -> Volume:
    return Volume(step.union, tuple(gather(step, step.chosen, step.n)))


def _gathering_then_cutting(step: SteadyStep) -> Volume:
    return Volume(float(step.k), tuple(gather(step, step.chosen, step.n)))


def _gathering_in_two_messages(step: SteadyStep) -> Volume:
    """The first message carries header and indices, the second one the values."""
    values = step.value_bytes * step.chosen
    indices = encoded_bytes(step, step.chosen, step.n) - values
    return Volume(
        step.union,
        (
            lengths("all_gather", step),
            to_peers("all_gather", step, indices, 2 * step.chosen),
            lengths("all_gather", step),
            to_peers("all_gather", step, values, 0.0),
        ),
    )


def _work(step: SteadyStep) -> Work:
    """Every rank encodes one vector, decodes those of its peers and sums all of them."""
    k, peers = step.k, step.num_peers
    return Work(
        encoded=Amount(1.0, k),
        decoded=Amount(peers, k * peers),
        summed=Amount(step.num_ranks, k * step.num_ranks),
        chosen=_APPLYING * (step.union - k),
    )


TOPK_A = ReducerDescription(
    name="topkA",
    factory=topk_a,
    bound=_BOUND,
    volume=_gathering,
    work=_work,
    applies_union=True,
)
TOPK_A2 = ReducerDescription(
    name="topkA2",
    factory=TopkA2,
    bound=_BOUND,
    volume=_gathering_then_cutting,
    work=_work,
)
TOPK_A_OPT = ReducerDescription(
    name="topkAopt",
    factory=topk_a_opt,
    bound=_BOUND,
    volume=_gathering,
    work=_work,
    applies_union=True,
)
GAUSSIANK = ReducerDescription(
    name="gaussiank",
    factory=gaussiank,
    bound=_BOUND,
    volume=_gathering_in_two_messages,
    work=_work,
    applies_union=True,
)
GAUSSIANK_CONCAT = ReducerDescription(
    name="gaussiankconcat",
    factory=gaussiank_concat,
    bound=_BOUND,
    volume=_gathering,
    work=_work,
    applies_union=True,
)
