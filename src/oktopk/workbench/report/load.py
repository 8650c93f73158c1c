"""A run's folder as plain values, whatever state the run left it in: docs/run-folder.md says what is where.

What cannot be read is left out and counted, never guessed; what is missing is None.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from oktopk.workbench.console.words import UsageError
from oktopk.workbench.recording.profile import NAMES, profile_files, read_profile
from oktopk.workbench.recording.stages import LOOP_STAGES
from oktopk.workbench.report.run import LOCAL, Bucket, Epoch, Profile, Run, Step
from oktopk.workbench.report.values import Values, clean, number, whole

_MARKS = ("config.json", "run.json", "metrics.jsonl")
_NO_METRICS = {
    "epoch", "step", "steps", "loss", "val_loss", "lr", "sparsity", "compression_ratio", "communication_size",
    "bytes_sent", "sent_of_dense", "memory_mb",
}  # fmt: skip
"""Columns of epochs.csv that every task has; others are the task's metrics, unless they are seconds or rates (`_s`)."""


def is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _MARKS)


def load_run(folder: Path) -> Run:
    """UsageError where there is no run."""
    _check(folder)
    problems: list[str] = []
    steps, has_time = _steps(folder / "metrics.jsonl", problems)
    return Run(
        folder=folder,
        name=clean(folder.resolve().name),
        config=_object(folder / "config.json", problems),
        facts=_object(folder / "run.json", problems),
        steps=steps,
        epochs=_epochs(folder / "epochs.csv", steps, problems),
        ranks=_ranks(folder / "ranks.csv", problems),
        profiles=load_profiles(folder, problems),
        problems=problems,
        has_time=has_time,
        num_logs=len(list((folder / "logs").glob("rank_*.log"))),
    )


def load_profiles(folder: Path, problems: list[str]) -> list[Profile]:
    """By rank; a file that is no profile is left out and named in `problems`."""
    found: list[Profile] = []
    try:
        paths = profile_files(folder)
    except ValueError:
        problems.append("The folder profile holds a file that is named like a profile and is none; none is shown.")
        return []
    for path in paths:
        try:
            header, records = read_profile(path)
        except (ValueError, OSError) as error:
            problems.append(f"A profile cannot be read and is left out: {clean(str(error))}.")
            continue
        found.append(Profile(header, records[records["name"] < len(NAMES)]))
    return found


# --- single files


def _check(folder: Path) -> None:
    if not folder.exists():
        raise UsageError(f"{folder}: does not exist; give the folder of a run, such as runs/demo")
    if not folder.is_dir():
        raise UsageError(f"{folder}: is a file; give the folder of a run, such as runs/demo")
    if not is_run(folder):
        below = sorted(path for path in folder.iterdir() if path.is_dir() and is_run(path))
        fix = f"did you mean {below[0]}?" if below else "give a folder that `oktopk train` wrote, such as runs/demo"
        raise UsageError(f"{folder}: is no run (none of {', '.join(_MARKS)} is in it); {fix}")


def _text(path: Path, problems: list[str]) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    except OSError as error:
        problems.append(f"{path.name} cannot be read ({error.strerror}).")
        return ""


def _object(path: Path, problems: list[str]) -> Values:
    text = _text(path, problems)
    if not text:
        return Values({})
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        problems.append(f"{path.name} is damaged: nothing in it is shown.")
        return Values({})
    return Values(cast("dict[str, Any]", found))


def _steps(path: Path, problems: list[str]) -> tuple[list[Step], bool]:
    lines = [line for line in _text(path, problems).split("\n") if line.strip()]
    by_number: dict[int, Values] = {}
    damaged = 0
    for place, line in enumerate(lines, 1):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        values = Values(cast("dict[str, Any]", found) if isinstance(found, dict) else {})
        step = values.whole("step")
        if step is not None and values.text("phase") in ("dense", "sparse", LOCAL):
            by_number[step] = values
        elif place == len(lines):
            problems.append("metrics.jsonl ends in half a line, as a run leaves it that is killed; it is left out.")
        else:
            damaged += 1
    if damaged:
        problems.append(f"{damaged} damaged line{'s' * (damaged > 1)} of metrics.jsonl {_is(damaged)} left out.")
    ordered = [by_number[step] for step in sorted(by_number)]
    has_time = all(values.number("time_s") is not None for values in ordered)
    elapsed, steps = 0.0, list[Step]()
    for values in ordered:
        seconds = values.seconds()
        elapsed += sum(seconds.get(stage, 0.0) for stage in LOOP_STAGES)
        steps.append(_step(values, seconds, values.number("time_s") or 0.0 if has_time else elapsed))
    return steps, has_time


def _step(values: Values, seconds: Mapping[str, float], time_s: float) -> Step:
    return Step(
        step=values.count("step"),
        epoch=values.whole("epoch"),
        phase=values.text("phase") or "",
        time_s=time_s,
        loss=values.number("loss"),
        sparsity=values.number("sparsity"),
        skipped=values.get("skipped") is True,
        samples=values.count("samples"),
        bytes_sent=values.count("bytes_sent"),
        seconds=seconds,
        buckets=[_bucket(each) for each in values.objects("buckets")],
    )


def _bucket(values: Values) -> Bucket:
    return Bucket(
        name=values.text("bucket") or "",
        phase=values.text("phase") or "",
        n=values.count("n"),
        k=values.count("k"),
        local_count=values.count("local_count"),
        global_count=values.count("global_count"),
        local_threshold=values.number("local_threshold"),
        global_threshold=values.number("global_threshold"),
        compression_ratio=values.number("compression_ratio"),
        seconds=values.seconds(),
        bytes_sent=values.count("bytes_sent"),
        bytes_received=values.count("bytes_received"),
    )


def _rows(path: Path, problems: list[str]) -> list[dict[str, str | None]]:
    """Of a CSV file; without half a row at its end."""
    text = _text(path, problems)
    if text and not text.endswith("\n"):
        problems.append(f"{path.name} ends in half a row, as a run leaves it that is killed; it is left out.")
        text = text[: text.rfind("\n") + 1]
    return [{clean(key): value for key, value in row.items() if key} for row in csv.DictReader(text.splitlines())]


def _epochs(path: Path, steps: Sequence[Step], problems: list[str]) -> list[Epoch]:
    ends = {step.epoch: step for step in steps}
    epochs: list[Epoch] = []
    for row in _rows(path, problems):
        index = whole(row.get("epoch"))
        if index is None:
            continue
        end = ends.get(index)
        done, time_s = whole(row.get("step")), number(row.get("time_s"))
        metrics = {key: number(value) for key, value in row.items() if key not in _NO_METRICS and key[-2:] != "_s"}
        epochs.append(
            Epoch(
                epoch=index,
                step=end.step + 1 if done is None and end else done,
                time_s=end.time_s if time_s is None and end else time_s,
                loss=number(row.get("loss")),
                val_loss=number(row.get("val_loss")),
                metrics=metrics,
            )
        )
    return epochs


def _ranks(path: Path, problems: list[str]) -> dict[int, dict[str, float]]:
    sums: dict[int, dict[str, float]] = {}
    for row in _rows(path, problems):
        rank = whole(row.get("rank"))
        if rank is None:
            continue
        mine = sums.setdefault(rank, {})
        for key, value in row.items():
            if key not in ("epoch", "rank"):
                mine[key] = mine.get(key, 0.0) + (number(value) or 0.0)
    return dict(sorted(sums.items()))


def _is(count: int) -> str:
    return "is" if count == 1 else "are"
