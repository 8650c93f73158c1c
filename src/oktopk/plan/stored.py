"""A calibration as a file: measured once, planned with often."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from oktopk.console.files import machine, write_text
from oktopk.console.words import UsageError
from oktopk.plan.calibrate import Calibration
from oktopk.plan.model import Cost, Link, Machine


def plain(calibration: Calibration) -> dict[str, Any]:
    return asdict(calibration)


def calibration_of(values: Mapping[str, Any]) -> Calibration:
    parts: dict[str, Any] = values["machine"]
    costs = {key: Cost(**value) for key, value in parts.items() if key != "chosen_s"}
    whole = Machine(**costs, chosen_s=parts["chosen_s"])
    return Calibration(values["num_ranks"], Link(**values["link"]), whole)


def write_calibration(path: Path, calibration: Calibration) -> None:
    try:
        write_text(path, json.dumps({"measured_on": machine(), "calibration": plain(calibration)}, indent=1) + "\n")
    except OSError as error:
        raise UsageError(f"--save: '{path}': cannot be written ({error.strerror})") from error


def read_calibration(path: Path) -> Calibration:
    try:
        return calibration_of(json.loads(path.read_text())["calibration"])
    except OSError as error:
        raise UsageError(f"--calibration: '{path}': cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"--calibration: '{path}': is no calibration ({error}); write one with `oktopk advise --save`"
        ) from error
