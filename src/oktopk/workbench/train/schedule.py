"""The learning rate of every step, and the density of every step."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping

from oktopk.workbench.train.config import TrainConfig

_RAMP_START = 0.25
"""As in deep gradient compression: the first steps of a ramp send a quarter."""

_COSINE_END = 0.1


def learning_rate(config: TrainConfig, epoch: int, progress: float, num_epochs: float) -> float:
    """At `progress` (a part in [0, 1)) of `epoch`, of `num_epochs` in all; warmed up linearly where that is set."""
    passed = epoch + progress
    if passed < config.lr_warmup_epochs:
        return config.lr * max(passed, 1e-3) / config.lr_warmup_epochs
    return config.lr * _SCHEDULES[config.lr_schedule](config, epoch, passed, num_epochs)


def _divide(config: TrainConfig, epoch: int, passed: float, num_epochs: float) -> float:
    del passed, num_epochs
    return config.lr_decay**-epoch


def _steps(config: TrainConfig, epoch: int, passed: float, num_epochs: float) -> float:
    del passed, num_epochs
    return 0.1 ** bisect_right(config.milestones, epoch)


def _linear(config: TrainConfig, epoch: int, passed: float, num_epochs: float) -> float:
    """To zero at the end."""
    del epoch
    left = num_epochs - passed
    return max(0.0, left / max(1e-9, num_epochs - config.lr_warmup_epochs))


def _cosine(config: TrainConfig, epoch: int, passed: float, num_epochs: float) -> float:
    """Half a wave, to a tenth at the end."""
    left = _linear(config, epoch, passed, num_epochs)
    return _COSINE_END + (1.0 - _COSINE_END) * (1.0 - math.cos(math.pi * left)) / 2


_SCHEDULES: Mapping[str, Callable[[TrainConfig, int, float, float], float]] = {
    "divide": _divide,
    "steps": _steps,
    "linear": _linear,
    "cosine": _cosine,
}


def density_ramp(density: float, first: int, num_steps: int) -> Callable[[int], float]:
    """From a quarter down to `density`, exponentially, in the `num_steps` steps from `first` on."""
    start = max(density, _RAMP_START)

    def at(step: int) -> float:
        part = min(1.0, max(0.0, (step - first + 1) / num_steps))
        return max(density, start * (density / start) ** part)

    return at
