"""Choosing this rank's elements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from oktopk.reduce.base import Stateless
from oktopk.select.base import Accumulated, Selector
from oktopk.sparse_vector import SparseVector


class Choice(Protocol):
    """How a rank picks about k elements of `acc`; returns them and the threshold that did it."""

    def choose(self, acc: Accumulated, k: int) -> tuple[SparseVector, float]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class ChoosingReducer:
    """For reducers whose only memory is that of their choice."""

    def __init__(self, choice: Choice) -> None:
        self._choice = choice

    def state_dict(self) -> dict[str, Any]:
        return self._choice.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._choice.load_state_dict(state)


class ExactTopK(Stateless):
    """Exactly the k largest."""

    def __init__(self, selector: Selector) -> None:
        self._selector = selector

    def choose(self, acc: Accumulated, k: int) -> tuple[SparseVector, float]:
        chosen = self._selector.top_k(acc, k)
        return chosen, smallest_magnitude(chosen)


class NormalFit(Stateless):
    """About k, by fitting a normal distribution."""

    def __init__(self, selector: Selector) -> None:
        self._selector = selector

    def choose(self, acc: Accumulated, k: int) -> tuple[SparseVector, float]:
        threshold = self._selector.normal_threshold(acc, k)
        return self._selector.above(acc, threshold), threshold


class ReusedThreshold:
    """Exactly the k largest every `period` steps; between, those at or above the threshold that gave.

    More than k are cut to the k largest of them, which raises the threshold; fewer than 3k/4 mean that it no longer
    fits, and all of `acc` is looked at in that very step. So there are never more than k, and seldom fewer.
    """

    def __init__(self, selector: Selector, period: int) -> None:
        self._exact = ExactTopK(selector)
        self._selector = selector
        self._period = period
        self._steps = 0
        self._threshold = 0.0

    def choose(self, acc: Accumulated, k: int) -> tuple[SparseVector, float]:
        due = self._steps % self._period == 0 or k >= acc.values.numel()
        self._steps += 1
        if not due and self._threshold > 0.0:
            candidates = self._selector.above(acc, self._threshold)
            if len(candidates) > k:
                candidates = candidates.where(self._selector.largest(candidates.values, k))
                self._threshold = smallest_magnitude(candidates)
            if 4 * len(candidates) >= 3 * k:
                return candidates, self._threshold
        chosen, self._threshold = self._exact.choose(acc, k)
        return chosen, self._threshold

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "threshold": self._threshold}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps, self._threshold = int(state["steps"]), float(state["threshold"])


def smallest_magnitude(vector: SparseVector) -> float:
    return float(vector.values.abs().min().item()) if len(vector) else 0.0
