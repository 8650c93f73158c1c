"""What a reducer sends in a steady step, by its model: for more ranks than can be simulated, and for cost models."""

from __future__ import annotations

import math
from collections.abc import Mapping

from oktopk.reduce.volume import INT64_BYTES, SteadyStep, Volume, all_reduce
from oktopk.registry import describe

_FIT_STEPS = 60


def volume(
    reducer: str,
    n: int,
    k: int,
    num_ranks: int,
    common: float,
    *,
    chosen: float | None = None,
    skew: float = 1.0,
    evened: bool = False,
    value_bytes: int = 4,
) -> Volume:
    """What one reduction of one bucket sends, the agreement with which it begins included.

    Args:
        reducer: Its name.
        n, k, num_ranks, common, chosen, skew, evened, value_bytes: See `steady_step`.

    Raises:
        ValueError: An unknown reducer, or a step that cannot be.
    """
    description = describe(reducer)
    step = steady_step(n, k, num_ranks, common, chosen=chosen, skew=skew, evened=evened, value_bytes=value_bytes)
    found = description.volume(step)
    agreement = all_reduce(INT64_BYTES * (num_ranks + 1), num_ranks)
    return Volume(found.applied, (agreement, *found.rounds) if num_ranks > 1 else ())


def steady_step(
    n: int,
    k: int,
    num_ranks: int,
    common: float,
    *,
    chosen: float | None = None,
    skew: float = 1.0,
    evened: bool = False,
    value_bytes: int = 4,
) -> SteadyStep:
    """The step that the models of volume and work are asked about.

    Args:
        n: Elements of the bucket.
        k: Elements that are wanted.
        num_ranks: Any number from 1.
        common: How much the ranks' choices coincide, from 0 to 1: see `union_size`. It matters where the union is sent
            (topkDSA, gaussiankSA).
        chosen: How many elements a rank chooses, where that is not k (the gaussiank family).
        skew: How many times the average the largest region's share is.
        evened: oktopk evens shares out before it gathers them, as it does where one exceeds 2k/P (small shares do, by
            chance).
        value_bytes: 4, or 2 for bf16.

    Raises:
        ValueError: A step that cannot be.
    """
    for key, value, least, most in (
        ("num_ranks", num_ranks, 1, math.inf),
        ("n", n, 1, math.inf),
        ("k", k, 1, n),
        ("common", common, 0.0, 1.0),
        ("skew", skew, 1.0, math.inf),
    ):
        if not least <= value <= most:
            raise ValueError(f"{key}={value!r}: must lie between {least} and {most}")
    picked = float(k) if chosen is None else min(max(chosen, 1.0), float(n))
    return SteadyStep(
        n=n,
        k=k,
        num_ranks=num_ranks,
        chosen=picked,
        union=union_size(n, picked, num_ranks, common),
        skew=skew,
        evened=evened,
        value_bytes=value_bytes,
    )


def union_size(n: int, k: float, num_ranks: int, common: float) -> float:
    """How many different elements P ranks choose that choose k each: kP / (1 + (P - 1) / M).

    That is what comes of elements that differ in how likely a rank chooses them, a few very, most hardly: unions grow
    ever more slowly, towards kM. M = (n / k) ** (1 - common) goes from n / k (any element may be chosen) down to 1
    (everyone chooses the same).
    """
    return k * num_ranks / (1.0 + (num_ranks - 1) / (n / k) ** (1.0 - common))


def fit_common(unions: Mapping[int, float], n: int, k: float) -> float:
    """The `common` that explains best how many different elements so many ranks were seen to choose.

    `unions` holds them by number of ranks; k is what each chose. Best: the least squares of relative errors. Without
    any world of two ranks or more: 0.
    """
    seen = {size: union for size, union in unions.items() if size > 1 and union > 0}

    def error(common: float) -> float:
        return sum(math.log(union_size(n, k, size, common) / union) ** 2 for size, union in seen.items())

    low, high = 0.0, 1.0
    for _ in range(_FIT_STEPS):  # by thirds: unions shrink as `common` grows, so there is one valley
        left, right = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, right) if error(left) <= error(right) else (left, high)
    return low
