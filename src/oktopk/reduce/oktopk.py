"""oktopk: near-optimal sparse allreduce by balanced regions and reused thresholds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from oktopk.comm.base import Communicator, all_gather_int
from oktopk.reduce.base import ReducerSettings
from oktopk.reduce.exchange import gather, join, mean_of, reduce_regions
from oktopk.reduce.regions import balanced_boundaries, rebalance
from oktopk.reduce.threshold import ReusedThreshold, global_kth_magnitude
from oktopk.select.base import Selector
from oktopk.types import Reduction, SparseVector


class OkTopk:
    """Sends at most 6k(P-1)/P elements where the ranks' large values lie in similar places.

    1. choose        about k elements here, by a threshold renewed every tau' steps
    2. regions       agree every tau steps on one region for each rank, with about as many chosen elements each
    3. split, reduce send each region's pairs to its owner, which sums them
    4. cut           keep sums at or above the global threshold, renewed every tau' steps, and sooner where it would
                     keep fewer than 3k/4, more than 5k/4, or so many that evening them out would cost too much
    5. balance, gather    even out the shares if one exceeds 2k/P, then everyone gets all
    6. apply         mean = sum / P; what this rank chose AND was gathered has left its residual

    Buffers go straight to every peer, so a share of s pairs costs its owner 2s(P-1) elements: up to 2k/P, that and
    step 3 stay within the bound; above, at most k are kept, and step 3, moving and gathering cost 2k(P-1)/P each.
    """

    def __init__(self, settings: ReducerSettings) -> None:
        self._tau, self._tau_prime = settings.tau, settings.tau_prime
        self._selector: Selector = settings.selector
        self._choice = ReusedThreshold(settings.selector, settings.tau_prime)
        self._steps = 0
        self._global_threshold = 0.0
        self._boundaries: list[int] = []

    def reduce(self, acc: Tensor, comm: Communicator, k: int) -> Reduction:
        chosen, local_threshold = self._choice.choose(acc, k)
        self._agree_on_regions(chosen, comm)
        sums = reduce_regions(chosen, self._boundaries, comm)
        kept, shares = self._cut(sums, comm, k)
        total = _balance_and_gather(kept, shares, k, comm)
        self._steps += 1
        return Reduction(
            mean_of(total, comm.size),
            chosen.restrict_to(total.indices),
            local_count=len(chosen),
            global_count=len(total),
            local_threshold=local_threshold,
            global_threshold=self._global_threshold,
        )

    def _agree_on_regions(self, chosen: SparseVector, comm: Communicator) -> None:
        if self._steps % self._tau == 0 or len(self._boundaries) != comm.size + 1:
            self._boundaries = balanced_boundaries(chosen, comm)

    def _cut(self, sums: SparseVector, comm: Communicator, k: int) -> tuple[SparseVector, list[int]]:
        """The sums worth applying, and how many each rank holds; every rank decides alike, from shared counts."""
        if self._steps % self._tau_prime and k < sums.length:
            kept, shares = self._keep(sums, comm)
            if 3 * k <= 4 * sum(shares) <= 5 * k and (sum(shares) <= k or not _lopsided(shares, k)):
                return kept, shares
        self._global_threshold = global_kth_magnitude(sums, comm, k)
        kept, shares = self._keep(sums, comm)
        return (kept, shares) if sum(shares) <= k else _cut_ties(kept, self._global_threshold, sum(shares) - k, comm)

    def _keep(self, sums: SparseVector, comm: Communicator) -> tuple[SparseVector, list[int]]:
        kept = sums.where(self._selector.above(sums.values, self._global_threshold).indices)
        return kept, all_gather_int(comm, len(kept), sums.indices.device)

    def state_dict(self) -> dict[str, Any]:
        return {
            "choice": self._choice.state_dict(),
            "steps": self._steps,
            "global_threshold": self._global_threshold,
            "boundaries": list(self._boundaries),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._choice.load_state_dict(state["choice"])
        self._steps = int(state["steps"])
        self._global_threshold = float(state["global_threshold"])
        self._boundaries = [int(edge) for edge in state["boundaries"]]


def _cut_ties(kept: SparseVector, threshold: float, surplus: int, comm: Communicator) -> tuple[SparseVector, list[int]]:
    """Without `surplus` of the sums that are exactly at the threshold: the highest indices go first."""
    tied = kept.values.abs() == threshold
    everyones = all_gather_int(comm, int(tied.sum().item()), kept.indices.device)
    allowed = sum(everyones) - surplus - sum(everyones[: comm.rank])
    kept = kept.where(~tied | (tied.cumsum(0) <= allowed))
    return kept, all_gather_int(comm, len(kept), kept.indices.device)


def _lopsided(shares: list[int], k: int) -> bool:
    return max(shares) * len(shares) > 2 * k


def _balance_and_gather(kept: SparseVector, shares: list[int], k: int, comm: Communicator) -> SparseVector:
    if _lopsided(shares, k):
        kept = rebalance(kept, shares, comm)
    return join(gather(kept, comm))
