"""Whole training steps under DDP: how much of the speed without communication each way of exchanging leaves."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from oktopk.adapters.ddp import attach, detach
from oktopk.metrics.step_stats import StepStats
from oktopk.workbench.bench import peers as bench_peers
from oktopk.workbench.bench.links import describe
from oktopk.workbench.bench.options import OURS, Options
from oktopk.workbench.bench.tasks import make_task
from oktopk.workbench.console.progress import Progress
from oktopk.workbench.console.tables import Column, Row, byte_count, elements, figure, milliseconds
from oktopk.workbench.console.words import UsageError
from oktopk.workbench.worlds import links as netns
from oktopk.workbench.worlds.jobs import Job, Station, Tell
from oktopk.workbench.worlds.world import BenchWorld, WorkerFailed

ALONE, BASELINE = "no-communication", "ddp-dense"


def run(options: Options) -> list[Row]:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("device='cuda': no CUDA device here; use --device cpu")
    progress = Progress()
    rows: list[Row] = []
    for link in options.rates:
        for size in options.ranks:
            try:
                for task in options.tasks:
                    rows += _compare(options, link, size, task, progress)
            except netns.LinksUnavailable as error:
                rows.append({"bench": "training", "link": link, "skipped": str(error)})
                break
    progress.end()
    return rows


def _compare(options: Options, link: str, size: int, task: str, progress: Progress) -> list[Row]:
    """All contenders in the same processes; one that fails takes those with it, and the next ones get new ones."""
    rows: list[Row] = []
    left = [(name, density) for name in options.peers for density in _densities(name, options)]
    while left:
        progress.part(f"{link}: starting {size} workers")
        with netns.seats(size, link) as seats, BenchWorld(seats, options) as world:
            where = {"bench": "training", **describe(world, options, link, progress)}
            where |= {"ranks": size, "device": options.device, "task": task, "tiny": options.tiny}
            while left:
                name, density = left.pop(0)
                progress.part(f"{link}: P = {size}, {task}, {name}" + (f" at {density:g}" if density else ""))
                job = {"what": "training", "task": task, "contender": name, "density": density}
                try:
                    by_rank = world.run({**job, "options": asdict(options)}, progress)
                except WorkerFailed as error:
                    rows.append({**where, "contender": name, "skipped": f"{task}, {name}: {error}"})
                    break
                rows.append({**where, "contender": name, "density": density, **_summary(by_rank, options)})
    speeds = {row["contender"]: row["steps_per_s"] for row in rows if "skipped" not in row}
    for row in rows:
        if "skipped" not in row:
            row["against_dense"] = row["steps_per_s"] / speeds[BASELINE] if BASELINE in speeds else None
            row["of_no_communication"] = row["steps_per_s"] / speeds[ALONE] if ALONE in speeds else None
    return rows


def _densities(name: str, options: Options) -> tuple[float | None, ...]:
    return options.densities if name in OURS else (None,)


def _summary(by_rank: list[dict[str, Any]], options: Options) -> Row:
    """A step takes as long as its slowest rank; stages and bytes are means over the ranks."""
    slowest = np.max([mine["seconds"] for mine in by_rank], axis=0)
    first = by_rank[0]
    sent = [mine["bytes_sent"] for mine in by_rank if mine["bytes_sent"] is not None]
    return {
        "num_parameters": first["num_parameters"],
        "batch_size": first["batch_size"],
        "bucket_cap_mb": options.bucket_cap_mb,
        "steps": len(slowest),
        "warmup": first["warmup"],
        "steps_per_s": float(1.0 / slowest.mean()),
        "median_ms": 1e3 * float(np.median(slowest)),
        "p10_ms": 1e3 * float(np.percentile(slowest, 10)),
        "p90_ms": 1e3 * float(np.percentile(slowest, 90)),
        "bytes_sent": float(np.mean(sent)) if sent else None,
        "stages_ms": {
            stage: 1e3 * float(np.mean([mine["stages"][stage] for mine in by_rank])) for stage in first["stages"]
        },
    }


COLUMNS: tuple[Column, ...] = (
    ("contender", lambda row: row["contender"]),
    ("task", lambda row: row["task"] + (" (tiny)" if row["tiny"] else "")),
    ("link", lambda row: row["link"]),
    ("P", lambda row: str(row["ranks"])),
    ("parameters", lambda row: elements(row["num_parameters"])),
    ("density", lambda row: figure(row["density"], "g")),
    ("steps/s", lambda row: figure(row["steps_per_s"], ".2f")),
    ("median ms", lambda row: milliseconds(row["median_ms"])),
    ("x dense DDP", lambda row: figure(row["against_dense"], ".2f")),
    ("of no comm.", lambda row: figure(row["of_no_communication"], ".0%")),
    ("sent by a rank", lambda row: byte_count(row["bytes_sent"])),
    (
        "stages, ms",
        lambda row: ", ".join(f"{stage} {milliseconds(value)}" for stage, value in row["stages_ms"].items()) or "-",
    ),
)
FOOTNOTE = "stages run beside backward, one bucket after the other: they need not add up to what a step takes longer"


# --- in the workers


def measure(station: Station, options: Options, job: Job, tell: Tell) -> dict[str, Any]:
    """Forward, backward, optimizer step; a barrier before each, so that a rank waits for nobody's earlier step."""
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    wait = torch.cuda.synchronize if device.type == "cuda" else _nothing
    name: str = job["contender"]
    task = make_task(job["task"], station.rank, device, options.tiny)
    stats: list[StepStats] = []
    model, close = _wrap(name, task.model, options, job["density"], stats)
    optimizer = torch.optim.SGD(task.model.parameters(), lr=1e-3, momentum=0.9)
    warmup = max(options.warmup, bench_peers.POWERSGD_DENSE_STEPS + 1 if name == "powersgd" else 1)
    seconds: list[float] = []
    for step in range(warmup + options.steps):
        tell(f"P = {station.size}, {job['task']}, {name}: step {step + 1} of {warmup + options.steps}")
        if step == warmup:
            stats.clear()
        bench_peers.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        task.loss(model).backward()
        optimizer.step()
        wait()
        if step >= warmup:
            seconds.append(time.perf_counter() - start)
    close()
    stages: dict[str, float] = {}
    for each in stats:
        for stage, value in each.seconds.items():
            stages[stage] = stages.get(stage, 0.0) + value / options.steps
    return {
        "num_parameters": sum(parameter.numel() for parameter in task.model.parameters()),
        "batch_size": task.batch_size,
        "warmup": warmup,
        "seconds": seconds,
        "stages": stages,
        "bytes_sent": sum(each.bytes_sent for each in stats) / options.steps if stats else None,
    }


def _wrap(
    name: str, model: nn.Module, options: Options, density: float | None, stats: list[StepStats]
) -> tuple[nn.Module, Callable[[], None]]:
    """The model as that contender trains it, and what to do at the end; ours adds to `stats`."""
    if name == ALONE:
        return model, _nothing
    ddp = DistributedDataParallel(model, bucket_cap_mb=options.bucket_cap_mb)
    if name == "ddp-fp16":
        bench_peers.register_fp16(ddp)
    elif name == "powersgd":
        return ddp, bench_peers.register_powersgd(ddp)
    elif density is not None:
        settings = options.allreducer_settings(density, name.removeprefix("oktopk-"))
        del settings["min_sparse_numel"]  # small buckets stay dense, as for everyone who trains
        allreducer = attach(ddp, "oktopk", **settings)
        allreducer.add_listener(stats.append)
        return ddp, lambda: detach(ddp)
    return ddp, _nothing


def _nothing() -> None:
    pass
