"""Doing a study's runs: in worlds of workers that stay for many runs, several at a time where that is asked for."""

from __future__ import annotations

import json
import queue
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from oktopk.bench.netns import seats
from oktopk.bench.options import Options
from oktopk.bench.train_run import FINISHED
from oktopk.bench.world import BenchWorld, Seat
from oktopk.console.files import write_text
from oktopk.console.progress import Progress
from oktopk.console.words import UsageError
from oktopk.study.definition import Run

_CONDITIONS = "conditions.json"


@dataclass(frozen=True)
class Conditions:
    """How runs are done: workers of each, link between them, device, and how many runs at a time."""

    num_workers: int
    link: str
    device: str
    num_jobs: int
    timeout_s: float


@dataclass(frozen=True)
class Done:
    """How a run ended, and whether it had the machine to itself."""

    status: str
    alone: bool


def done_before(run: Run, conditions: Conditions) -> Done | None:
    """None for a run that is still to be done; UsageError where one with other settings or conditions is in the way."""
    config, how = _read(run.folder / "config.json"), _read(run.folder / _CONDITIONS)
    differences = run.differences(config) if config is not None else []
    if how is not None:
        differences += [
            f"{key}={how.get(key)!r} there, {getattr(conditions, key)!r} here"
            for key in ("link", "device")
            if how.get(key) != getattr(conditions, key)
        ]
    if differences:
        raise UsageError(f"{run.folder}: holds a run with other settings ({differences[0]}); use another --out")
    if config is None or how is None:
        return None
    return Done(str(how.get("status")), how.get("num_jobs") == 1)


def do_runs(
    runs: Sequence[Run], conditions: Conditions, progress: Progress, check: Callable[[Run, Done], object]
) -> None:
    """Those that were not done before; each is checked. The first failure ends it all, and what is done stays done."""
    pending = [run for run in runs if done_before(run, conditions) is None]
    if not pending:
        return
    shared = _Shared(pending, len(runs), progress)
    with seats(conditions.num_workers, conditions.link) as places:
        threads = [
            threading.Thread(target=_work, args=(shared, conditions, places, check), daemon=True)
            for _ in range(min(conditions.num_jobs, len(pending)))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if shared.failure is not None:
        raise shared.failure


class _Shared:
    """What threads share: the runs that wait, the line that says how far it is, and what went wrong."""

    def __init__(self, pending: Sequence[Run], total: int, progress: Progress) -> None:
        self._waiting: queue.SimpleQueue[Run] = queue.SimpleQueue()
        for run in pending:
            self._waiting.put(run)
        self._lock = threading.Lock()
        self._progress = progress
        self._total, self._done = total, total - len(pending)
        self.failure: BaseException | None = None

    def next(self) -> Run | None:
        """None where there is none left, or something went wrong."""
        if self.failure is not None or self._waiting.empty():
            return None
        run = self._waiting.get()
        with self._lock:
            self._progress.part(f"{self._done} of {self._total} runs done; now {run.variant}, seed {run.seed}")
        return run

    def done(self, run: Run, how: str) -> None:
        with self._lock:
            self._done += 1
            if how != FINISHED:
                self._progress.note(f"{run.variant}, seed {run.seed}: {how}")

    def detail(self, text: str) -> None:
        with self._lock:
            self._progress.detail(f"{self._done} of {self._total} runs done; {text}")


def _work(
    shared: _Shared, conditions: Conditions, places: Sequence[Seat], check: Callable[[Run, Done], object]
) -> None:
    """Run after run, in one world."""
    options = Options(what="train_run", device=conditions.device, timeout_s=conditions.timeout_s)
    try:
        with BenchWorld(places, options) as world:
            while run := shared.next():
                if (run.folder / "config.json").is_file():  # a run that was stopped half way
                    shutil.rmtree(run.folder)
                job = {"what": "train_run", "options": asdict(options), "config": run.config.as_dict()}
                how: str = world.run(job, shared)[0]
                write_text(run.folder / _CONDITIONS, json.dumps({"status": how, **asdict(conditions)}) + "\n")
                check(run, Done(how, conditions.num_jobs == 1))
                shared.done(run, how)
    except BaseException as error:
        shared.failure = shared.failure or error


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return cast("dict[str, Any]", found) if isinstance(found, dict) else None
