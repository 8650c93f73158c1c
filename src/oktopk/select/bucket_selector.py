"""A selector that knows its bucket: adding the residual and finding the largest elements is one pass.

Distributions move slowly from step to step, so the last k-th magnitude tells about where the next one will be. The pass
that makes `acc` collects everything a little below it, a slight superset of the k largest; what is chosen is chosen
among those. Where the guess was wrong, all of `acc` is looked at again: results never depend on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from oktopk.kernels.base import Kernels
from oktopk.select.base import Selector
from oktopk.types import SparseVector

_ROOM = 4
_FACTORS = (0.5, 0.95)


@dataclass(frozen=True)
class _Memory:
    """Of the last pass. `acc` unchanged since then has the same version."""

    acc: Tensor
    version: int
    floor: float
    candidates: SparseVector | None


class BucketSelector:
    """One for each bucket. What it selects is on `home`, where it will be sent from."""

    def __init__(self, inner: Selector, kernels: Kernels, home: torch.device) -> None:
        self._inner = inner
        self._kernels = kernels
        self._home = home
        self._next_floor = math.inf
        self._factor = _FACTORS[1]
        self._memory: _Memory | None = None

    def accumulate(self, residual: Tensor | None, gradient: Tensor, out: Tensor, k: int, limit: float) -> float:
        """`out = residual + gradient`; returns its largest magnitude, or some number below `limit`."""
        floor = min(self._next_floor, limit)
        seen = self._kernels.accumulate(residual, gradient, out, floor, _ROOM * k, self._home)
        self._memory = _Memory(out, out._version, floor, seen.candidates)
        return seen.largest

    def forget(self) -> None:
        """Let go of `acc`."""
        self._memory = None

    def top_k(self, acc: Tensor, k: int) -> SparseVector:
        candidates = self._candidates(acc)
        enough = candidates is not None and len(candidates) >= k
        if candidates is not None and enough:
            best = self._inner.top_k(candidates.values, k)
            best = SparseVector(candidates.indices[best.indices], best.values, acc.numel())
        else:
            best = self._inner.top_k(acc, k).to(self._home)
        if self._is_ours(acc):
            self._guess(best, too_few=candidates is not None and not enough)
        return best

    def above(self, acc: Tensor, threshold: float) -> SparseVector:
        candidates = self._candidates(acc)
        if candidates is None or self._memory is None or threshold < self._memory.floor:
            return self._inner.above(acc, threshold).to(self._home)
        found = self._inner.above(candidates.values, threshold)
        return SparseVector(candidates.indices[found.indices], found.values, acc.numel())

    def kth_magnitude(self, acc: Tensor, k: int) -> float:
        candidates = self._candidates(acc)
        enough = candidates is not None and len(candidates) >= k
        return self._inner.kth_magnitude(candidates.values if candidates is not None and enough else acc, k)

    def normal_threshold(self, acc: Tensor, k: int) -> float:
        return self._inner.normal_threshold(acc, k)

    def _is_ours(self, acc: Tensor) -> bool:
        return self._memory is not None and acc is self._memory.acc and acc._version == self._memory.version

    def _candidates(self, acc: Tensor) -> SparseVector | None:
        return self._memory.candidates if self._memory is not None and self._is_ours(acc) else None

    def _guess(self, best: SparseVector, too_few: bool) -> None:
        """The next floor: below the smallest chosen, by more after each time that was not low enough."""
        lowest, highest = _FACTORS
        self._factor = max(lowest, self._factor * 0.95) if too_few else min(highest, self._factor * 1.005)
        self._next_floor = self._factor * float(best.values.abs().min().item()) if len(best) else math.inf
