"""A calibration as a file: measured once, planned with often."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from oktopk.workbench.console.files import machine, write_text
from oktopk.workbench.console.words import UsageError
from oktopk.workbench.plan.calibrate import Calibration
from oktopk.workbench.plan.model import Cost, Link, Machine


def plain(calibration: Calibration) -> dict[str, Any]:
    return asdict(calibration)


def calibration_of(values: Mapping[str, Any]) -> Calibration:
    """ValueError, KeyError or TypeError for what is none."""
    parts, link = _figures(values["machine"]), _figures(values["link"])
    costs = {key: Cost(**value) for key, value in parts.items() if key != "chosen_s"}
    whole = Machine(**costs, chosen_s=parts["chosen_s"])
    return Calibration(int(values["num_ranks"]), Link(**link), whole)


def _figures(values: Any) -> dict[str, Any]:
    """Finite numbers, at least 0, or such by name."""
    if not isinstance(values, dict):
        raise TypeError(f"{values!r} is no set of figures")
    found = cast("dict[str, Any]", values)
    for key, value in found.items():
        if isinstance(value, dict):
            _figures(value)
        elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ValueError(f"{key}={value!r} is no figure")
    return found


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
