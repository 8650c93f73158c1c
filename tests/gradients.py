"""Gradients for tests: every awkward kind, different on every rank, made from a seed; and the synthetic ones with a
persistent part, on which residuals grow for a long time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

KINDS = (
    "normal",
    "heavy",
    "ties",
    "all_tied",
    "zeros",
    "one_hot",
    "huge",
    "tiny",
    "layered",
    "some_silent",
    "spiky",
    "moving",
)


def make(kind: str, n: int, rank: int, step: int, seed: int) -> Tensor:
    rng = np.random.default_rng([seed, rank, step])
    g = rng.standard_normal(n)
    if kind == "heavy":
        g = rng.standard_t(2, n)
    elif kind == "ties":
        g = rng.integers(-2, 3, n).astype(float)
    elif kind == "all_tied":
        g = np.full(n, 0.5)
    elif kind == "zeros":
        g = np.zeros(n)
    elif kind == "one_hot":
        g = np.zeros(n)
        g[(7 * rank + step) % n] = 1.0 + rank
    elif kind == "huge":
        g = g * 1e30
    elif kind == "tiny":
        g = g * 1e-40  # denormals
    elif kind == "layered":
        g = g * np.repeat([1e-6, 1.0, 1e3, 1e-2], -(-n // 4))[:n]
    elif kind == "some_silent":
        g = g if (rank + step) % 2 else np.zeros(n)
    elif kind == "moving":
        g = rng.standard_t(2, n)
        g[: n // 10] *= 1000.0 if step % 2 else 1.0
    elif kind == "spiky":
        g = g * (1000.0 if step % 9 == 5 else 1.0)
    return torch.from_numpy(g.astype(np.float32))


def at_the_limit(n: int, limit: float) -> Tensor:
    """Of either sign, the same on every rank: the largest fp32 number that is not beyond `limit`."""
    largest = np.float32(limit)
    if float(largest) > limit:
        largest = np.nextafter(largest, np.float32(0.0))
    return torch.from_numpy(np.where(np.arange(n) % 3 == 0, -largest, largest))


SCHEDULES: dict[str, Callable[[int], float]] = {
    "synthetic": lambda _: 1.0,
    "synthetic_spike": lambda step: 10.0 if step == 20 else 1.0,
    "synthetic_drop": lambda step: 0.1 if step >= 20 else 1.0,
}


class Synthetic:
    """A persistent heavy-tailed base, common to all ranks, under layers of different scale, plus noise of each rank.

    At every step multiplied by what the schedule of its kind says.
    """

    def __init__(self, n: int, rank: int, kind: str = "synthetic") -> None:
        self._factor = SCHEDULES[kind]
        self._base = np.random.default_rng([2022, 0]).standard_t(3, n).astype(np.float32)
        self._noise = np.random.default_rng([2022, 1 + rank]).laplace(0.0, 1.0, n).astype(np.float32)
        parts = [0.02, 0.05, 0.08, 0.10, 0.15, 0.15, 0.20, 0.25]
        edges = np.round(np.cumsum([0.0, *parts]) * n).astype(int)
        scales = [1.5, 0.6, 1.0, 2.0, 0.8, 1.2, 0.5, 0.35]
        self._scale = np.concatenate(
            [np.full(hi - lo, scale, np.float32) for lo, hi, scale in zip(edges[:-1], edges[1:], scales, strict=True)]
        )

    def at(self, step: int) -> Tensor:
        shift = (1 + step) * 1000003 % len(self._base)
        unscaled = self._scale * (self._base + np.roll(self._noise, shift))
        return torch.from_numpy(unscaled * np.float32(self._factor(step)))
