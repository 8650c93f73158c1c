"""What can be trained: each task builds a Workload."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from oktopk.launch import Member
from oktopk.train.config import ConfigError, TrainConfig
from oktopk.train.tasks.base import Workload
from oktopk.train.tasks.speech import build_speech

TASKS: Mapping[str, Callable[[TrainConfig, Member], Workload]] = {"lstman4": build_speech}


def build_workload(config: TrainConfig, member: Member) -> Workload:
    if config.task not in TASKS:
        raise ConfigError(f"task={config.task!r}: unknown; known: {', '.join(TASKS)}")
    return TASKS[config.task](config, member)
