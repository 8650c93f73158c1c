"""A selector that knows its bucket: adding the residual and finding the largest elements is one pass.

Distributions move slowly from step to step, so the last k-th magnitude tells about where the next one will be. The pass
that makes `acc` collects everything a little below it, a slight superset of the k largest; what is chosen is chosen
among those. Where the guess was wrong, all of `acc` is looked at again: results never depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from oktopk.kernels.base import Kernels, Seen
from oktopk.select.base import Selector
from oktopk.sparse_vector import SparseVector

_ROOM = 4
_FIRST_MARGIN, _LEAST_MARGIN, _MOST_MARGIN = 0.05, 0.001, 0.5


@dataclass(frozen=True)
class _Memory:
    """Of the last pass. `acc` unchanged since then has the same version."""

    acc: Tensor
    version: int
    floor: float
    largest: float
    candidates: SparseVector | None


class BucketSelector:
    """One for each bucket. What it selects is on `home`, where it will be sent from."""

    def __init__(self, inner: Selector, kernels: Kernels, home: torch.device) -> None:
        self._inner = inner
        self._kernels = kernels
        self._home = home
        self._next_floor = math.inf
        self._margin = _FIRST_MARGIN
        self._memory: _Memory | None = None
        self._pending: tuple[Tensor, int, float, Callable[[], Seen]] | None = None

    def accumulate(self, residual: Tensor | None, gradient: Tensor, out: Tensor, k: int, limit: float) -> None:
        """`out = residual + gradient`, looking out for what is worth sending and for what is beyond `limit`."""
        floor = min(self._next_floor, limit)
        seen = self._kernels.accumulate(residual, gradient, out, floor, _ROOM * k, self._home)
        self._memory = None
        self._pending = (out, out._version, floor, seen)

    def largest(self) -> float:
        """The largest magnitude of what `accumulate` made, or some number within its limit. Waits for the device."""
        memory = self._remembered()
        return memory.largest if memory is not None else 0.0

    def forget(self) -> None:
        """Let go of `acc`."""
        self._memory = self._pending = None

    def top_k(self, acc: Tensor, k: int) -> SparseVector:
        candidates = self._candidates(acc)
        enough = candidates is not None and len(candidates) >= k
        if candidates is not None and enough:
            best = candidates.picked(self._inner.top_k(candidates.values, k))
        else:
            best = self._inner.top_k(acc, k).to(self._home)
        if self._is_ours(acc):
            self._guess(best, k, None if candidates is None else len(candidates))
        return best

    def above(self, acc: Tensor, threshold: float) -> SparseVector:
        candidates, memory = self._candidates(acc), self._remembered()
        if candidates is None or memory is None or threshold < memory.floor:
            return self._inner.above(acc, threshold).to(self._home)
        return candidates.picked(self._inner.above(candidates.values, threshold))

    def kth_magnitude(self, acc: Tensor, k: int) -> float:
        candidates = self._candidates(acc)
        enough = candidates is not None and len(candidates) >= k
        return self._inner.kth_magnitude(candidates.values if candidates is not None and enough else acc, k)

    def normal_threshold(self, acc: Tensor, k: int) -> float:
        return self._inner.normal_threshold(acc, k)

    def _remembered(self) -> _Memory | None:
        if self._pending is not None:
            out, version, floor, seen = self._pending
            self._pending, found = None, seen()
            self._memory = _Memory(out, version, floor, found.largest, found.candidates)
        return self._memory

    def _is_ours(self, acc: Tensor) -> bool:
        memory = self._remembered()
        return memory is not None and acc is memory.acc and acc._version == memory.version

    def _candidates(self, acc: Tensor) -> SparseVector | None:
        return self._memory.candidates if self._is_ours(acc) and self._memory is not None else None

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
