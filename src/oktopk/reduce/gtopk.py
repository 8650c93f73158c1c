"""gtopk: merge pairs up a binomial tree keeping k at each merge, then send the winners down again."""

from __future__ import annotations

from torch import Tensor

from oktopk.comm.base import Communicator
from oktopk.reduce.base import ReducerSettings, Reduction, Stateless
from oktopk.reduce.exchange import mean_of
from oktopk.reduce.local_selection import smallest_magnitude
from oktopk.sparse_vector import SparseVector


class GTopk(Stateless):
    """Sends at most 4k log2(P) elements, for any P.

    A sum that a merge drops goes into the residual of the rank that dropped it, as does what a sum loses to the wire's
    rounding: `contribution` is what this rank chose, less what it dropped.
    """

    def __init__(self, settings: ReducerSettings) -> None:
        self._selector = settings.selector
        self._exchange = settings.exchange

    def reduce(self, acc: Tensor, comm: Communicator, k: int) -> Reduction:
        chosen = self._selector.top_k(acc, k)
        device, exchange = chosen.indices.device, self._exchange
        best, contribution = chosen, chosen
        parent, children = _relatives(comm.rank, comm.size)
        for child in children:
            merged = exchange.kernels.sum([best, exchange.decode(comm.recv(child, device), acc.numel())])
            best, dropped = self._keep(merged, k)
            contribution = exchange.kernels.sum([contribution, dropped.negate()])
        best, gained = exchange.rounded(best)
        if gained is not None:
            contribution = exchange.kernels.sum([contribution, gained])
        if parent is not None:
            comm.send(exchange.encode(best), parent)
            best = exchange.decode(comm.recv(parent, device), acc.numel())
        for child in reversed(children):
            comm.send(exchange.encode(best), child)
        return Reduction(
            mean_of(best, comm.size),
            contribution,
            local_count=len(chosen),
            global_count=len(best),
            local_threshold=smallest_magnitude(chosen),
            global_threshold=smallest_magnitude(best),
        )

    def _keep(self, merged: SparseVector, k: int) -> tuple[SparseVector, SparseVector]:
        """The k largest, and the rest."""
        positions = self._selector.top_k(merged.values, k).indices
        kept = merged.values.new_zeros(len(merged)).bool()
        kept[positions] = True
        return merged.where(kept), merged.where(~kept)


def _relatives(rank: int, size: int) -> tuple[int | None, list[int]]:
    """Parent (none for rank 0) and children, nearest first, in a binomial tree over any number of ranks."""
    lowest_bit = rank & -rank if rank else 1 << (size - 1).bit_length()
    distances = [1 << shift for shift in range(lowest_bit.bit_length() - 1)]
    children = [rank + distance for distance in distances if rank + distance < size]
    return (rank - lowest_bit if rank else None), children
