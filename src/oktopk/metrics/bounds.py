"""What each reducer sends by its paper: elements (4-byte words; a value and its index are two) that leave a rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Bound:
    """`elements(n, k, P)`; where the volume depends on the data, `least` is the other end of its range."""

    formula: str
    elements: Callable[[float, float, int], float]
    least: Callable[[float, float, int], float] | None = None


_GATHER = Bound("2k(P-1)", lambda _, k, size: 2 * k * (size - 1))
_SPLIT = Bound(
    "(2k+n)(P-1)/P",
    lambda n, k, size: (2 * k + n) * (size - 1) / size,
    least=lambda _, k, size: 4 * k * (size - 1) / size,
)
BOUNDS: Mapping[str, Bound] = {
    "dense": Bound("2n(P-1)/P", lambda n, _, size: 2 * n * (size - 1) / size),
    "topkA": _GATHER,
    "topkA2": _GATHER,
    "topkAopt": _GATHER,
    "topkDSA": _SPLIT,
    "gtopk": Bound("4k log2 P", lambda _, k, size: 4 * k * math.log2(size)),
    "gaussiank": _GATHER,
    "gaussiankconcat": _GATHER,
    "gaussiankSA": _SPLIT,
    "oktopk": Bound("6k(P-1)/P", lambda _, k, size: 6 * k * (size - 1) / size),
}
"""By the canonical names of the reducers."""


def lower_bound(k: float, size: int) -> float:
    """What any sparse allreduce of k elements must send: 2k(P-1)/P."""
    return 2 * k * (size - 1) / size
