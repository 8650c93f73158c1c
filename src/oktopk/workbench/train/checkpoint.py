"""Checkpoints: atomic, complete for every worker, refused in one line where they do not fit.

<folder>/step_00000120/shared.pt    model, optimizer, position; written by worker 0, the same for all
<folder>/step_00000120/rank_3.pt    what is this worker's own: residuals, thresholds, regions, buffers, RNG
<folder>/latest.json                names the newest complete one; written last
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from oktopk.comm.base import Communicator
from oktopk.workbench.console.files import write_text

FORMAT = 1


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message says which, why, and what to do."""


@dataclass(frozen=True)
class Checkpoint:
    """What was saved."""

    path: Path
    shared: dict[str, Any]
    own: dict[str, Any]


def save(folder: Path, step: int, shared: Mapping[str, Any], own: Mapping[str, Any], comm: Communicator) -> Path:
    """Called by every worker with its `own` part; returns when all of it is on disk and `latest.json` says so.

    The checkpoint that `latest.json` named before is kept too. All others are removed, those of later steps as well:
    they are left from a run that was abandoned.
    """
    target = folder / f"step_{step:08d}"
    target.mkdir(parents=True, exist_ok=True)
    _write_atomically(target / f"rank_{comm.rank}.pt", {"format": FORMAT, **own})
    if comm.rank == 0:
        _write_atomically(target / "shared.pt", {"format": FORMAT, "size": comm.size, "step": step, **shared})
    comm.barrier()
    if comm.rank == 0:
        kept = {target}
        with suppress(CheckpointError):  # the first one has no predecessor
            kept.add(latest(folder))
        write_text(folder / "latest.json", json.dumps({"checkpoint": target.name}))
        for other in set(folder.glob("step_*")) - kept:
            shutil.rmtree(other, ignore_errors=True)  # a folder that stays is no reason to stop training
    comm.barrier()
    return target


def latest(folder: Path) -> Path:
    pointer = folder / "latest.json"
    if not pointer.is_file():
        raise CheckpointError(f"{folder}: holds no checkpoint to resume from; start without --resume")
    try:
        return folder / Path(str(json.loads(pointer.read_text())["checkpoint"])).name
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{pointer}: is damaged ({error}); delete it and start without --resume") from error


def load(path: Path, rank: int, size: int, fingerprint: str) -> Checkpoint:
    """Both parts for this worker; CheckpointError for another model, another world size or a damaged file."""
    shared = read(path / "shared.pt")
    if shared.get("fingerprint") != fingerprint:
        raise CheckpointError(
            f"{path}: was saved from another model ({shared.get('fingerprint')}, this one is {fingerprint}); "
            "resume with the settings it was trained with"
        )
    if shared.get("size") != size:
        raise CheckpointError(
            f"{path}: was saved by {shared.get('size')} workers, this run has {size}; resume with as many, "
            "or use --pretrain to take the weights only"
        )
    return Checkpoint(path, shared, read(path / f"rank_{rank}.pt"))


def read(path: Path) -> dict[str, Any]:
    """One file, tensors and plain values only."""
    if not path.is_file():
        raise CheckpointError(f"{path}: does not exist")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{path}: cannot be read, it is damaged or no checkpoint ({reason})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds no checkpoint but {type(content).__name__}")
    return cast("dict[str, Any]", content)


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """The model's weights from a checkpoint folder, its shared.pt, or a plain saved state_dict."""
    content = read(path / "shared.pt" if path.is_dir() else path)
    return cast("dict[str, torch.Tensor]", content.get("model", content))


def _write_atomically(path: Path, content: Mapping[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        torch.save(dict(content), file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
