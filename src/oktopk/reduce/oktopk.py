"""oktopk: near-optimal sparse allreduce over balanced regions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oktopk.comm.base import Communicator, all_gather_ints
from oktopk.reduce.base import ReducerSettings, SparseReduction
from oktopk.reduce.description import Bound, ReducerDescription
from oktopk.reduce.exchange import join, mean_of
from oktopk.reduce.global_threshold import Cut, ExactCut, ReusedCut, lopsided
from oktopk.reduce.local_selection import Choice, ExactTopK, ReusedThreshold
from oktopk.reduce.regions import balanced_boundaries
from oktopk.reduce.volume import (
    INT64_BYTES,
    Round,
    SteadyStep,
    Volume,
    all_reduce,
    encoded_bytes,
    gather,
    lengths,
    scatter,
)
from oktopk.reduce.work import Amount, Work
from oktopk.select.base import Accumulated
from oktopk.sparse_vector import SparseVector
from oktopk.wire import HEADER_BYTES


class OkTopk:
    """Sends at most 6k(P-1)/P elements where the ranks' large values lie in similar places.

    1. choose        k elements here
    2. regions       agree every tau steps on one region for each rank, with about as many chosen elements each
    3. split, reduce send each region's pairs to its owner, which sums them
    4. cut           keep the sums that reach the global threshold, about k
    5. balance, gather    even out the shares if one exceeds 2k/P, then everyone gets all
    6. apply         mean = sum / P; what this rank chose AND was gathered has left its residual

    Buffers go straight to every peer, so a share of s pairs costs its owner 2s(P-1) elements: up to 2k/P, that and
    step 3 stay within the bound; above, about k are kept, and step 3, moving and gathering cost 2k(P-1)/P each.
    """

    def __init__(self, settings: ReducerSettings, choice: Choice, cut: Cut) -> None:
        self._tau = settings.tau
        self._exchange = settings.exchange
        self._choice = choice
        self._cut = cut
        self._steps = 0
        self._boundaries: list[int] = []

    def reduce(self, acc: Accumulated, comm: Communicator, k: int) -> SparseReduction:
        chosen, local_threshold = self._choice.choose(acc, k)
        sent, _ = self._exchange.rounded(chosen)
        self._agree_on_regions(sent, comm)
        sums = self._exchange.reduce_regions(sent, self._boundaries, comm)
        kept, global_threshold = self._cut.keep(sums, comm, k)
        kept, gained = self._exchange.rounded(kept)
        total = self._balance_and_gather(kept, k, comm)
        self._steps += 1
        contribution = self._exchange.kernels.restrict(sent, total.indices)
        return SparseReduction(
            mean_of(total, comm.size),
            contribution if gained is None else self._exchange.kernels.sum([contribution, gained]),
            local_count=len(chosen),
            global_count=len(total),
            local_threshold=local_threshold,
            global_threshold=global_threshold,
        )

    def _agree_on_regions(self, chosen: SparseVector, comm: Communicator) -> None:
        if self._steps % self._tau == 0 or len(self._boundaries) != comm.size + 1:
            self._boundaries = balanced_boundaries(chosen, comm)

    def _balance_and_gather(self, kept: SparseVector, k: int, comm: Communicator) -> SparseVector:
        encoded = self._exchange.encode(kept)
        shares, sizes = all_gather_ints(comm, [len(kept), encoded.numel()], encoded.device)
        if lopsided(shares, k):
            kept = self._exchange.rebalance(kept, shares, comm)
            return join(self._exchange.gather(kept, comm))
        return join(self._exchange.decode_all(comm.all_gather_v(encoded, sizes), kept, comm))

    def state_dict(self) -> dict[str, Any]:
        return {
            "choice": self._choice.state_dict(),
            "cut": self._cut.state_dict(),
            "steps": self._steps,
            "boundaries": list(self._boundaries),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._choice.load_state_dict(state["choice"])
        self._cut.load_state_dict(state["cut"])
        self._steps = int(state["steps"])
        self._boundaries = [int(edge) for edge in state["boundaries"]]


def oktopk(settings: ReducerSettings) -> OkTopk:
    """With exact counts in every step, or with the paper's reused thresholds."""
    kernels = settings.exchange.kernels
    if settings.thresholds == "reuse":
        choice = ReusedThreshold(settings.selector, settings.tau_prime)
        return OkTopk(settings, choice, ReusedCut(kernels, settings.tau_prime))
    return OkTopk(settings, ExactTopK(settings.selector), ExactCut(kernels))


# --- its description

_HISTOGRAM_BYTES = 256 * INT64_BYTES  # around the last threshold


def _volume(step: SteadyStep) -> Volume:
    """Regions follow the data, so that shares are about equal."""
    share, region = step.k / step.num_ranks, step.n / step.num_ranks
    if step.evened:
        moved = HEADER_BYTES + encoded_bytes(step, share, region)  # in two messages, to neighbours
        last = [
            lengths("all_to_all", step),
            Round("all_to_all", 2, round(moved), 2 * share),
            *gather(step, share, region),
        ]
    else:
        last = gather(step, share, region, min(step.skew, 2.0))[1:]  # the lengths are known
    return Volume(
        float(step.k),
        (
            *scatter(step),
            all_reduce(_HISTOGRAM_BYTES, step.num_ranks),
            all_reduce(2 * INT64_BYTES * step.num_ranks, step.num_ranks),
            *last,
        ),
    )


def _work(step: SteadyStep) -> Work:
    """Every rank encodes and decodes a piece for each region, sums its own, and gathers what is kept of the sums."""
    peers, share = step.num_peers, step.k / step.num_ranks
    pieces = Amount(peers, share * peers)
    return Work(
        encoded=pieces.plus(Amount(1.0, share)),
        decoded=pieces.plus(Amount(peers, share * peers)),
        summed=Amount(step.num_ranks, step.k),
    )


OKTOPK = ReducerDescription(
    name="oktopk",
    factory=oktopk,
    bound=Bound("6k(P-1)/P", lambda _, k, num_ranks: 6 * k * (num_ranks - 1) / num_ranks),
    volume=_volume,
    work=_work,
    regions="balanced",
)
