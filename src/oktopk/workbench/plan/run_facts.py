"""What a finished or broken run says about its gradients and its steps."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from oktopk.workbench.console.words import UsageError
from oktopk.workbench.plan.model import Compute
from oktopk.workbench.simulate.volume import fit_common


@dataclass(frozen=True)
class RunFacts:
    """`common` is None where the run does not show how much its workers' choices coincide."""

    bucket_sizes: tuple[int, ...]
    num_ranks: int
    density: float
    compute: Compute
    common: float | None


def read_run(folder: Path) -> RunFacts:
    """From run.json, metrics.jsonl and the gradients, where they were recorded; UsageError for too little."""
    steps = _steps(folder / "metrics.jsonl")
    if not steps:
        raise UsageError(f"--run: '{folder}': holds no run with a logged step; give the folder of a run, as runs/demo")
    try:
        about = json.loads((folder / "run.json").read_text())
        num_ranks, density = int(about["workers"]), float(about["density"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--run: '{folder}': its run.json cannot be read ({error}); train it again") from error
    buckets: list[dict[str, Any]] = steps[-1]["buckets"]
    sizes = tuple(int(bucket["n"]) for bucket in buckets)
    later = steps[len(steps) // 2 :]  # the first steps are slower
    forward, backward = (
        float(np.median([step["seconds"][stage] for step in later])) for stage in ("forward", "backward")
    )
    compute = Compute(forward, backward, hidden=not _clips(folder))
    return RunFacts(sizes, num_ranks, density, compute, _common(folder, density))


def _clips(folder: Path) -> bool:
    """Where gradients are clipped, buckets wait for the end of backward."""
    try:
        return float(json.loads((folder / "config.json").read_text())["norm_clip"]) > 0
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _steps(path: Path) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            steps.append(json.loads(line))
        except ValueError:  # half a line at the end
            continue
    return [step for step in steps if isinstance(step, dict) and step.get("buckets")]


def _common(folder: Path, density: float) -> float | None:
    """From the recorded gradients of one step: how many different elements the workers' k largest are."""
    ranks = sorted((folder / "gradients").glob("rank_*"))
    files = [sorted(rank.glob("step_*.npy")) for rank in ranks]
    if len(ranks) < 2 or not all(files):
        return None
    first = files[0][0].name
    try:
        gradients = [np.load(rank / first, allow_pickle=False) for rank in ranks if (rank / first).is_file()]
    except (OSError, ValueError, EOFError):  # half a file, as a killed run leaves it
        return None
    if len(gradients) < 2 or len({gradient.size for gradient in gradients}) > 1:
        return None
    n = int(gradients[0].size)
    k = max(1, round(density * n))
    chosen = [np.argpartition(np.abs(gradient), n - k)[n - k :] for gradient in gradients]
    return fit_common({len(chosen): float(np.unique(np.concatenate(chosen)).size)}, n, k)
