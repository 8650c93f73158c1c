"""gtopk: merge pairs up a binomial tree keeping k at each merge, then send the winners down again."""

from __future__ import annotations

import math

from oktopk.comm.base import Communicator
from oktopk.comm.sizes import LENGTH_BYTES
from oktopk.reduce.base import ReducerSettings, SparseReduction, Stateless
from oktopk.reduce.description import Bound, ReducerDescription
from oktopk.reduce.exchange import mean_of
from oktopk.reduce.local_selection import smallest_magnitude
from oktopk.reduce.volume import Round, SteadyStep, Volume, encoded_bytes
from oktopk.reduce.work import Amount, Work
from oktopk.select.base import Accumulated
from oktopk.sparse_vector import SparseVector


class GTopk(Stateless):
    """Sends at most 4k log2(P) elements, for any P.

    A sum that a merge drops goes into the residual of the rank that dropped it, as does what a sum loses to the wire's
    rounding: `contribution` is what this rank chose, less what it dropped.
    """

    def __init__(self, settings: ReducerSettings) -> None:
        self._selector = settings.selector
        self._exchange = settings.exchange

    def reduce(self, acc: Accumulated, comm: Communicator, k: int) -> SparseReduction:
        chosen = self._selector.top_k(acc, k)
        device, exchange = chosen.indices.device, self._exchange
        best, contribution = chosen, chosen
        parent, children = _relatives(comm.rank, comm.size)
        for child in children:
            merged = exchange.kernels.sum([best, exchange.decode(comm.recv(child, device), acc.values.numel())])
            best, dropped = self._keep(merged, k)
            contribution = exchange.kernels.sum([contribution, dropped.negate()])
        best, gained = exchange.rounded(best)
        if gained is not None:
            contribution = exchange.kernels.sum([contribution, gained])
        if parent is not None:
            comm.send(exchange.encode(best), parent)
            best = exchange.decode(comm.recv(parent, device), acc.values.numel())
        for child in reversed(children):
            comm.send(exchange.encode(best), child)
        return SparseReduction(
            mean_of(best, comm.size),
            contribution,
            local_count=len(chosen),
            global_count=len(best),
            local_threshold=smallest_magnitude(chosen),
            global_threshold=smallest_magnitude(best),
        )

    def _keep(self, merged: SparseVector, k: int) -> tuple[SparseVector, SparseVector]:
        """The k largest, and the rest."""
        positions = self._selector.largest(merged.values, k)
        kept = merged.values.new_zeros(len(merged)).bool()
        kept[positions] = True
        return merged.where(kept), merged.where(~kept)


def _relatives(rank: int, size: int) -> tuple[int | None, list[int]]:
    """Parent (none for rank 0) and children, nearest first, in a binomial tree over any number of ranks."""
    lowest_bit = rank & -rank if rank else 1 << (size - 1).bit_length()
    distances = [1 << shift for shift in range(lowest_bit.bit_length() - 1)]
    children = [rank + distance for distance in distances if rank + distance < size]
    return (rank - lowest_bit if rank else None), children


# --- its description


def _volume(step: SteadyStep) -> Volume:
    """Over every edge of the tree k pairs go up and k come down; the root sends to every level."""
    levels = step.num_peers.bit_length()
    size = LENGTH_BYTES + encoded_bytes(step, step.k, step.n)
    share = 2 * step.num_peers / (step.num_ranks * max(1, levels))
    return Volume(float(step.k), (Round("tree", 2, round(size), 2.0 * step.k, share),) * levels)


def _work(step: SteadyStep) -> Work:
    """One merge waits for the other; the winners then go down the same way."""
    levels, k = step.num_peers.bit_length(), step.k
    both_ways = Amount(2.0 * levels, 2.0 * k * levels)
    return Work(
        encoded=both_ways,
        decoded=both_ways,
        summed=Amount(4.0 * levels, 4.0 * k * levels),
        chosen=k * levels,
    )


GTOPK = ReducerDescription(
    name="gtopk",
    factory=GTopk,
    bound=Bound("4k log2 P", lambda _, k, num_ranks: 4 * k * math.log2(num_ranks)),
    volume=_volume,
    work=_work,
    half_duplex=True,
)
