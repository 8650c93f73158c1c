"""Run folders as docs/run-folder.md says, made without training: whole ones, old ones, and what crashes leave."""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oktopk.comm.counting import CommRecord
from oktopk.workbench.recording.profile import FileProfile
from oktopk.workbench.recording.stages import LOOP_STAGES as LOOP
from oktopk.workbench.recording.stages import REDUCTION_STAGES as REDUCTION

REDUCTION_BEFORE = ("compensate", "select", "exchange", "combine", "apply")
"""Of runs as `Recipe.old` has them."""
CONFIG = {"name": "made", "task": "lstman4", "resume": False, "reducer": "oktopk", "density": 0.02, "workers": 2}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What kind of run to write."""

    steps: int = 60
    planned: int | None = None
    dense_steps: int = 20
    steps_per_epoch: int = 15
    workers: int = 2
    buckets: Sequence[tuple[str, int]] = (("conv.weight..lstm.0.bias", 60_000), ("lstm.1.weight..out.bias", 40_000))
    density: float = 0.02
    reducer: str = "oktopk"
    local_steps: int = 0
    """After the dense steps, those between two exchanges."""
    skipped: frozenset[int] = frozenset()
    metrics: Mapping[str, Callable[[float], float]] = field(
        default_factory=lambda: {"wer": lambda part: 0.9 - 0.6 * part, "cer": lambda part: 0.6 - 0.5 * part}
    )
    profile: bool = True
    status: str = "finished"
    reason: str | None = None
    auto: Mapping[str, Any] | None = None
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    old: bool = False
    """As written before run.json, ranks.csv, time_s, encode and meet."""
    seed: int = 0


def write_run(folder: Path, recipe: Recipe) -> list[dict[str, Any]]:
    """Everything a run leaves; returns its steps."""
    folder.mkdir(parents=True)
    chance = random.Random(recipe.seed)
    write_config(folder, recipe)
    steps = [_step(number, recipe, chance) for number in range(recipe.steps)]
    if not recipe.old:
        write_facts(folder, recipe)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    if steps:
        _write_epochs(folder, recipe, steps)
    if steps and not recipe.old:
        _write_ranks(folder, recipe, steps, chance)
    if recipe.profile and not recipe.old:
        for rank in range(recipe.workers):
            write_profile(folder / "profile" / f"rank_{rank}.bin", rank, recipe.workers)
    (folder / "logs").mkdir()
    for rank in range(recipe.workers):
        (folder / "logs" / f"rank_{rank}.log").write_text("")
    return steps


def write_config(folder: Path, recipe: Recipe) -> None:
    own = {"reducer": recipe.reducer, "density": recipe.density}
    (folder / "config.json").write_text(json.dumps({**CONFIG, **own, **recipe.config}))


def write_facts(folder: Path, recipe: Recipe) -> None:
    facts = {
        "format": 1,
        "status": recipe.status,
        "reason": recipe.reason,
        "started": "2026-02-03T04:05:06+00:00",
        "task": "lstman4",
        "num_parameters": sum(n for _, n in recipe.buckets),
        "workers": recipe.workers,
        "num_steps": recipe.steps if recipe.planned is None else recipe.planned,
        "steps_per_epoch": recipe.steps_per_epoch,
        "dense_steps": recipe.dense_steps,
        "reducer": recipe.reducer,
        "density": recipe.density,
        "auto": recipe.auto,
    }
    (folder / "run.json").write_text(json.dumps(facts))


def _step(number: int, recipe: Recipe, chance: random.Random) -> dict[str, Any]:
    sparse, skipped = number >= recipe.dense_steps, number in recipe.skipped
    local = sparse and recipe.local_steps > 0 and (number + 1) % recipe.local_steps > 0
    sparse = sparse and recipe.reducer != "dense"
    exchanged = () if local else recipe.buckets
    buckets = [_bucket(name, n, sparse, skipped, recipe, chance) for name, n in exchanged]
    applied = sum(b["n"] if b["phase"] == "dense" else b["global_count"] for b in buckets)
    record: dict[str, Any] = {
        "step": number,
        "epoch": number // recipe.steps_per_epoch,
        "phase": "local" if local else "sparse" if sparse else "dense",
        "time_s": 0.031 * (number + 1),
        "loss": None if skipped else 5.0 * math.exp(-number / 25) + 0.3 + 0.2 * chance.random(),
        "lr": 0.01,
        "skipped": skipped,
        "sparsity": None if skipped or local else 1.0 - applied / sum(b["n"] for b in buckets),
        "bytes_sent": sum(b["bytes_sent"] for b in buckets),
        "samples": 8 * recipe.workers,
        "seconds": {
            stage: scale * (1 + chance.random()) for stage, scale in zip(LOOP, (1e-3, 5e-3, 9e-3, 2e-3), strict=True)
        },
        "buckets": buckets,
    }
    if recipe.old:
        del record["time_s"]
    return record


def _bucket(name: str, n: int, sparse: bool, skipped: bool, recipe: Recipe, chance: random.Random) -> dict[str, Any]:
    size = recipe.workers
    k = max(1, round(recipe.density * n)) if sparse else n
    applied = k + chance.randrange(1 + k // 64) if sparse else n
    sent = round(5.2 * applied * 3 * (size - 1) / size) if sparse else 8 * n * (size - 1) // size
    if skipped:
        k = applied = 0
        sent = 96 * (size - 1)
    stages = REDUCTION_BEFORE if recipe.old else REDUCTION
    seconds = {} if skipped else {stage: 1e-3 * (0.2 + chance.random()) for stage in stages}
    has_threshold = sparse and not skipped
    return {
        "bucket": name,
        "phase": "sparse" if sparse else "dense",
        "n": n,
        "k": k,
        "local_count": k,
        "global_count": applied,
        "local_threshold": 0.02 * (1 + 0.2 * chance.random()) if has_threshold else None,
        "global_threshold": 0.05 * (1 + 0.2 * chance.random()) if has_threshold else None,
        "sparsity": 1.0 - applied / n if sparse else 0.0,
        "compression_ratio": n / max(1, applied) if sparse else 1.0,
        "communication_size": 8 * applied if sparse else 4 * n,
        "bytes_sent": sent,
        "bytes_received": sent,
        "messages_sent": 4 * (size - 1),
        "messages_received": 4 * (size - 1),
        "seconds": seconds,
        "skipped": skipped,
    }


def _write_epochs(folder: Path, recipe: Recipe, steps: Sequence[Mapping[str, Any]]) -> None:
    rows: list[dict[str, Any]] = []
    last = steps[-1]["epoch"]
    for epoch in range(last + 1):
        mine = [step for step in steps if step["epoch"] == epoch]
        losses = [step["loss"] for step in mine if step["loss"] is not None]
        part = (epoch + 1) / (last + 1)
        validated = epoch % 2 == 1 or epoch == last
        row = {
            "epoch": epoch,
            "step": mine[-1]["step"] + 1,
            "time_s": 0.031 * (mine[-1]["step"] + 1) + 0.2,
            "steps": len(mine),
            "loss": sum(losses) / len(losses) if losses else "n/a",
            "val_loss": 4.0 * (1 - 0.8 * part) if validated else "n/a",
            **{name: value(part) if validated else "n/a" for name, value in recipe.metrics.items()},
            "lr": 0.01,
            "bytes_sent": sum(step["bytes_sent"] for step in mine),
            "sent_of_dense": 0.3,
            "io_s": 0.1,
            "samples_per_s": 500.0,
            "memory_mb": 200.0,
        }
        if recipe.old:
            del row["step"], row["time_s"]
        rows.append(row)
    _write_csv(folder / "epochs.csv", rows)


def _write_ranks(folder: Path, recipe: Recipe, steps: Sequence[Mapping[str, Any]], chance: random.Random) -> None:
    sent = sum(step["bytes_sent"] for step in steps)
    rows = [
        {
            "epoch": 0,
            "rank": rank,
            "steps": len(steps),
            "bytes_sent": sent + 997 * rank * (recipe.workers > 1),
            "bytes_received": sent,
            "messages_sent": 8 * len(steps),
            "messages_received": 8 * len(steps),
            **{f"{stage}_s": 0.01 * len(steps) * chance.random() for stage in (*LOOP, *REDUCTION)},
        }
        for rank in range(recipe.workers)
    ]
    _write_csv(folder / "ranks.csv", rows)


def _write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_profile(path: Path, rank: int, size: int, num_steps: int = 3) -> None:
    """As the trainer's: stages, a ring whose way nobody knows, and exchanges with every peer."""
    profile = FileProfile(path, rank, size)
    for step in range(num_steps):
        profile.step = lambda step=step: step
        for stage in ("io", "forward", "backward", "wait"):
            with profile.stage(stage):
                pass
        start = 1000.0 + 0.03 * step
        messages = 2 * (size - 1)
        profile.communication(
            CommRecord("all_reduce", None, 400_000, 400_000, messages, messages, start, 0.004, (), ())
        )
        to = tuple(0 if peer == rank else 900 + 100 * peer + 10 * step for peer in range(size))
        back = tuple(0 if peer == rank else 900 + 100 * rank + 10 * step for peer in range(size))
        profile.communication(
            CommRecord("all_to_all_v", None, sum(to), sum(back), size - 1, size - 1, start + 0.005, 0.002, to, back)
        )
        if size > 1:
            peer = (rank + 1) % size
            profile.communication(CommRecord("send", peer, 64, 0, 2, 0, start + 0.008, 0.001))
    profile.close()
