"""Files that others read: whole or not at all, and where they were measured."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from oktopk.workbench.console.tables import Row
from oktopk.workbench.console.words import UsageError


def check_folder(folder: Path) -> None:
    """Make it, and see that it can be written to, before long work and not after it; UsageError where it cannot."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"--out: '{folder}': cannot be written to ({error.strerror}); choose another") from error


def write_text(path: Path, text: str) -> None:
    """Readers never see half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_results(path: Path, command: Sequence[str], rows: Sequence[Row], seconds: float, **more: Any) -> None:
    """Measured rows, with the machine they are from and the command that makes them again."""
    content = {
        "machine": machine(),
        "command": shlex.join(["oktopk", *command]),
        "seconds": round(seconds, 1),
        **more,
        "rows": list(rows),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(content, indent=1) + "\n")


def machine() -> dict[str, Any]:
    """Where this runs."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _field(path: str, key: str) -> str | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), None)
