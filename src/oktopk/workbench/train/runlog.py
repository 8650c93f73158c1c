"""What a run writes: config, every step, every epoch, TensorBoard events, a log for each worker; all in its folder."""

from __future__ import annotations

import contextlib
import csv
import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from oktopk.metrics.step_stats import StepStats
from oktopk.workbench.console.files import write_text
from oktopk.workbench.recording.stages import LOOP_STAGES, REDUCTION_STAGES

logger = logging.getLogger("oktopk")
_EPOCH = ("epoch", "step", "time_s", "steps", "loss", "val_loss")
_COSTS = (
    "lr", "sparsity", "compression_ratio", "communication_size", "bytes_sent", "sent_of_dense", "io_s",
    "forward_s", "backward_s", "communication_s", "wait_s", "samples_per_s", "memory_mb",
)  # fmt: skip
"""Columns of epochs.csv, before and behind those of the task's metrics."""
TRAFFIC = ("bytes_sent", "bytes_received", "messages_sent", "messages_received")
RANK_COLUMNS = ("epoch", "rank", "steps", *TRAFFIC, *(f"{stage}_s" for stage in (*LOOP_STAGES, *REDUCTION_STAGES)))
_FLUSH_S = 1.0


class RunLog(Protocol):
    """Told of every step and epoch, and how it ended."""

    def step(self, record: Mapping[str, Any]) -> None: ...
    def epoch(self, record: Mapping[str, Any], by_rank: Sequence[Sequence[float]]) -> None:
        """`by_rank`: every worker's figures by RANK_COLUMNS, from `steps` on."""
        ...

    def about(self, **facts: Any) -> None:
        """Of the whole run, for run.json."""
        ...

    def close(self) -> None: ...


class NullLog:
    """For all workers but the first."""

    def step(self, record: Mapping[str, Any]) -> None:
        del record

    def epoch(self, record: Mapping[str, Any], by_rank: Sequence[Sequence[float]]) -> None:
        del record, by_rank

    def about(self, **facts: Any) -> None:
        del facts

    def close(self) -> None:
        pass


class FolderLog:
    """run.json, metrics.jsonl, epochs.csv, ranks.csv and TensorBoard events, written by the first worker.

    On resume, later entries are cut off.
    """

    def __init__(
        self, folder: Path, config: Mapping[str, Any], metrics: Sequence[str], first_step: int, first_epoch: int
    ) -> None:
        write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
        self._run_path = folder / "run.json"
        self._about: dict[str, Any] = {"format": 1, "status": "running", "reason": None}
        every_step = folder / "metrics.jsonl"
        _cut_off_steps(every_step, first_step)
        self._judged = ("loss", "val_loss", *metrics, "sparsity")
        self._columns = (*_EPOCH, *metrics, *_COSTS)
        self._epochs = _Table(folder / "epochs.csv", self._columns, first_epoch)
        self._ranks = _Table(folder / "ranks.csv", RANK_COLUMNS, first_epoch)
        self._metrics = every_step.open("a")
        self._last_flush = time.monotonic()
        self._events = _event_writer(folder / "tensorboard", first_step)

    def step(self, record: Mapping[str, Any]) -> None:
        self._metrics.write(json.dumps(record, allow_nan=False) + "\n")
        if time.monotonic() - self._last_flush > _FLUSH_S:
            self._metrics.flush()
            self._last_flush = time.monotonic()
        for key in ("loss", "lr", "sparsity", "bytes_sent"):
            if record.get(key) is not None:
                self._events.add_scalar(f"step/{key}", record[key], record["step"])

    def epoch(self, record: Mapping[str, Any], by_rank: Sequence[Sequence[float]]) -> None:
        self._epochs.add(record.get(key) for key in self._columns)
        for rank, figures in enumerate(by_rank):
            counts, seconds = figures[: 1 + len(TRAFFIC)], figures[1 + len(TRAFFIC) :]
            self._ranks.add([record["epoch"], rank, *(int(count) for count in counts), *seconds])
        self._metrics.flush()
        for key in self._judged:
            if record.get(key) is not None:
                self._events.add_scalar(f"epoch/{key}", record[key], record["epoch"])
        self._events.flush()

    def about(self, **facts: Any) -> None:
        self._about |= facts
        write_text(self._run_path, json.dumps(self._about, indent=2) + "\n")

    def close(self) -> None:
        self._metrics.close()
        self._epochs.close()
        self._ranks.close()
        self._events.close()


class _Table:
    """A CSV file with a row for every epoch, or several; rows of earlier epochs are kept. None is n/a."""

    def __init__(self, path: Path, columns: Sequence[str], first_epoch: int) -> None:
        kept: list[dict[str, str]] = []
        if path.is_file():
            with path.open(newline="") as file:
                kept = [row for row in csv.DictReader(file) if int(row["epoch"]) < first_epoch]
        self._file = path.open("w", newline="")
        self._writer = csv.writer(self._file)
        self.add(columns)
        for row in kept:
            self.add(row.get(column) for column in columns)

    def add(self, values: Iterable[object]) -> None:
        self._writer.writerow(["n/a" if value is None else value for value in values])
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def stats_record(stats: StepStats) -> dict[str, Any]:
    """A StepStats as plain values, with the three known metrics."""
    return {
        "bucket": stats.bucket,
        "phase": stats.phase,
        "n": stats.n,
        "k": stats.k,
        "local_count": stats.local_count,
        "global_count": stats.global_count,
        "local_threshold": stats.local_threshold,
        "global_threshold": stats.global_threshold,
        "sparsity": stats.sparsity,
        "compression_ratio": stats.compression_ratio,
        "communication_size": stats.communication_size,
        "bytes_sent": stats.bytes_sent,
        "bytes_received": stats.bytes_received,
        "messages_sent": stats.messages_sent,
        "messages_received": stats.messages_received,
        "seconds": dict(stats.seconds),
        "skipped": stats.skipped,
        "refreshed": stats.refreshed,
    }


def open_rank_log(folder: Path, rank: int) -> logging.Handler:
    """From now on what this worker has to say is also in logs/rank_N.log."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(folder / "logs" / f"rank_{rank}.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    return handler


class _NoEvents:
    def add_scalar(self, tag: str, value: float, step: int) -> None:
        del tag, value, step

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def _event_writer(folder: Path, first_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        logger.warning("TensorBoard is not installed: no event files are written (pip install 'oktopk[train]')")
        return _NoEvents()
    return SummaryWriter(str(folder), purge_step=first_step or None)


def _cut_off_steps(path: Path, first_step: int) -> None:
    """Keep whole lines of earlier steps; a run that was killed may have left half a line."""
    kept: list[str] = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        with contextlib.suppress(ValueError):
            if int(json.loads(line)["step"]) < first_step:
                kept.append(f"{line}\n")
    write_text(path, "".join(kept))
