"""Synthetic gradients that are like real ones where it matters: a part that persists, heavy tails, layers of different
scale, noise of each rank."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

DEFAULT_SEED = 2022
_SHIFT = 1_000_003
_PARTS = (0.02, 0.05, 0.08, 0.10, 0.15, 0.15, 0.20, 0.25)
_SCALES = (1.5, 0.6, 1.0, 2.0, 0.8, 1.2, 0.5, 0.35)


class Synthetic:
    """scale * (base + noise of this rank, shifted by the step), fp32.

    Because `base` persists, residuals grow for the first 1/density steps or so: thresholds must follow. All ranks have
    the same: where many live in one process, make it once with `draw_base` and give it to each.
    """

    def __init__(self, n: int, rank: int, seed: int = DEFAULT_SEED, base: NDArray[np.float32] | None = None) -> None:
        self._base = draw_base(n, seed) if base is None else base
        self._noise = np.random.default_rng([seed, 1 + rank]).laplace(0.0, 1.0, n).astype(np.float32)
        self._edges = [round(float(edge)) for edge in np.cumsum([0.0, *_PARTS]) * n]

    def write(self, step: int, out: Tensor) -> None:
        """The gradient of that step into `out`, a flat fp32 tensor of n elements on the CPU."""
        values = out.numpy()
        n = len(self._base)
        shift = (1 + step) * _SHIFT % n
        np.add(self._base[shift:], self._noise[: n - shift], out=values[shift:])
        np.add(self._base[:shift], self._noise[n - shift :], out=values[:shift])
        for (low, high), scale in zip(pairwise(self._edges), _SCALES, strict=True):
            values[low:high] *= np.float32(scale)

    def at(self, step: int) -> Tensor:
        """The same, as a new tensor."""
        out = torch.empty(len(self._base), dtype=torch.float32)
        self.write(step, out)
        return out


def draw_base(n: int, seed: int = DEFAULT_SEED) -> NDArray[np.float32]:
    """The part that all ranks and steps share; read only."""
    return np.random.default_rng([seed, 0]).standard_t(3, n).astype(np.float32)
