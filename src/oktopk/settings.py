"""What a user may set, checked once."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any, Literal, TypedDict, TypeVar, cast, get_type_hints

from oktopk.comm.base import DEFAULT_TIMEOUT_S
from oktopk.kernels.by_device import KERNELS
from oktopk.reduce.base import Thresholds
from oktopk.reduce.narrow import PACKINGS
from oktopk.wire import ValueEncoding

DensitySchedule = Callable[[int], float]
NonFinitePolicy = Literal["raise", "skip"]
WireDtype = Literal["fp32", "bf16"]
DenseDtype = Literal["fp32", "bf16", "int8"]
KernelsName = Literal["auto", "torch", "numba", "triton"]
WIRE_DTYPES = {encoding.name.lower(): encoding for encoding in ValueEncoding}
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of an AllReducer, checked when they are made. `help(oktopk.attach)` lists them with their meaning.

    Raises:
        ValueError: A value that cannot be; the message names the key, the value and what it must be.

    Example:
        >>> settings = oktopk.Settings(density=0.02, warmup_steps=10)
        >>> allreducer = oktopk.attach(ddp_model, settings=settings)
    """

    density: float | DensitySchedule = field(
        default=0.01,
        metadata={"help": "part of a bucket to send, in (0, 1]; or a function of the step number that gives it"},
    )
    warmup_steps: int = field(default=128, metadata={"help": "dense steps before the first sparse one"})
    min_sparse_numel: int = field(default=1024, metadata={"help": "buckets with fewer elements stay dense"})
    momentum_correction: float = field(
        default=0.0,
        metadata={
            "help": "momentum accumulated before compression (DGC), 0: off. The optimizer then needs none of its own, "
            "and its weight decay, now outside the momentum, must be 1 / (1 - momentum) times as large to act as before"
        },
    )
    nonfinite: NonFinitePolicy = field(
        default="raise",
        metadata={"help": "NaN or Inf in a gradient: `raise` on all ranks, or let all ranks `skip` the step"},
    )
    wire_dtype: WireDtype = field(
        default="fp32",
        metadata={
            "help": "how values travel: `fp32`, or `bf16` in half the bytes; what rounding takes away stays owed"
        },
    )
    dense_dtype: DenseDtype = field(
        default="fp32",
        metadata={
            "help": "how values travel in dense steps: `fp32`, `bf16`, or `int8` with a scale for each 1024; what "
            "rounding takes away stays owed"
        },
    )
    guard_every: int = field(
        default=0,
        metadata={"help": "check the conservation law and the equality of all ranks every so many steps; 0: never"},
    )
    thresholds: Thresholds = field(
        default="exact",
        metadata={
            "help": "oktopk: find thresholds anew in every step, or `reuse` them for tau_prime steps, as in the paper"
        },
    )
    tau: int = field(default=64, metadata={"help": "steps between two agreements on regions"})
    tau_prime: int = field(default=32, metadata={"help": "steps between two exact thresholds, where they are reused"})
    kernels: KernelsName = field(
        default="auto",
        metadata={
            "help": "who loops over elements: `auto` (the fastest for each device), `torch`, `numba` or `triton`"
        },
    )
    timeout_s: float = field(
        default=DEFAULT_TIMEOUT_S, metadata={"help": "how long a rank waits for the others before it gives up"}
    )

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
            ("dense_dtype", tuple(PACKINGS)),
            ("thresholds", ("exact", "reuse")),
            ("kernels", tuple(KERNELS)),
        ):
            if getattr(self, key) not in known:
                raise ValueError(f"{key}={getattr(self, key)!r}: must be {' or '.join(map(repr, known))}")
        if not (_is_number(self.momentum_correction) and 0.0 <= self.momentum_correction < 1.0):
            raise ValueError(f"momentum_correction={self.momentum_correction!r}: must be a number in [0, 1)")
        if not (_is_number(self.timeout_s) and 0.0 < self.timeout_s < math.inf):
            raise ValueError(f"timeout_s={self.timeout_s!r}: must be a positive number of seconds")

    def density_at(self, step: int) -> float:
        if callable(self.density):
            return check_density(self.density(step), f" at step {step}")
        return self.density

    def k_at(self, step: int, n: int) -> int:
        return max(1, round(self.density_at(step) * n))


class SettingsKeywords(TypedDict, total=False):
    """The fields of `Settings` as keyword arguments: for type checkers and editors. A test keeps the two equal."""

    density: float | DensitySchedule
    warmup_steps: int
    min_sparse_numel: int
    momentum_correction: float
    nonfinite: NonFinitePolicy
    wire_dtype: WireDtype
    dense_dtype: DenseDtype
    guard_every: int
    thresholds: Thresholds
    tau: int
    tau_prime: int
    kernels: KernelsName
    timeout_s: float


def settings_from(settings: Settings | None, keywords: SettingsKeywords) -> Settings:
    """A Settings object with keywords on top; ValueError naming the known keys for one that is not among them."""
    known = [item.name for item in fields(Settings)]
    given = cast("dict[str, Any]", keywords)
    for key, value in given.items():
        if key not in known:
            raise ValueError(f"unknown setting {key}={value!r}; known: {', '.join(known)}")
    if settings is not None and not isinstance(settings, Settings):
        raise ValueError(f"settings={settings!r}: must be an oktopk.Settings, or give its fields as keywords")
    return dataclasses.replace(settings or Settings(), **given)


def lists_settings(function: F) -> F:
    """Let `help()` show the settings that `function` takes as `**keywords`: in its signature and its docstring.

    They stand in the docstring's Args, at the line `**keywords`.
    """
    signature, types = inspect.signature(function), get_type_hints(Settings)
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    shown = [
        inspect.Parameter(item.name, inspect.Parameter.KEYWORD_ONLY, default=item.default, annotation=types[item.name])
        for item in fields(Settings)
    ]
    function.__signature__ = signature.replace(parameters=[*own, *shown])  # pyright: ignore[reportFunctionMemberAccess]
    if function.__doc__:  # python -OO leaves none
        lines: list[str] = []
        for line in function.__doc__.splitlines():
            indent = line[: len(line) - len(line.lstrip())]
            named = [f"{indent}{item.name}: {item.metadata['help']}." for item in fields(Settings)]
            lines += named if line.strip().startswith("**keywords") else [line]
        function.__doc__ = "\n".join(lines)
    return function


def check_density(density: float, where: str = "") -> float:
    if not (_is_number(density) and 0.0 < density <= 1.0):
        raise ValueError(f"density={density!r}{where}: must be in (0, 1], for example 0.01 to send 1 % of the gradient")
    return float(density)


def _is_number(value: object) -> bool:
    """True and False are not numbers a user means; NaN fails the comparisons that follow."""
    return isinstance(value, Real) and not isinstance(value, bool)
