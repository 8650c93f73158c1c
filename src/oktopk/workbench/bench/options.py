"""What can be asked of a benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

from oktopk.allreducer import AllReducer
from oktopk.comm.simulator import SimulatedCommunicator, World
from oktopk.workbench.console.words import LOOPBACK, UsageError
from oktopk.workbench.simulate.gradients import DEFAULT_SEED

PEERS = ("dense-fp32", "dense-bf16", "ddp-fp16", "powersgd")
WIRES = ("fp32", "bf16")
OURS = tuple(f"oktopk-{wire}" for wire in WIRES)
PREDICTABLE = ("dense-fp32", "oktopk-fp32")
"""Those that the cost model knows, beside other reducers."""
CONTENDERS = ("no-communication", "ddp-dense", "ddp-fp16", "powersgd", *OURS)
"""Of the benchmark `training`."""
TASKS = ("lstman4", "vgg16")


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
    kernels: str | None = None
    wire: str = "fp32"
    bucket_cap_mb: float = 25.0
    tiny: bool = False
    timeout_s: float = 300.0
    pause_s: float = 0.0
    """Before each timed allreduce: a token bucket is full again afterwards."""

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
        """UsageError for what an AllReducer refuses: before workers are started, not in all of them."""
        for density in self.densities:
            for reducer in ("oktopk", *self.reducers):
                alone = SimulatedCommunicator(World(1), 0)
                try:
                    AllReducer(reducer, comm=alone, **self.allreducer_settings(density, self.wire)).close()
                except ValueError as error:
                    raise UsageError(str(error)) from error

    def allreducer_settings(self, density: float, wire: str = "fp32") -> dict[str, Any]:
        """Sparse from the first step on."""
        settings: dict[str, Any] = {
            "density": density,
            "warmup_steps": 0,
            "min_sparse_numel": 0,
            "timeout_s": self.timeout_s,
            "wire_dtype": wire,
        }
        return settings if self.kernels is None else {**settings, "kernels": self.kernels}
