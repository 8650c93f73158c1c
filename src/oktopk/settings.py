"""What a user may set, checked once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, Literal

from oktopk.comm.base import DEFAULT_TIMEOUT_S
from oktopk.reduce.base import Thresholds
from oktopk.wire import ValueEncoding

DensitySchedule = Callable[[int], float]
NonFinitePolicy = Literal["raise", "skip"]
WIRE_DTYPES = {encoding.name.lower(): encoding for encoding in ValueEncoding}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of an AllReducer. Often tuned first, seldom tuned last."""

    density: float | DensitySchedule = 0.01
    """Part of a bucket to send, in (0, 1]; or a function of the step number that gives it."""
    warmup_steps: int = 128
    """Dense steps before the first sparse one."""
    min_sparse_numel: int = 1024
    """Buckets with fewer elements stay dense."""
    nonfinite: NonFinitePolicy = "raise"
    """NaN or Inf in a gradient: `raise` on all ranks, or let all ranks `skip` the step."""
    guard_every: int = 0
    """Check the conservation law and equality across ranks every so many steps; 0: never."""
    tau: int = 64
    """Steps between two agreements on regions."""
    tau_prime: int = 32
    """Steps between two exact thresholds, where they are reused."""
    momentum_correction: float = 0.0
    """Momentum accumulated before compression (DGC); the optimizer then needs none of its own. 0: off."""
    wire_dtype: str = "fp32"
    """How values travel: `fp32`, or `bf16` in half the bytes; what rounding takes away stays in the residual."""
    thresholds: Thresholds = "exact"
    """oktopk: find thresholds anew in every step (`exact`), or `reuse` them for tau_prime steps, as in the paper."""
    selector: str = "auto"
    """Which kernels do the work: `auto` (the fastest for each device), `torch`, `numba` (CPU) or `triton` (CUDA)."""
    timeout_s: float = DEFAULT_TIMEOUT_S
    """How long a rank waits for the others before it gives up."""

    def __post_init__(self) -> None:
        if not callable(self.density):
            check_density(self.density)
        for key, least in (
            ("warmup_steps", 0),
            ("min_sparse_numel", 0),
            ("guard_every", 0),
            ("tau", 1),
            ("tau_prime", 1),
        ):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{key}={value!r}: must be a whole number, at least {least}")
        for key, known in (
            ("nonfinite", ("raise", "skip")),
            ("wire_dtype", tuple(WIRE_DTYPES)),
            ("thresholds", ("exact", "reuse")),
        ):
            if getattr(self, key) not in known:
                raise ValueError(f"{key}={getattr(self, key)!r}: must be {' or '.join(map(repr, known))}")
        if not (_is_number(self.momentum_correction) and 0.0 <= self.momentum_correction < 1.0):
            raise ValueError(f"momentum_correction={self.momentum_correction!r}: must be a number in [0, 1)")
        if not (_is_number(self.timeout_s) and 0.0 < self.timeout_s < math.inf):
            raise ValueError(f"timeout_s={self.timeout_s!r}: must be a positive number of seconds")

    @classmethod
    def of(cls, given: dict[str, Any]) -> Settings:
        """From keyword arguments; ValueError naming the known keys for one that is not among them."""
        known = [item.name for item in fields(cls)]
        for key in given:
            if key not in known:
                raise ValueError(f"unknown setting {key}={given[key]!r}; known: {', '.join(known)}")
        return cls(**given)

    def density_at(self, step: int) -> float:
        if callable(self.density):
            return check_density(self.density(step), f" at step {step}")
        return self.density

    def k_at(self, step: int, n: int) -> int:
        return max(1, round(self.density_at(step) * n))


def check_density(density: float, where: str = "") -> float:
    if not (_is_number(density) and 0.0 < density <= 1.0):
        raise ValueError(f"density={density!r}{where}: must be in (0, 1], for example 0.01 to send 1 % of the gradient")
    return float(density)


def _is_number(value: object) -> bool:
    """True and False are not numbers a user means; NaN fails the comparisons that follow."""
    return isinstance(value, Real) and not isinstance(value, bool)
