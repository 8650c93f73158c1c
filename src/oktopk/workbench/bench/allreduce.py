"""One allreduce of n elements: ours beside plain Gloo and DDP's hooks, in turns, in the same processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oktopk.allreducer import AllReducer
from oktopk.bucket import Bucket, Layout
from oktopk.metrics.step_stats import StepStats
from oktopk.workbench.bench import peers as bench_peers
from oktopk.workbench.bench.options import OURS, Options
from oktopk.workbench.console.progress import Progress
from oktopk.workbench.console.tables import Column, Row, byte_count, elements, figure, milliseconds
from oktopk.workbench.console.words import LOOPBACK
from oktopk.workbench.simulate.gradients import Synthetic
from oktopk.workbench.worlds.jobs import Job, Station, Tell
from oktopk.workbench.worlds.world import BenchWorld, Seat

BASELINE = "dense-fp32"
_POWERSGD_WARMUP = bench_peers.POWERSGD_DENSE_STEPS + 1


def run(options: Options) -> list[Row]:
    progress = Progress()
    rows: list[Row] = []
    for size in options.ranks:
        progress.part(f"starting {size} workers")
        with BenchWorld([Seat()] * size, options) as world:
            for n in options.sizes:
                progress.part(f"P = {size}, n = {elements(n)}")
                rows += compare(world, options, n, progress, {"bench": "allreduce", "link": LOOPBACK})
    progress.end()
    return rows


def compare(world: BenchWorld, options: Options, n: int, progress: Progress, where: Row) -> list[Row]:
    """A row for each contender and density; `where` begins every one of them."""
    job = {"what": "allreduce", "n": n, "options": asdict(options)}
    by_rank = world.run(job, progress)
    rows = [
        {**where, "ranks": world.size, "n": n, **_summary(of_ranks, options.iterations)}
        for of_ranks in zip(*by_rank, strict=True)
    ]
    baseline = next((row["median_ms"] for row in rows if row["contender"] == BASELINE), None)
    for row in rows:
        row["speedup"] = baseline / row["median_ms"] if baseline is not None else None
    return rows


def _summary(of_ranks: Sequence[dict[str, Any]], iterations: int) -> Row:
    """One contender, from what every rank saw: an iteration takes as long as its slowest rank."""
    first = of_ranks[0]
    slowest_ms = 1e3 * np.max([mine["seconds"] for mine in of_ranks], axis=0)
    sent = np.array([mine["bytes_sent"] for mine in of_ranks])
    ratios: list[float] = first["count_over_k"]  # the same on all ranks
    return {
        "contender": first["contender"],
        "density": first["density"],
        "k": first["k"],
        "iterations": iterations,
        "warmup": first["warmup"],
        "median_ms": float(np.median(slowest_ms)),
        "p10_ms": float(np.percentile(slowest_ms, 10)),
        "p90_ms": float(np.percentile(slowest_ms, 90)),
        "bytes_sent": float(sent.mean()),
        "bytes_sent_max": int(sent.max()),
        "bytes_by": first["bytes_by"],
        "count_over_k_min": min(ratios, default=None),
        "count_over_k_max": max(ratios, default=None),
        "stages_ms": {
            stage: 1e3 * float(np.mean([mine["stages"][stage] for mine in of_ranks])) for stage in first["stages"]
        },
        "same_on_all_ranks": len({mine["checksum"] for mine in of_ranks}) == 1,
    }


COLUMNS: tuple[Column, ...] = (
    ("contender", lambda row: row["contender"]),
    ("P", lambda row: str(row["ranks"])),
    ("n", lambda row: elements(row["n"])),
    ("density", lambda row: figure(row["density"], "g")),
    ("median ms", lambda row: milliseconds(row["median_ms"])),
    ("p10", lambda row: milliseconds(row["p10_ms"])),
    ("p90", lambda row: milliseconds(row["p90_ms"])),
    ("speed-up", lambda row: figure(row["speedup"], ".2f")),
    ("sent by a rank", lambda row: byte_count(row["bytes_sent"]) + ("*" if row["bytes_by"] != "counted" else "")),
    ("applied/k", lambda row: _span(row["count_over_k_min"], row["count_over_k_max"])),
)
FOOTNOTE = "* by the ring formula, not counted; speed-up against dense-fp32"


def _span(low: float | None, high: float | None) -> str:
    return "-" if low is None or high is None else f"{low:.2f}-{high:.2f}"


# --- in the workers


@dataclass
class Contender:
    """`exchange` overwrites the shared gradient with the mean, and says what it did if it can."""

    name: str
    exchange: Callable[[], StepStats | None]
    warmup: int = 1
    density: float | None = None
    formula_bytes: int | None = None
    seconds: list[float] = field(default_factory=list[float])
    stats: list[StepStats] = field(default_factory=list[StepStats])
    checksum: float = 0.0

    def outcome(self) -> dict[str, Any]:
        stages: dict[str, float] = {}
        for stats in self.stats:
            for stage, seconds in stats.seconds.items():
                stages[stage] = stages.get(stage, 0.0) + seconds / len(self.stats)
        return {
            "contender": self.name,
            "density": self.density,
            "k": self.stats[0].k if self.stats else None,
            "warmup": self.warmup,
            "seconds": self.seconds,
            "bytes_sent": [s.bytes_sent for s in self.stats] if self.formula_bytes is None else [self.formula_bytes],
            "bytes_by": "counted" if self.formula_bytes is None else "ring formula",
            "count_over_k": [s.global_count / s.k for s in self.stats],
            "stages": stages,
            "checksum": self.checksum,
        }


def measure(station: Station, options: Options, job: Job, tell: Tell) -> list[dict[str, Any]]:
    """Every iteration: the same fresh gradient for each contender in turn, and a barrier before the clock starts."""
    n = int(job["n"])
    tell(f"P = {station.size}, n = {elements(n)}: making gradients")
    synthetic = Synthetic(n, station.rank, options.seed)
    contenders, gradient, close = _contenders(options, n)
    warmup = max(contender.warmup for contender in contenders)
    fresh = torch.empty(n)
    for step in range(warmup + options.iterations):
        tell(f"P = {station.size}, n = {elements(n)}: {step + 1} of {warmup + options.iterations}")
        synthetic.write(step, fresh)
        first = step % len(contenders)  # nobody always comes after the same one
        for contender in contenders[first:] + contenders[:first]:
            if step < warmup - contender.warmup:
                continue
            gradient.copy_(fresh)
            time.sleep(options.pause_s)
            bench_peers.barrier()
            start = time.perf_counter()
            stats = contender.exchange()
            seconds = time.perf_counter() - start
            if step < warmup:
                continue
            contender.seconds.append(seconds)
            contender.checksum = float(gradient.sum(dtype=torch.float64))
            if stats is not None:
                contender.stats.append(stats)
    close()
    return [contender.outcome() for contender in contenders]


def _contenders(options: Options, n: int) -> tuple[list[Contender], Tensor, Callable[[], None]]:
    """They all work on one gradient, which is DDP's bucket where a hook of DDP is among them."""
    ddp = bench_peers.DdpBucket(n) if {"ddp-fp16", "powersgd"} & set(options.peers) else None
    gradient = ddp.gradient if ddp else torch.empty(n)
    contenders: list[Contender] = []
    for name in options.peers:
        if name == "dense-fp32":
            contenders.append(_peer(name, bench_peers.dense_fp32(gradient)))
        elif name == "dense-bf16":
            contenders.append(_peer(name, bench_peers.dense_bf16(gradient)))
        elif name == "ddp-fp16" and ddp:
            contenders.append(_peer(name, ddp.fp16()))
        elif name == "powersgd" and ddp:
            contenders.append(_peer(name, ddp.powersgd(), _POWERSGD_WARMUP))
    bucket = Bucket(gradient, Layout.of([("gradient", n)]))
    allreducers: list[AllReducer] = []
    for density in options.densities:
        for name, reducer, wire in _ours(options):
            settings = options.allreducer_settings(density, wire)
            allreducers.append(AllReducer(reducer, comm="torch", **settings))
            contenders.append(Contender(name, _step(allreducers[-1], bucket), options.warmup, density))

    def close() -> None:
        for allreducer in allreducers:
            allreducer.close()

    return contenders, gradient, close


def _ours(options: Options) -> list[tuple[str, str, str]]:
    """Name, reducer and wire of each of our own contenders."""
    chosen = [(name, "oktopk", name.removeprefix("oktopk-")) for name in options.peers if name in OURS]
    return chosen + [(name, name, "fp32") for name in options.reducers]


def _peer(name: str, peer: tuple[Callable[[], None], int], warmup: int = 1) -> Contender:
    exchange, num_bytes = peer
    return Contender(name, lambda: exchange(), warmup, formula_bytes=num_bytes)


def _step(allreducer: AllReducer, bucket: Bucket) -> Callable[[], StepStats]:
    def step() -> StepStats:
        stats = allreducer.reduce(bucket)
        allreducer.end_step()
        return stats

    return step
