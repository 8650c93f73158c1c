"""What a run writes: config, every step, every epoch, TensorBoard events, a log for each worker; all in its folder."""

from __future__ import annotations

import contextlib
import csv
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from oktopk.console.files import write_text
from oktopk.types import StepStats

logger = logging.getLogger("oktopk")
EPOCH_COLUMNS = (
    "epoch", "steps", "loss", "val_loss", "wer", "cer", "lr", "sparsity", "compression_ratio", "communication_size",
    "bytes_sent", "io_s", "forward_s", "backward_s", "communication_s", "wait_s", "samples_per_s", "memory_mb",
)  # fmt: skip


class RunLog(Protocol):
    """Told of every step and epoch."""

    def step(self, record: Mapping[str, Any]) -> None: ...
    def epoch(self, record: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


class NullLog:
    """For all workers but the first."""

    def step(self, record: Mapping[str, Any]) -> None:
        del record

    def epoch(self, record: Mapping[str, Any]) -> None:
        del record

    def close(self) -> None:
        pass


class FolderLog:
    """metrics.jsonl, epochs.csv and TensorBoard events of the first worker. On resume, later entries are cut off."""

    def __init__(self, folder: Path, config: Mapping[str, Any], first_step: int, first_epoch: int) -> None:
        write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
        self._metrics_path, self._epochs_path = folder / "metrics.jsonl", folder / "epochs.csv"
        _cut_off_steps(self._metrics_path, first_step)
        rows = _old_rows(self._epochs_path, first_epoch)
        self._epochs_file = self._epochs_path.open("w", newline="")
        self._epochs: csv.DictWriter[str] = csv.DictWriter(self._epochs_file, EPOCH_COLUMNS)
        self._epochs.writeheader()
        self._epochs.writerows(rows)
        self._metrics = self._metrics_path.open("a")
        self._events = _event_writer(folder / "tensorboard", first_step)

    def step(self, record: Mapping[str, Any]) -> None:
        self._metrics.write(json.dumps(record, allow_nan=False) + "\n")
        for key in ("loss", "lr", "sparsity", "bytes_sent"):
            if record.get(key) is not None:
                self._events.add_scalar(f"step/{key}", record[key], record["step"])

    def epoch(self, record: Mapping[str, Any]) -> None:
        self._epochs.writerow({key: "n/a" if record.get(key) is None else record[key] for key in EPOCH_COLUMNS})
        self._epochs_file.flush()
        self._metrics.flush()
        for key in ("loss", "val_loss", "wer", "cer", "sparsity"):
            if record.get(key) is not None:
                self._events.add_scalar(f"epoch/{key}", record[key], record["epoch"])
        self._events.flush()

    def close(self) -> None:
        self._metrics.close()
        self._epochs_file.close()
        self._events.close()


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


def _old_rows(path: Path, first_epoch: int) -> Sequence[dict[str, str]]:
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if int(row["epoch"]) < first_epoch]
