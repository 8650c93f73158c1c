"""Doing a study's runs: in worlds of workers that stay for many runs, several at a time where that is asked for."""

from __future__ import annotations

import fcntl
import json
import queue
import shutil
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from oktopk.workbench.bench.options import Options
from oktopk.workbench.bench.train_run import FINISHED
from oktopk.workbench.console.files import write_text
from oktopk.workbench.console.progress import Progress
from oktopk.workbench.console.words import UsageError
from oktopk.workbench.study.definition import Run
from oktopk.workbench.train.config import TrainConfig
from oktopk.workbench.worlds.links import seats
from oktopk.workbench.worlds.world import BenchWorld, Seat

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


@contextmanager
def alone_in(folder: Path) -> Generator[None]:
    """UsageError where another study is at work in that folder: they would remove each other's runs."""
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UsageError(f"--out: '{folder}': another study is at work there; wait, or choose another") from error
        yield


def do_runs(runs: Sequence[Run], metric: str, conditions: Conditions, progress: Progress) -> None:
    """Those that were not done before. The first failure ends it all: WorkerFailed, and what is done stays done."""
    pending = [run for run in runs if done_before(run, conditions) is None]
    if not pending:
        return
    shared = _Shared(pending, len(runs), progress)
    with seats(conditions.num_workers, conditions.link) as places:
        threads = [
            threading.Thread(target=_work, args=(shared, metric, conditions, places), daemon=True)
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
        self._at_work = 0
        self.failure: BaseException | None = None

    def next(self) -> Run | None:
        """None where there is none left, or something went wrong."""
        if self.failure is not None:
            return None
        try:
            run = self._waiting.get_nowait()
        except queue.Empty:
            return None
        with self._lock:
            self._at_work += 1
            self._progress.part(f"{self._done} of {self._total} runs done; now {run.variant}, seed {run.seed}")
        return run

    def fail(self, error: BaseException) -> None:
        with self._lock:
            self._at_work -= 1
            if self._at_work > 0:
                self._progress.note("stopping: the other runs that have begun are finished first")
            self.failure = self.failure or error

    def done(self, run: Run, how: str) -> None:
        with self._lock:
            self._done += 1
            self._at_work -= 1
            if how != FINISHED:
                self._progress.note(f"{run.variant}, seed {run.seed}: {how}")

    def detail(self, text: str) -> None:
        with self._lock:
            self._progress.detail(f"{self._done} of {self._total} runs done; {text}")


def _work(shared: _Shared, metric: str, conditions: Conditions, places: Sequence[Seat]) -> None:
    """Run after run, in one world."""
    options = Options(what="train_run", device=conditions.device, timeout_s=conditions.timeout_s)
    try:
        with BenchWorld(places, options) as world:

            def train(config: TrainConfig) -> str:
                shutil.rmtree(config.run_folder, ignore_errors=True)  # what a run that was stopped half way left
                job = {"what": "train_run", "options": asdict(options), "config": config.as_dict(), "metric": metric}
                return world.run(job, shared)[0]

            is_warm = False
            while run := shared.next():
                if not is_warm:
                    short = _short(run.config)
                    train(short)
                    shutil.rmtree(short.run_folder)
                    is_warm = True
                how = train(run.config)
                write_text(run.folder / _CONDITIONS, json.dumps({"status": how, **asdict(conditions)}) + "\n")
                shared.done(run, how)
    except BaseException as error:
        shared.fail(error)


def _short(config: TrainConfig) -> TrainConfig:
    """A few steps of both phases: what is loaded and compiled for a first run must not count as its time."""
    name = f"{config.name}-warming-up"
    return replace(config, name=name, reducer="oktopk", warmup_steps=1, max_steps=3, density_ramp_steps=0)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return cast("dict[str, Any]", found) if isinstance(found, dict) else None
