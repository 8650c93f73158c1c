"""A selector that knows its bucket: adding what is owed and finding the largest elements is one pass.

Distributions move slowly from step to step, so the last k-th magnitude tells about where the next one will be. The pass
that adds up collects everything a little below it, a slight superset of the k largest; what is chosen is chosen among
those. Where the guess was wrong, all elements are looked at again: results never depend on it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from oktopk.kernels.base import Kernels, Velocity
from oktopk.kernels.by_device import DeviceKernels
from oktopk.select import exact
from oktopk.select.base import Accumulated
from oktopk.sparse_vector import SparseVector

_ROOM = 4
_FIRST_MARGIN, _LEAST_MARGIN, _MOST_MARGIN = 0.05, 0.001, 0.5


class BucketSelector:
    """One for each bucket. What it selects is on `home`, where it will be sent from."""

    def __init__(self, kernels: DeviceKernels, device: torch.device, home: torch.device) -> None:
        self._here: Kernels = kernels.on(device)
        self._at_home: Kernels = kernels.on(home)
        self._home = home
        self._next_floor = math.inf
        self._margin = _FIRST_MARGIN

    def accumulate(
        self,
        residual: Tensor | None,
        gradient: Tensor,
        out: Tensor,
        k: int,
        limit: float,
        velocity: Velocity | None = None,
    ) -> Accumulated:
        """`out = residual + gradient`, looking out for what is worth sending and for what is beyond `limit`."""
        floor = min(self._next_floor, limit)
        seen = self._here.accumulate(residual, gradient, out, floor, _ROOM * k, self._home, velocity)
        return Accumulated(out, floor, seen)

    def top_k(self, acc: Accumulated, k: int) -> SparseVector:
        candidates = acc.candidates
        if candidates is not None and len(candidates) >= k:
            best = candidates.picked(exact.top_k(self._at_home, candidates.values, k))
        else:
            best = exact.top_k(self._here, acc.values, k).to(self._home)
        self._guess(best, k, None if candidates is None else len(candidates))
        return best

    def above(self, acc: Accumulated, threshold: float) -> SparseVector:
        candidates = acc.candidates
        if candidates is None or threshold < acc.floor:
            return exact.above(self._here, acc.values, threshold).to(self._home)
        return candidates.picked(exact.above(self._at_home, candidates.values, threshold))

    def normal_threshold(self, acc: Accumulated, k: int) -> float:
        return exact.normal_threshold(acc.values, k)

    def largest(self, values: Tensor, k: int) -> Tensor:
        return exact.top_k(self._at_home, values, k).indices

    def _guess(self, best: SparseVector, k: int, num_candidates: int | None) -> None:
        """The next floor: below the smallest chosen, by a margin that lets a little more than k pass, not much more.

        How many lie just below it depends on the gradients: where they persist, residuals pile up there.
        """
        if num_candidates is None:
            change = 0.5 if math.isfinite(self._next_floor) else 1.0
        elif num_candidates < k:
            change = 2.0
        else:
            change = 1.2 if num_candidates < 1.1 * k else 0.8 if num_candidates > 2 * k else 1.0
        self._margin = min(max(self._margin * change, _LEAST_MARGIN), _MOST_MARGIN)
        smallest = float(best.values.abs().min().item()) if len(best) else math.inf
        self._next_floor = (1.0 - self._margin) * smallest
