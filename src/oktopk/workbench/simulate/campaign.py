"""Many simulated runs, on all cores: each is one (reducer, number of ranks), and none depends on another."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from oktopk.workbench.console.words import UsageError
from oktopk.workbench.simulate.run import Course, MovedRun, simulate_run
from oktopk.workbench.simulate.sources import GradientSource, RecordedSource, SyntheticSource

_BYTES_PER_ELEMENT = 24  # of a simulated rank: gradient, residual, noise, and what its reducer works with
_MEMORY_SHARE = 0.7
Key = tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class SourceSpec:
    """How to open a source, in any process."""

    size: int
    seed: int
    run: Path | None = None
    bucket: int | None = None

    def open(self) -> GradientSource:
        return RecordedSource(self.run, self.bucket) if self.run else SyntheticSource(self.size, self.seed)


def move_all(
    keys: Sequence[Key],
    spec: SourceSpec,
    source: GradientSource,
    course: Course,
    num_jobs: int,
    tell: Callable[[str], None],
    detail: Callable[[str], None],
) -> dict[Key, MovedRun]:
    """One run for each (reducer, number of ranks); the same results for any `num_jobs` (processes).

    `source` is what `spec` opens, for this process.
    """
    if num_jobs == 1 or len(keys) < 2:
        found: dict[Key, MovedRun] = {}
        for place, (reducer, num_ranks) in enumerate(keys):
            what = f"{reducer} on {num_ranks} ranks ({place + 1} of {len(keys)})"
            tell(what)
            found[reducer, num_ranks] = simulate_run(
                reducer, num_ranks, source, course, lambda how_far, what=what: detail(f"{what}: {how_far}")
            )
        return found
    # The longest first: a long one at the end would keep one process busy while the others wait.
    tasks = [(*key, spec, course) for key in sorted(keys, key=lambda key: -key[1])]
    found = {}
    tell(f"{len(tasks)} runs in {num_jobs} processes, the largest first")
    with multiprocessing.get_context("spawn").Pool(num_jobs, _ignore_interrupts) as pool:
        for run in pool.imap_unordered(_run_task, tasks):
            found[run.reducer, run.num_ranks] = run
            tell(f"{run.reducer} on {run.num_ranks} ranks is done ({len(found)} of {len(tasks)})")
    return found


def jobs_for(num_tasks: int, n: int, num_ranks: int) -> int:
    """As many processes as there are cores, tasks, and room for so many ranks of n elements each.

    UsageError where there is no room for one.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    needed = _BYTES_PER_ELEMENT * n * num_ranks
    if needed > memory:
        raise UsageError(
            f"--ranks: {num_ranks}: with {n:,} elements each they need about {needed / 1e9:.0f} GB, and there are "
            f"{memory / 1e9:.0f}; simulate fewer ranks or a smaller gradient (--size, --bucket)"
        )
    return max(1, min(len(os.sched_getaffinity(0)), num_tasks, int(_MEMORY_SHARE * memory / needed)))


def _run_task(task: tuple[str, int, SourceSpec, Course]) -> MovedRun:
    reducer, num_ranks, spec, course = task
    return simulate_run(reducer, num_ranks, _open_once(spec), course)


@lru_cache(maxsize=1)
def _open_once(spec: SourceSpec) -> GradientSource:
    """Noise takes long to draw: a process keeps it from one run to the next."""
    return spec.open()


def _ignore_interrupts() -> None:
    """Ctrl-C is for the parent, which ends its children."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
