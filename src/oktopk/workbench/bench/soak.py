"""Many reductions of one bucket: does memory grow, does anything get lost, does it get slower."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from oktopk.allreducer import AllReducer
from oktopk.bucket import Bucket, Layout
from oktopk.workbench.bench import peers as bench_peers
from oktopk.workbench.bench.options import Options
from oktopk.workbench.console.progress import Progress
from oktopk.workbench.console.tables import Column, Row, elements, figure, milliseconds
from oktopk.workbench.console.words import LOOPBACK
from oktopk.workbench.simulate.gradients import Synthetic
from oktopk.workbench.worlds.jobs import Job, Station, Tell
from oktopk.workbench.worlds.world import BenchWorld, Seat

_NAME = "gradient"


def run(options: Options) -> list[Row]:
    progress = Progress()
    rows: list[Row] = []
    for size in options.ranks:
        progress.part(f"starting {size} workers")
        with BenchWorld([Seat()] * size, options) as world:
            for n in options.sizes:
                for density in options.densities:
                    progress.part(f"{options.steps} reductions: P = {size}, n = {elements(n)}, density {density:g}")
                    job = {"what": "soak", "n": n, "density": density, "options": asdict(options)}
                    rows.append({
                        "bench": "soak", "link": LOOPBACK, "contender": f"oktopk-{options.wire}", "ranks": size, "n": n,
                        "density": density, **_summary(world.run(job, progress)),
                    })  # fmt: skip
    progress.end()
    return rows


def _summary(by_rank: list[dict[str, Any]]) -> Row:
    """Memory of the rank that has most of it; a step takes as long as its slowest rank."""
    slowest_ms = 1e3 * np.max([mine["seconds"] for mine in by_rank], axis=0)
    tenth = max(1, len(slowest_ms) // 10)
    ratios: list[float] = by_rank[0]["count_over_k"]
    return {
        "k": by_rank[0]["k"],
        "steps": len(slowest_ms),
        **{
            f"rss_mib_at_{percent}": max(mine["rss_mib"][index] for mine in by_rank)
            for index, percent in enumerate((10, 50, 100))
        },
        "rss_mib_peak": max(mine["rss_mib_peak"] for mine in by_rank),
        "drift_max": max(mine["drift_max"] for mine in by_rank),
        "drift_relative": max(mine["drift_relative"] for mine in by_rank),
        "count_over_k_min": min(ratios),
        "count_over_k_max": max(ratios),
        "first_tenth_ms": float(np.median(slowest_ms[:tenth])),
        "last_tenth_ms": float(np.median(slowest_ms[-tenth:])),
    }


COLUMNS: tuple[Column, ...] = (
    ("contender", lambda row: row["contender"]),
    ("P", lambda row: str(row["ranks"])),
    ("n", lambda row: elements(row["n"])),
    ("density", lambda row: figure(row["density"], "g")),
    ("steps", lambda row: str(row["steps"])),
    ("RSS MiB 10 %", lambda row: f"{row['rss_mib_at_10']:.0f}"),
    ("50 %", lambda row: f"{row['rss_mib_at_50']:.0f}"),
    ("100 %", lambda row: f"{row['rss_mib_at_100']:.0f}"),
    ("peak", lambda row: f"{row['rss_mib_peak']:.0f}"),
    ("drift", lambda row: f"{row['drift_relative']:.1e}"),
    ("applied/k", lambda row: f"{row['count_over_k_min']:.2f}-{row['count_over_k_max']:.2f}"),
    ("first tenth ms", lambda row: milliseconds(row["first_tenth_ms"])),
    ("last tenth ms", lambda row: milliseconds(row["last_tenth_ms"])),
)
FOOTNOTE = "drift: |owed - applied - still owed| summed over all elements, as part of all that was ever owed"


# --- in the workers


def measure(station: Station, options: Options, job: Job, tell: Tell) -> dict[str, Any]:
    """The law over the whole run, in fp64: all ranks' gradients = P * all means + all ranks' residuals."""
    n, steps = int(job["n"]), options.steps
    synthetic = Synthetic(n, station.rank, options.seed)
    allreducer = AllReducer("oktopk", comm="torch", **options.allreducer_settings(job["density"], options.wire))
    bucket = Bucket(torch.empty(n), Layout.of([(_NAME, n)]))
    owed, applied = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    marks = [max(1, round(steps * part)) for part in (0.1, 0.5, 1.0)]
    seconds: list[float] = []
    ratios: list[float] = []
    memory: dict[int, float] = {}
    k = 0
    for step in range(1, steps + 1):
        synthetic.write(step - 1, bucket.flat)
        owed += bucket.flat
        bench_peers.barrier()
        start = time.perf_counter()
        stats = allreducer.reduce(bucket)
        allreducer.end_step()
        seconds.append(time.perf_counter() - start)
        applied += bucket.flat
        k = stats.k
        ratios.append(stats.global_count / k)
        if step in marks:
            memory[step] = _status_mib("VmRSS")
        if step % max(1, steps // 20) == 0:
            tell(f"P = {station.size}, n = {elements(n)}: {step} of {steps} reductions")
    peak = _status_mib("VmHWM")  # before what follows takes memory of its own
    residual: torch.Tensor | None = allreducer.state_dict()["feedback"]["residual"].get(_NAME)
    balance = owed if residual is None else owed - residual.reshape(-1).cpu()
    allreducer.comm.all_reduce(balance)
    balance -= station.size * applied
    total = owed.abs()
    allreducer.comm.all_reduce(total)
    allreducer.close()
    return {
        "k": k,
        "seconds": seconds,
        "count_over_k": ratios,
        "rss_mib": [memory[mark] for mark in marks],
        "rss_mib_peak": peak,
        "drift_max": float(balance.abs().max()),
        "drift_relative": float(balance.abs().sum() / total.sum()),
    }


def _status_mib(key: str) -> float:
    """Of this process, as the kernel sees it; VmHWM, unlike getrusage, owes nothing to the process that started us."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) / 1024
