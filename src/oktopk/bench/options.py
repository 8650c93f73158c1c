"""What can be asked of a benchmark, and how it is read from words on the command line."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

from oktopk.allreducer import AllReducer
from oktopk.bench.gradients import DEFAULT_SEED
from oktopk.comm.simulator import SimulatedCommunicator, World

LOOPBACK = "loopback"
PEERS = ("dense-fp32", "dense-bf16", "ddp-fp16", "powersgd")
WIRES = ("fp32", "bf16")
OURS = tuple(f"oktopk-{wire}" for wire in WIRES)
CONTENDERS = ("no-communication", "ddp-dense", "ddp-fp16", "powersgd", *OURS)
"""Of the benchmark `training`."""
TASKS = ("lstman4", "vgg16")

Row = dict[str, Any]
"""One line of a table and of the JSON file: plain values only."""


class BenchError(ValueError):
    """What a user asked for cannot be done; the message names the key, the value, the reason and the fix."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """One for all benchmarks; each looks at what it needs."""

    what: str
    out: str = "benchmarks/results"
    ranks: tuple[int, ...] = (2,)
    sizes: tuple[int, ...] = (1_000_000,)
    densities: tuple[float, ...] = (0.01,)
    peers: tuple[str, ...] = (*PEERS, *OURS)
    reducers: tuple[str, ...] = ()
    rates: tuple[str, ...] = (LOOPBACK,)
    tasks: tuple[str, ...] = TASKS
    iterations: int = 20
    warmup: int = 5
    steps: int = 20
    seed: int = DEFAULT_SEED
    device: str = "cpu"
    selector: str | None = None
    wire: str = "fp32"
    bucket_cap_mb: float = 25.0
    tiny: bool = False
    timeout_s: float = 300.0

    @staticmethod
    def of(given: Mapping[str, Any]) -> Options:
        """From plain values, lists made tuples; what is no option is left out."""
        values: dict[str, Any] = {}
        for item in fields(Options):
            if item.name in given:
                value: Any = given[item.name]
                values[item.name] = tuple(cast("list[Any]", value)) if isinstance(value, list) else value
        return Options(**values)

    def check(self) -> None:
        """BenchError for what an AllReducer refuses: before workers are started, not in all of them."""
        for density in self.densities:
            for reducer in ("oktopk", *self.reducers):
                alone = SimulatedCommunicator(World(1), 0)
                try:
                    AllReducer(reducer, comm=alone, **self.allreducer_settings(density, self.wire)).close()
                except ValueError as error:
                    raise BenchError(str(error)) from error

    def allreducer_settings(self, density: float, wire: str = "fp32") -> dict[str, Any]:
        """Sparse from the first step on."""
        settings: dict[str, Any] = {
            "density": density,
            "warmup_steps": 0,
            "min_sparse_numel": 0,
            "timeout_s": self.timeout_s,
            "wire_dtype": wire,
        }
        return settings if self.selector is None else {**settings, "selector": self.selector}


# --- readers of single words, for argparse

_MULTIPLES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def size(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM]?)", text)
    value = round(float(found[1]) * _MULTIPLES[found[2].lower()]) if found else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number of elements, such as 20000, 20k or 27.6M")
    return value


def density(text: str) -> float:
    value = _number(text)
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r}: must be in (0, 1], for example 0.01 to send 1 % of the gradient")
    return value


def count(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not re.fullmatch(r"\d+", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number, at least {least}")
        return int(text)

    return read


def positive(text: str) -> float:
    value = _number(text)
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a positive number")
    return value


def one_of(*known: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"{text!r}: unknown; choose from {', '.join(known)}")
        return text

    return read


def rate(text: str) -> str:
    """A link's speed as `tc` writes it, or `loopback` for no link at all."""
    if text != LOOPBACK:
        bits_per_s(text)
    return text


def bits_per_s(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", text)
    value = round(float(found[1]) * _MULTIPLES[found[2]]) if found else 0
    if not 1e6 <= value <= 1e12:
        raise argparse.ArgumentTypeError(
            f"{text!r}: must be a rate of at least 1mbit, such as 100mbit, 1gbit or 25gbit"
        )
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
